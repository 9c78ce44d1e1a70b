// The address: which view, and what it shows.
import { useEffect, useState } from "preact/hooks";

/** `{parts, query}` of the address after `#/`; no parts while it holds a key. */
function read() {
  if (!location.hash.startsWith("#/")) return { parts: [], query: new URLSearchParams() };
  const [path, query = ""] = location.hash.slice(2).split("?");
  return { parts: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(query) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function useRoute() {
  const [route, setRoute] = useState(read);
  useEffect(() => {
    const follow = () => setRoute(read());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return route;
}

/** Go to an address. `isSame`: the same place with other filters, so `Back` does not stop here. */
export function go(path, isSame = false) {
  if (!isSame) {
    location.hash = path;
    return;
  }
  history.replaceState(null, "", `#${path}`);
  dispatchEvent(new Event("hashchange"));
}

/** An address with the values that are not empty, in the order of `query`. */
export function withQuery(path, query) {
  const given = Object.entries(query).filter(([, value]) => value);
  const text = given
    .map(([key, value]) => (value === true ? key : `${key}=${encodeURIComponent(value)}`))
    .join("&");
  return text ? `${path}?${text}` : path;
}

export function useTitle(title) {
  useEffect(() => {
    document.title = title ? `${title} · Parrot` : "Parrot";
  }, [title]);
}
