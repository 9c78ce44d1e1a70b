// How serious an event is, and which serious events the visitor has not seen.

const SEEN = "parrot events seen"; // The Unix time of the newest serious event that was shown.
const SERIOUS = new Set(["engine lost"]);
const WARNINGS = new Set(["call retried", "engine drains", "run failed"]);

export const severityOf = ({ kind }) =>
  SERIOUS.has(kind) ? "serious" : WARNINGS.has(kind) ? "warning" : "information";

const newestSerious = (rows) =>
  Math.max(
    0,
    ...[...rows.values()]
      .filter((event) => severityOf(event) === "serious")
      .map((event) => event.at),
  );

/** The browser may not allow the page to keep anything. */
function seen() {
  try {
    return Number(localStorage.getItem(SEEN) ?? 0);
  } catch {
    return 0;
  }
}

export const hasUnread = (rows) => newestSerious(rows) > seen();

export function setSeen(rows) {
  const newest = newestSerious(rows);
  try {
    if (newest > seen()) localStorage.setItem(SEEN, String(newest));
  } catch {
    // The dot stays.
  }
}
