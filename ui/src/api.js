// How the page talks to ServeCore: requests, and feeds of rows that follow what changes.
import { useEffect, useRef, useState } from "preact/hooks";

const RETRY_MS = 1000;

export class Failure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, options) {
  const response = await fetch(path, options);
  const payload = await response.json().catch(() => ({}));
  if (!response.ok) throw new Failure(response.status, payload.error?.message ?? response.statusText);
  return payload;
}

/** Resolve if the feed can be opened. An EventSource does not tell why it failed. */
async function check(path) {
  const stop = new AbortController();
  const response = await fetch(`api/${path}`, { signal: stop.signal });
  if (!response.ok) {
    const payload = await response.json().catch(() => ({}));
    throw new Failure(response.status, payload.error?.message ?? response.statusText);
  }
  stop.abort();
}

/** Ask an endpoint of the page. */
export const get = (path) => request(`api/${path}`);
export const post = (path, body = {}) => postTo(`api/${path}`, body);

/** Ask any endpoint of ServeCore. */
export const postTo = (path, body) =>
  request(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });

/** [who looks, set it]: undefined while that is not known, null for nobody. */
export function useVisitor() {
  const [visitor, setVisitor] = useState();
  useEffect(() => {
    const enter = (known) => known.then(setVisitor, () => setVisitor(null));
    const withKey = () => {
      const [, key] = location.hash.match(/^#key=(.*)$/) ?? [];
      if (key === undefined) return false;
      history.replaceState(null, "", location.pathname); // it is not to be kept
      enter(post("enter", { key }));
      return true;
    };
    if (!withKey()) enter(get("me"));
    addEventListener("hashchange", withKey);
    return () => removeEventListener("hashchange", withKey);
  }, []);
  return [visitor, setVisitor];
}

/**
 * Rows of a feed by their keys, kept up to date until the component goes. After a break it goes on
 * from the last version that it has. `error` is why the feed has ended for good, if it has.
 */
export function useFeed(path) {
  const [state, setState] = useState({ rows: new Map(), error: null, isLive: false });
  useEffect(() => {
    let source, timer, version;
    let rows = new Map();
    const apply = (event) => {
      const changes = JSON.parse(event.data);
      rows = changes.whole ? new Map() : new Map(rows);
      for (const key of changes.gone) rows.delete(key);
      for (const [key, row] of Object.entries(changes.rows)) rows.set(key, row);
      version = changes.version;
      setState({ rows, error: null, isLive: true });
    };
    const fail = (event) => {
      source.close();
      if (event.data !== undefined) {
        setState({ rows, error: JSON.parse(event.data).error.message, isLive: false });
        return;
      }
      setState({ rows, error: null, isLive: false });
      timer = setTimeout(() => check(path).then(connect, retry), RETRY_MS);
    };
    const retry = (failure) => {
      if (failure.status === 401) location.reload();
      else if (failure.status === 404) setState({ rows, error: failure.message, isLive: false });
      else timer = setTimeout(() => check(path).then(connect, retry), RETRY_MS);
    };
    const connect = () => {
      const since = version === undefined ? "" : `?since=${encodeURIComponent(version)}`;
      source = new EventSource(`api/${path}${since}`);
      source.addEventListener("changes", apply);
      source.addEventListener("error", fail);
    };
    connect();
    return () => {
      clearTimeout(timer);
      source.close();
    };
  }, [path]);
  return state;
}

/** The text of a variable as it is generated, from a session of the page's own. */
export function useStream(url) {
  const [state, setState] = useState({ text: "", isDone: false, error: null });
  const text = useRef("");
  useEffect(() => {
    text.current = "";
    setState({ text: "", isDone: false, error: null });
    if (!url) return undefined;
    const source = new EventSource(url);
    source.addEventListener("delta", (event) => {
      text.current += JSON.parse(event.data).text;
      setState({ text: text.current, isDone: false, error: null });
    });
    source.addEventListener("done", (event) => {
      source.close();
      setState({ text: JSON.parse(event.data).content, isDone: true, error: null });
    });
    source.addEventListener("error", (event) => {
      source.close();
      const error = event.data ? JSON.parse(event.data).error.message : "the connection broke";
      setState({ text: text.current, isDone: true, error });
    });
    return () => source.close();
  }, [url]);
  return state;
}
