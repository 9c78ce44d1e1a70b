// Runs as the list shows them: names, states, groups by day, and requests of one client as one row.
import { NATIVE_ERROR, count, day } from "./format.js";

const LIST_FIELDS = [
  "calls",
  "done",
  "failed",
  "cancelled",
  "running",
  "prompt_tokens",
  "cached_tokens",
  "output_tokens",
  "prefix_breaks",
  "cost",
  "busy_s",
];

const OWN_APP = "page"; // The application of the playground's runs.

/** The application, or the first functions, or the id. */
export const nameOf = (run) =>
  [
    (run.apps ?? []).join() === OWN_APP
      ? ["playground", (run.functions ?? []).join(", ")].filter(Boolean).join(": ")
      : "",
    (run.apps ?? []).join(", "),
    run.app,
    (run.functions ?? []).join(", "),
  ].find((name) => name) ?? `Run ${run.id}`;

/** The heading of a run: of API requests, the last question. */
export const titleOf = (run) => (kindOf(run) === "API" && run.words) || nameOf(run);

/** `program`, `agent` or `API`: requests of a client that knows no sessions. */
export const kindOf = (run) =>
  ["conversation", "api", "API"].includes(run.kind) ? "API" : (run.kind ?? "program");

// The APIs by the names of their calls.
const APIS = {
  chat: "OpenAI API",
  completion: "OpenAI API",
  responses: "OpenAI Responses API",
  messages: "Anthropic API",
};

/** `program`, `agent`, or the API that the requests used. */
export function kindName(run) {
  const kind = kindOf(run);
  return kind === "API" ? (APIS[run.functions?.[0]] ?? kind) : kind;
}

/** The class of a run's state. A live program without a running call waits for its own code. */
export function stateOf(run) {
  if (run.state === "finished") return "done";
  if (run.state === "failed") return "failed";
  if (run.state === "cancelled") return "stopped";
  if (run.running > 0) return "running";
  if (kindOf(run) !== "API") return "waiting";
  if (run.failed > 0) return "failed";
  return run.cancelled > 0 && run.done === 0 ? "stopped" : "done";
}

export const isNow = (entry) => entry.state === "running" || entry.state === "waiting";

/** Seconds from the begin to the end of a run; of API requests, the seconds that they took. */
export function wallSeconds(run, now) {
  if (kindOf(run) === "API" && !run.running) return run.busy_s || null;
  if (run.ended_at != null) return run.ended_at - run.created_at;
  return isNow({ state: stateOf(run) }) ? Math.max(0, now - run.created_at) : null;
}

/** The second line of a row: the error, or the last prompt's first words, or the functions. */
function wordsOf(run, state) {
  if (state === "failed" && run.error) return run.error.replace(NATIVE_ERROR, "$1: ");
  if (run.words) return run.words;
  const functions = (run.functions ?? []).join(", ");
  return functions === nameOf(run) ? "" : functions;
}

export function entryOf(run) {
  const state = stateOf(run);
  return {
    id: String(run.id),
    run,
    members: [run],
    state,
    kind: kindOf(run),
    tag: kindName(run),
    name: nameOf(run),
    words: wordsOf(run, state),
    at: run.created_at,
  };
}

/** Requests of one tenant and client through one API share a row. */
const foldOf = ({ run, name, tag }) => [run.tenant, name, tag].join(" ");

/** One entry for API requests that share a row, the newest first. */
function folded(entries) {
  const [newest] = entries;
  const sums = Object.fromEntries(
    LIST_FIELDS.map((field) => [
      field,
      entries.reduce((sum, { run }) => sum + (run[field] ?? 0), 0),
    ]),
  );
  const running = entries.find(({ state }) => state === "running");
  const failed = entries.filter(({ state }) => state === "failed");
  const state = running ? "running" : failed.length ? "failed" : newest.state;
  const number = `${count(entries.length)} requests`;
  const { words } = failed[0] ?? running ?? newest;
  return {
    ...newest,
    id: foldOf(newest),
    run: { ...newest.run, ...sums },
    members: entries.map((entry) => entry.run),
    state,
    words: `${failed.length ? `${failed.length} of ${number} failed` : number}${words && `; the last: ${words}`}`,
    isBad: failed.length > 0,
  };
}

/** An entry for each run, the newest first. */
export const entriesOf = (runs) => runs.map(entryOf).sort((a, b) => b.at - a.at);

/** The rows of the list. Entries that were filtered out are not in them. */
export function foldEntries(entries) {
  const groups = new Map();
  for (const entry of entries) {
    const key = entry.kind === "API" ? foldOf(entry) : entry.id;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(entry);
  }
  return [...groups.values()].map((group) => (group.length > 1 ? folded(group) : group[0]));
}

const hasFailed = (entry) => entry.state === "failed" || entry.run.failed > 0;

/** `cancelled` is offered if there is such a run. */
export const FILTERS = {
  all: () => true,
  running: isNow,
  finished: (entry) => entry.state === "done" && !hasFailed(entry),
  failed: hasFailed,
  cancelled: (entry) => entry.state === "stopped",
};

/** Whether an entry has the words, in any of the texts that the list knows of it. */
export function matches(entry, text) {
  const wanted = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.length) return true;
  const texts = entry.members.flatMap((run) => [
    nameOf(run),
    run.words,
    run.error,
    run.tenant,
    run.id,
    ...(run.functions ?? []),
    ...run.models,
  ]);
  const all = [entry.tag, ...texts].join(" ").toLowerCase();
  return wanted.every((word) => all.includes(word));
}

const SORTS = {
  calls: ({ run }) => run.calls,
  cached: ({ run }) => (run.prompt_tokens ? run.cached_tokens / run.prompt_tokens : -1),
  time: ({ run }, now) => wallSeconds(run, now) ?? -1,
  cost: ({ run }) => run.cost ?? 0,
  prompt: ({ run }) => run.prompt_tokens,
  output: ({ run }) => run.output_tokens,
};

/** Entries in groups: `Now`, then by day; sorted by another column they are one group. */
export function grouped(entries, sort, now) {
  const by = SORTS[sort];
  if (by) return [["", [...entries].sort((a, b) => by(b, now) - by(a, now))]];
  return [...Map.groupBy(entries, (entry) => (isNow(entry) ? "Now" : day(entry.at, now)))].sort(
    ([a], [b]) => (b === "Now") - (a === "Now"),
  );
}

/** What `prefix_breaks` counts, for a tooltip. */
export const BREAKS =
  "Prompts that differ from what their program had sent before, so less of them is cached";
