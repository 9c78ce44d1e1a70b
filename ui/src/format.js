// How numbers, times and states are written everywhere on the page.

const WHOLE = new Intl.NumberFormat("en"); // Making one for each number takes long.

export function count(n) {
  if (n == null) return "";
  if (n >= 1e9) return `${(n / 1e9).toFixed(1)}G`;
  if (n >= 1e6) return `${(n / 1e6).toFixed(1)}M`;
  if (n >= 1e4) return `${Math.round(n / 1e3)}k`;
  return Number.isInteger(n) ? WHOLE.format(n) : String(Math.round(n * 10) / 10);
}

export const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

export function seconds(s) {
  if (s == null) return "";
  if (s < 0.0995) return `${Math.round(s * 1000)} ms`;
  if (s < 99.5) return `${s.toFixed(1)} s`;
  const whole = Math.round(s);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.round(whole / 60);
  return `${Math.floor(minutes / 60)} h${minutes % 60 ? ` ${minutes % 60} min` : ""}`;
}

/** A part of a whole: `62 %`; nothing without a whole. */
export const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "");

export const dollars = (cost) => (cost > 0 ? `$${cost.toFixed(cost < 1 ? 4 : 2)}` : "");

const twoDigits = (n) => String(n).padStart(2, "0");

/** The time of day of a Unix time. */
export function clock(at) {
  const date = new Date(at * 1000);
  return `${twoDigits(date.getHours())}:${twoDigits(date.getMinutes())}:${twoDigits(date.getSeconds())}`;
}

export const fullDate = (at) =>
  new Date(at * 1000).toLocaleString("en-GB", { dateStyle: "full", timeStyle: "medium" });

const dayNumber = (date) =>
  Math.floor((date.getTime() - date.getTimezoneOffset() * 60_000) / 86_400_000);

/** `Today`, `Yesterday` or the date of a Unix time. */
export function day(at, now = Date.now() / 1000) {
  const date = new Date(at * 1000);
  const age = dayNumber(new Date(now * 1000)) - dayNumber(date);
  if (age <= 0) return "Today";
  return age === 1
    ? "Yesterday"
    : date.toLocaleDateString("en-GB", { weekday: "long", day: "numeric", month: "long" });
}

/** How long ago: `now`, `40 s ago`, `2 min ago`. */
export function ago(at, now) {
  const age = Math.max(0, now - at);
  if (age < 2) return "now";
  if (age < 100) return `${Math.round(age)} s ago`;
  return age < 5400 ? `${Math.round(age / 60)} min ago` : `${Math.round(age / 3600)} h ago`;
}

/** The start of an error of a native function, with the function's name. */
export const NATIVE_ERROR = /^native function `([^`]*)` failed: /;

export const cut = (text, length) =>
  text.length > length ? `${text.slice(0, length - 1)}…` : text;

/** The words of states, by the class that draws them. */
export const WORDS = {
  running: "running",
  queued: "queued",
  waiting: "waiting",
  done: "finished",
  failed: "failed",
  stopped: "cancelled",
  skipped: "not run",
};
