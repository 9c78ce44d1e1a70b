// Sentences on one call: what it has waited for, and what it did. A sentence is a list of strings,
// `{call}`: the id of a call, by its name, `{name}`: a variable, and `{run}`: the id of a run.
import { count, seconds } from "./format.js";
import { lastParent, parentsOf } from "./graph.js";

const BLINK_S = 0.001; // Shorter times are not told.
const CLOSE_S = 0.05; // An input that was set this long before the call was ready held it up.
const MAX_NAMES = 3;

const since = (from, to) => (from == null || to == null ? 0 : Math.max(0, to - from));

/** Words joined as "a, b and c". */
export function listed(items) {
  return items.flatMap((item, i) =>
    [i === 0 ? "" : i === items.length - 1 ? " and " : ", ", item].filter(Boolean),
  );
}

const calls = (ids) =>
  listed([
    ...ids.slice(0, MAX_NAMES).map((call) => ({ call })),
    ...(ids.length > MAX_NAMES ? ["others"] : []),
  ]);

/** `rows`: of the run's feed. `now`: seconds since the run began. */
export function why(graph, id, rows, now) {
  const call = graph.calls.get(id);
  if (call.state === "failed" || call.state === "cancelled") return whyNot(graph, id);
  if (call.activated_s == null) {
    return [
      graph.hasEnded
        ? "Did not run: no reader needed its output."
        : "No reader needs its output yet.",
    ];
  }
  if (call.ready_s == null) return waitsFor(graph, id, rows);
  const parts = [];
  const waited = since(call.activated_s, call.ready_s);
  if (waited > BLINK_S) parts.push([`waited ${seconds(waited)}`, ...holdUp(graph, id, rows)]);
  if (call.started_s == null)
    return sentence([
      ...parts,
      [`has been queued for an engine for ${seconds(since(call.ready_s, now))}`],
    ]);
  const queued = since(call.ready_s, call.started_s);
  if (queued > BLINK_S) parts.push([`was queued for ${seconds(queued)}`]);
  const where = call.engine ? ` on ${call.engine}` : "";
  const did = work(call, rows);
  if (call.finished_s == null && !call.output_tokens)
    return sentence([...parts, ...soFar(call, now)], where);
  const end = call.finished_s == null ? " so far" : "";
  const took = ` in ${seconds(since(call.started_s, call.finished_s ?? now))}${end}`;
  return sentence([...parts, ...(did.length ? did : [["ran"]])], `${took}${where}`);
}

/** What a running call has done, while its tokens are not known yet. */
function soFar(call, now) {
  const ran = seconds(since(call.started_s, now));
  if (call.first_token_s == null) return [[`has run for ${ran}`]];
  return [
    [`read its prompt in ${seconds(since(call.started_s, call.first_token_s))}`],
    [`has generated for ${seconds(since(call.first_token_s, now))}`],
  ];
}

/** How much of a prompt was cached. */
export const fromCache = (cached, prompt) =>
  `took ${count(cached)} of ${count(prompt)} prompt tokens from the cache`;

/** What a call did on its engine. */
function work(call, rows) {
  if (call.reused) {
    const { reused_from: run } = call;
    const isOwn = run === rows.get("session")?.id;
    const of = isOwn ? [" of this run"] : run ? [" of ", { run }] : [];
    return [["took the result of an identical call", ...of]];
  }
  if (call.kind === "native") return [["ran in the sandbox"]];
  const parts = [];
  const prompt = call.cached_tokens + call.computed_tokens;
  if (prompt) parts.push([fromCache(call.cached_tokens, prompt)]);
  if (call.recomputed_tokens)
    parts.push([`computed ${count(call.recomputed_tokens)} tokens for the second time`]);
  if (call.output_tokens) parts.push([`generated ${count(call.output_tokens)} tokens`]);
  if (call.attempts > 1) parts.push([`needed ${call.attempts} attempts`]);
  return parts;
}

/** The input that came last. */
function holdUp(graph, id, rows) {
  const call = graph.calls.get(id);
  const parent = lastParent(graph, id);
  const parentEnd = parent === undefined ? null : graph.calls.get(parent).finished_s;
  const set = lastSet(call, rows);
  if (set && set.at > (parentEnd ?? 0) && since(set.at, call.ready_s) < CLOSE_S) {
    const last =
      parentEnd === null ? [] : [`, the last ${seconds(since(parentEnd, call.ready_s))} of it`];
    return [...last, " for ", { name: set.name }, ", which your program set"];
  }
  if (parent === undefined) return [" for an input that your program set"];
  return [" for ", { call: parent }, ", its last input"];
}

/** The input that the program set last before the call was ready. */
export function lastSet(call, rows) {
  let last = null;
  for (const variable of call.inputs) {
    const row = rows.get(`var:${variable}`);
    if (row?.producer == null && row?.set_s != null && (last === null || row.set_s > last.at))
      last = { name: row.name, at: row.set_s };
  }
  return last;
}

function waitsFor(graph, id, rows) {
  const call = graph.calls.get(id);
  const open = parentsOf(graph, id).filter((parent) => graph.calls.get(parent).finished_s == null);
  if (open.length) return ["Waits for ", ...calls(open), "."];
  const unset = call.inputs
    .map((variable) => rows.get(`var:${variable}`))
    .filter((row) => row && row.producer == null && row.state === "empty");
  if (unset.length)
    return [
      "Waits for ",
      ...listed(unset.slice(0, MAX_NAMES).map(({ name }) => ({ name }))),
      ", which your program has not set.",
    ];
  return ["Waits for an input."];
}

/** The call that made this one fail or stop; itself, if it ran. */
export function causeOf(graph, id) {
  const seen = new Set();
  for (let at = id; ;) {
    seen.add(at);
    const { state, ready_s } = graph.calls.get(at);
    if (ready_s != null) return at;
    const next = parentsOf(graph, at).find(
      (parent) => graph.calls.get(parent).state === state && !seen.has(parent),
    );
    if (next === undefined) return at;
    at = next;
  }
}

function whyNot(graph, id) {
  const call = graph.calls.get(id);
  const isFailed = call.state === "failed";
  const verb = isFailed ? "failed" : "was cancelled";
  if (call.ready_s == null) {
    const cause = causeOf(graph, id);
    if (cause !== id) return ["Did not run, because ", { call: cause }, ` ${verb}.`];
    return [isFailed ? "Did not run, because an input failed." : "Was cancelled before it ran."];
  }
  if (call.started_s == null) {
    return sentence([
      [`${verb} after ${seconds(since(call.ready_s, call.finished_s))} in the queue`],
    ]);
  }
  const where = call.engine
    ? ` on ${call.engine}`
    : call.kind === "native"
      ? " in the sandbox"
      : "";
  const attempts = call.attempts > 1 ? `, in attempt ${call.attempts}` : "";
  return sentence([
    [
      `${verb} ${seconds(since(call.started_s, call.finished_s))} after its start${where}${attempts}`,
    ],
  ]);
}

function sentence(parts, end = "") {
  const joined = parts.flatMap((part, i) => [
    ...(i === 0 ? [] : [i === parts.length - 1 ? " and " : ", "]),
    ...part,
  ]);
  const [first, ...rest] = joined;
  return [`${first[0].toUpperCase()}${first.slice(1)}`, ...rest, `${end}.`];
}
