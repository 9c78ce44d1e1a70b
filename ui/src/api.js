// Requests to ServeCore, and feeds of rows that follow every change.
import { useEffect, useState } from "preact/hooks";

const FIRST_RETRY_MS = 1000;
const MAX_RETRY_MS = 8000;
// A hidden page closes its feeds, because a browser has six connections to a server.
const HIDDEN_MS = 5000;
const MAX_SKEW_S = 2; // The clocks of browser and server may differ by this without a correction.

export class Failure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let skew = 0; // seconds that the server's clock is ahead

/** The server's Unix time. */
export const serverNow = () => Date.now() / 1000 + skew;

async function failureOf(response) {
  const payload = await response.json().catch(() => ({}));
  return new Failure(response.status, payload.error?.message ?? response.statusText);
}

async function answerOf(path, options) {
  const response = await fetch(path, options).catch(() => {
    throw new Failure(0, `No answer from ${location.host}.`);
  });
  const ahead = Date.parse(response.headers.get("date") ?? "") / 1000 + 0.5 - Date.now() / 1000;
  if (!Number.isNaN(ahead)) skew = Math.abs(ahead) > MAX_SKEW_S ? ahead : 0;
  if (!response.ok) throw await failureOf(response);
  return response;
}

const request = async (path, options) => (await answerOf(path, options)).json().catch(() => ({}));

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

/** Resolve if the feed can be opened. An EventSource does not tell why it failed. */
async function check(path) {
  const stop = new AbortController();
  await answerOf(`api/${path}`, { signal: stop.signal });
  stop.abort();
}

/** The rows of a feed as they are now, without following it. */
export async function readOnce(path) {
  const stop = new AbortController();
  const response = await answerOf(`api/${path}`, { signal: stop.signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    text += value ?? "";
    const end = text.indexOf("\n\n");
    if (end >= 0) {
      stop.abort();
      const data = text
        .slice(0, end)
        .split("\n")
        .find((line) => line.startsWith("data: "));
      const event = JSON.parse(data.slice(6));
      if (event.error) throw new Failure(response.status, event.error.message);
      return new Map(Object.entries(event.rows));
    }
    if (done) throw new Failure(0, "the connection broke");
  }
}

/** [visitor, set it]: undefined while it is unknown, null without a valid key. */
export function useVisitor() {
  const [visitor, setVisitor] = useState();
  useEffect(() => {
    let timer;
    const enter = (known) =>
      known.then(setVisitor, (failure) => {
        if (failure.status) setVisitor(null);
        else timer = setTimeout(() => enter(get("me")), FIRST_RETRY_MS);
      });
    const withKey = () => {
      const [, key] = location.hash.match(/^#key=(.*)$/) ?? [];
      if (key === undefined) return false;
      history.replaceState(null, "", location.pathname); // The key must not stay in the address.
      enter(post("enter", { key }));
      return true;
    };
    if (!withKey()) enter(get("me"));
    addEventListener("hashchange", withKey);
    return () => {
      clearTimeout(timer);
      removeEventListener("hashchange", withKey);
    };
  }, []);
  return [visitor, setVisitor];
}

const NO_ROWS = {
  rows: new Map(),
  error: null,
  status: 0,
  isLive: false,
  lostAt: null,
  retryAt: null,
};

/**
 * Rows of a feed by their keys, kept up to date until the component goes. After a break it continues
 * from the last version. `error`: why the feed has ended for good. `lostAt`, `retryAt`: Unix times of
 * a lost connection and of the next attempt; `retry` makes it now. No path: no feed.
 */
export function useFeed(path) {
  const [state, setState] = useState(NO_ROWS);
  useEffect(() => {
    setState(NO_ROWS);
    if (!path) return undefined;
    return follow(path, setState);
  }, [path]);
  return state;
}

function follow(path, setState) {
  let source, timer, hiding, version, lostAt;
  let rows = new Map();
  let pause = FIRST_RETRY_MS;
  let isOver = false;
  const show = (fields) => setState({ ...NO_ROWS, rows, ...fields });
  const apply = (event) => {
    const changes = JSON.parse(event.data);
    rows = changes.whole ? new Map() : new Map(rows);
    for (const key of changes.gone) rows.delete(key);
    for (const [key, row] of Object.entries(changes.rows)) rows.set(key, row);
    version = changes.version;
    lostAt = undefined;
    pause = FIRST_RETRY_MS;
    show({ isLive: true });
  };
  const end = (status, message) => {
    isOver = true;
    show({ error: message, status });
  };
  const lose = () => {
    lostAt ??= Date.now() / 1000;
    const retry = () => {
      clearTimeout(timer);
      check(path).then(connect, refuse);
    };
    timer = setTimeout(retry, pause);
    show({ lostAt, retryAt: Date.now() / 1000 + pause / 1000, retry });
    pause = Math.min(2 * pause, MAX_RETRY_MS);
  };
  const fail = (event) => {
    source.close();
    if (event.data !== undefined) end(0, JSON.parse(event.data).error.message);
    else lose();
  };
  const refuse = (failure) => {
    if (failure.status === 401) location.reload();
    else if (failure.status === 403 || failure.status === 404) end(failure.status, failure.message);
    else lose();
  };
  const connect = () => {
    const since = version === undefined ? "" : `?since=${encodeURIComponent(version)}`;
    source = new EventSource(`api/${path}${since}`);
    source.addEventListener("changes", apply);
    source.addEventListener("error", fail);
    source.addEventListener("open", () => version !== undefined && show({ isLive: true }));
  };
  const disconnect = () => {
    clearTimeout(timer);
    source?.close();
  };
  const hide = () => {
    clearTimeout(hiding);
    if (document.hidden) hiding = setTimeout(disconnect, HIDDEN_MS);
    else if (!isOver && source.readyState === EventSource.CLOSED) connect();
  };
  connect();
  document.addEventListener("visibilitychange", hide);
  return () => {
    isOver = true;
    clearTimeout(hiding);
    document.removeEventListener("visibilitychange", hide);
    disconnect();
  };
}

export const rowsOf = (rows, kind) =>
  [...rows]
    .filter(([key]) => key.startsWith(`${kind}:`))
    .map(([key, row]) => ({ ...row, key: key.slice(kind.length + 1) }));
