// Where the wall time of a run went: the critical path, the queue, and the program's own code.
import { criticalPath } from "./graph.js";
import { lastSet } from "./why.js";

const LEAST_S = 0.002; // Shorter gaps are not shown.
const MAX_SEGMENTS = 200; // More calls than this are told, but not drawn one by one.

/**
 * @param {object} graph
 * @param {Map<string, object>} rows of the run's feed
 * @param {number} now seconds since the run began
 * @param {?number} end seconds until which the program may have called; null: it is no program
 * @returns {{total: number, segments: object[], path: Map<string, string>}} segments from left to right:
 *   `{kind, from, to, id, before}`, with the kinds `call`, `running`, `queue` and `program`
 */
export function wallOf(graph, rows, now, end) {
  const path = criticalPath(graph);
  const segments = [];
  let at = 0;
  const add = (kind, to, fields) => {
    if (to - at > (kind === "call" || kind === "running" ? 0 : LEAST_S)) {
      segments.push({ kind, from: at, to, ...fields });
      at = to;
    }
  };
  for (const id of [...path.keys()].reverse()) {
    const call = graph.calls.get(id);
    if (call.ready_s == null) continue;
    const set = lastSet(call, rows);
    add("program", call.ready_s, {
      before: set && set.at > at ? { name: set.name } : { call: id },
    });
    add("queue", call.started_s ?? now, { id });
    if (call.started_s == null) continue;
    add(call.finished_s == null ? "running" : "call", call.finished_s ?? now, { id });
  }
  const isBusy = [...graph.calls.values()].some(
    (call) => call.state === "running" || call.state === "queued",
  );
  if (end !== null && !isBusy && segments.length) add("program", end, { isLast: true });
  return { total: at, segments: segments.slice(-MAX_SEGMENTS), path };
}

/** The share of the wall time that calls of each node take, by call. */
export function sharesOf({ total, segments }) {
  const shares = new Map();
  for (const { kind, id, from, to } of segments) {
    if (total > 0 && (kind === "call" || kind === "running"))
      shares.set(id, (shares.get(id) ?? 0) + (to - from) / total);
  }
  return shares;
}
