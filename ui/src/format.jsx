// How numbers and states are written everywhere on the page.
import { useEffect, useState } from "preact/hooks";

export const seconds = (s) =>
  s == null ? "" : s < 0.0995 ? `${Math.round(s * 1000)} ms` : s < 99.5 ? `${s.toFixed(1)} s` : `${Math.round(s / 60)} min`;

const UNITS = [
  [1e9, "G"],
  [1e6, "M"],
  [1e4, "k"],
];

export function count(n) {
  const [size, unit] = UNITS.find(([size]) => n >= size) ?? [1, ""];
  return unit === "k" ? `${Math.round(n / 1000)}k` : unit ? `${(n / size).toFixed(1)}${unit}` : String(n ?? 0);
}

export const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "");

/** Seconds since a Unix time, as time goes by. */
export function Age({ since }) {
  const [now, setNow] = useState(() => Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now() / 1000), 1000);
    return () => clearInterval(timer);
  }, []);
  const age = Math.max(0, Math.round(now - since));
  return <>{age < 120 ? `${age} s` : seconds(age)}</>;
}

export const State = ({ state }) => <span class={`state ${state}`}>{state}</span>;

/** The application, or the first functions, or the id. */
export const nameOf = (run) =>
  [run.apps, run.functions ?? []].map((names) => names.join(", ")).find((name) => name) ?? `Run ${run.id}`;

/** The state of a run in one word. A live run without a running call waits for its program. */
export const runState = (run) => (run.state !== "active" ? run.state : run.running > 0 ? "running" : "waiting");

export function Notice({ feed }) {
  if (feed.error) return <p class="notice">This view has ended: {feed.error}</p>;
  if (!feed.isLive && feed.rows.size) return <p class="notice">The connection is lost; trying again.</p>;
  return null;
}
