// Parts that several screens share: notices, loading, copying, and time that passes.
import { useEffect, useState } from "preact/hooks";
import { serverNow } from "./api.js";
import { clock } from "./format.js";
import { Glyph, Icon } from "./icons.jsx";
import { useTitle } from "./route.js";

const SLOW_MS = 200; // Rows that arrive earlier need no placeholder.

/** The server's Unix time, renewed each second while it `runs`. */
export function useNow(runs = true) {
  const [now, setNow] = useState(serverNow);
  useEffect(() => {
    if (!runs) return undefined;
    const timer = setInterval(() => setNow(serverNow()), 1000);
    return () => clearInterval(timer);
  }, [runs]);
  return now;
}

/** What `read` resolves to, and `first` until then. `read` may return nothing. It reads again when `deps` change. */
export function useRead(read, first, deps) {
  const [value, setValue] = useState(first);
  useEffect(() => {
    const reading = read();
    if (!reading) return undefined;
    let isOver = false;
    reading.then(
      (answer) => isOver || setValue(answer),
      () => {}, // `first`, or the last answer, is shown.
    );
    return () => {
      isOver = true;
    };
  }, deps);
  return value;
}

/** `[open, toggle]`: the ids of rows that were opened. */
export function useOpen(first) {
  const [open, setOpen] = useState(() => new Set(first));
  const toggle = (id) =>
    setOpen((old) => {
      const next = new Set(old);
      if (!next.delete(id)) next.add(id);
      return next;
    });
  return [open, toggle];
}

/** What colours mean. `words`: by the class of a mark. */
export const Legend = ({ words, name = "legend", children }) => (
  <p class={name}>
    {children}
    {Object.entries(words).map(([mark, word]) => (
      <span key={mark}>
        <i class={mark} />
        {word}
      </span>
    ))}
  </p>
);

/** `heads`: pairs of a name and whether its column has numbers. */
export const Table = ({ label, heads, children }) => (
  <div class="scroll" tabindex="0" role="region" aria-label={label}>
    <table>
      <thead>
        <tr>
          {heads.filter(Boolean).map(([name, isNumber], i) => (
            <th key={i} scope="col" class={isNumber && "n"}>
              {name}
            </th>
          ))}
        </tr>
      </thead>
      {children}
    </table>
  </div>
);

/** Whether the view is connected, and why it is not. */
export function Notice({ feed }) {
  if (feed.error) {
    return (
      <p class="notice bad" role="alert">
        <Glyph state="failed" />
        <span>
          <b>This view has ended:</b> {feed.error}
        </span>
      </p>
    );
  }
  return feed.lostAt === null ? null : <Lost feed={feed} />;
}

function Lost({ feed }) {
  useNow();
  const left = Math.max(0, Math.ceil(feed.retryAt - Date.now() / 1000));
  return (
    <p class="notice bad" role="alert">
      <Glyph state="failed" />
      <span>
        <b>No answer from {location.host}</b> since {clock(feed.lostAt)}. You see the data of that
        time. <span aria-live="off">Trying again in {left} s.</span>
      </span>
      <button class="btn small" type="button" onClick={feed.retry}>
        Try now
      </button>
    </p>
  );
}

export const Live = ({ feed }) =>
  feed.isLive ? (
    <span class="live">live</span>
  ) : feed.lostAt !== null ? (
    <span class="st failed">
      <Glyph state="failed" />
      not connected
    </span>
  ) : null;

/** Whether nothing has arrived for a while. */
export function useSlow(isWaiting) {
  const [isSlow, setSlow] = useState(false);
  useEffect(() => {
    if (!isWaiting) return setSlow(false);
    const timer = setTimeout(() => setSlow(true), SLOW_MS);
    return () => clearTimeout(timer);
  }, [isWaiting]);
  return isSlow;
}

/** Placeholders for rows; never over data. */
export function Bones({ rows = 8 }) {
  return (
    <div class="card table bones" aria-busy="true" role="group" aria-label="Loading">
      {Array.from({ length: rows }, (_, i) => (
        <div key={i} class="bone" />
      ))}
    </div>
  );
}

let announce = () => {};

/** Say one thing that has happened, for a moment. */
export const say = (text) => announce(text);

export function Toast() {
  const [text, setText] = useState("");
  useEffect(() => {
    let timer;
    announce = (words) => {
      clearTimeout(timer);
      setText(words);
      timer = setTimeout(() => setText(""), 2500);
    };
    return () => clearTimeout(timer);
  }, []);
  return (
    <p class={text ? "toast" : "sr"} role="status">
      {text}
    </p>
  );
}

export async function copy(text, what) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelected(text);
    say(`Copied ${what}`);
  } catch {
    say("The browser does not allow copying.");
  }
}

/** Copy on a page without TLS: browsers give it no clipboard. */
function copySelected(text) {
  const focused = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "sr";
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!isCopied) throw new Error("not copied");
}

/** A button that copies; with `children` they are its label, else it is an icon. */
export function CopyButton({ text, what, children }) {
  const act = () => copy(typeof text === "function" ? text() : text, what);
  return children ? (
    <button class="btn small" type="button" onClick={act}>
      <Icon name="copy" />
      {children}
    </button>
  ) : (
    <button
      class="btn ghost icon"
      type="button"
      aria-label={`Copy ${what}`}
      title={`Copy ${what}`}
      onClick={act}
    >
      <Icon name="copy" />
    </button>
  );
}

/** Save a text as a file. */
export function save(text, name, type = "application/json") {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** A part of several that are chosen one at a time. */
export function Segments({ label, options, chosen, onChoose }) {
  return (
    <div class="seg" role="group" aria-label={label}>
      {options.map(({ id, name, number }) => (
        <button key={id} type="button" aria-pressed={id === chosen} onClick={() => onChoose(id)}>
          {name}
          {number !== undefined && <b>{number}</b>}
        </button>
      ))}
    </div>
  );
}

/** `children`: why there is nothing at this address. */
export function NotFound({ what, children }) {
  useTitle("Not found");
  return (
    <div class="empty">
      <h1>There is no such {what}</h1>
      <p>{children} The address may be mistyped.</p>
      <a class="btn main" href="#/">
        All runs
      </a>
    </div>
  );
}

export const Empty = ({ title, children }) => (
  <div class="empty">
    <h2>{title}</h2>
    {children}
  </div>
);

/** A list to choose from. `all`: the first entry, which chooses nothing. */
export const Choice = ({ label, all, options, value, onChoose }) => (
  <label>
    <span class="sr">{label}</span>
    <select class="field" value={value} onChange={(event) => onChoose(event.target.value)}>
      {all && <option value="">{all}</option>}
      {options.map(([id, name]) => (
        <option key={id} value={id}>
          {name}
        </option>
      ))}
    </select>
  </label>
);

/** Search field; `/` focuses it. */
export function Search({ label, placeholder, value, onInput }) {
  return (
    <label class="search">
      <Icon name="find" />
      <span class="sr">{label}</span>
      <input
        class="field"
        type="search"
        placeholder={placeholder}
        value={value}
        onInput={(event) => onInput(event.target.value)}
      />
      <kbd aria-hidden="true">/</kbd>
    </label>
  );
}
