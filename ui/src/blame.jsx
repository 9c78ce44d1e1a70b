// The answer first: one sentence on where the time of a run went, and a bar that proves it.
import { useMemo } from "preact/hooks";
import { readOnce } from "./api.js";
import { NATIVE_ERROR, clock, cut, day, plural, seconds, share } from "./format.js";
import { useRead } from "./parts.jsx";
import { nameOf } from "./run_list.js";
import { fromCache } from "./why.js";

const TELL = 0.1; // Parts of the time below this are not told.
const MAX_NAMED = 3;
const MOST = 0.6; // Functions with less of the calls' time are not told alone.
const MAX_MESSAGE = 300; // Characters of an error in the first sentence.
const MANY = 40; // With more segments, the bar has no gaps.

/** A name in a sentence that opens the call. */
function CallName({ graph, id, onOpen, kind = "as-name" }) {
  const call = graph.calls.get(id);
  const name = call?.func_name || call?.output || "a call";
  return (
    <button class={kind} type="button" data-call={id} onClick={() => onOpen(id)}>
      {name}
    </button>
  );
}

/** Another run with its name and its time, if it is still listed. */
function OtherRun({ id }) {
  const read = () => readOnce("overview").then((rows) => rows.get(`session:${id}`));
  const run = useRead(read, undefined, [id]);
  return (
    <a href={`#/run/${id}`}>
      {run ? `${nameOf(run)} (${day(run.created_at)}, ${clock(run.created_at)})` : "another run"}
    </a>
  );
}

/** A sentence of `why.js` with its names. */
export function Sentence({ parts, graph, onOpen }) {
  return parts.map((part, i) => {
    if (typeof part === "string") return part;
    if (part.call) return <CallName key={i} graph={graph} id={part.call} onOpen={onOpen} />;
    if (part.run) return <OtherRun key={i} id={part.run} />;
    return <b key={i}>{part.name}</b>;
  });
}

/** The functions on the critical path with the most time, in its order: `[id, seconds]`. */
function mainCalls(graph, segments) {
  const byName = new Map();
  for (const { kind, id, from, to } of segments) {
    if (kind !== "call") continue;
    const name = graph.calls.get(id).func_name;
    const known = byName.get(name) ?? { id, sum: 0, longest: 0, number: 0 };
    known.sum += to - from;
    known.number += 1;
    if (to - from > known.longest) Object.assign(known, { id, longest: to - from });
    byName.set(name, known);
  }
  const kept = new Set([...byName.values()].sort((a, b) => b.sum - a.sum).slice(0, MAX_NAMED));
  return [...byName.values()].filter((one) => kept.has(one));
}

const sumOf = (segments) => segments.reduce((sum, { from, to }) => sum + (to - from), 0);

/** `tokens`: the run's sums. */
export function Blame({ graph, wall, failure, tokens: { cached, prompt }, onOpen }) {
  const { total, segments } = wall;
  const told = useMemo(() => mainCalls(graph, segments), [segments]);
  const reused = [...graph.calls.values()].filter((call) => call.reused).length;
  if (!segments.length && !failure && !reused) return null;
  const gaps = segments.filter(({ kind }) => kind === "program");
  const queues = segments.filter(({ kind }) => kind === "queue");
  const running = segments.find(({ kind }) => kind === "running");
  return (
    <section class="card blame" aria-label="Where the time went">
      {failure && <Failure failure={failure} graph={graph} onOpen={onOpen} />}
      <p>
        {reused > 0 && (
          <>
            {reused} of {plural(graph.calls.size, "call")} took the result of an identical call, so{" "}
            {reused === 1 ? "its prompt counts" : "their prompts count"} as cached.{" "}
          </>
        )}
        {told.length > 0 && <Main {...{ told, segments, total, graph, onOpen }} />}
        {sumOf(gaps) / total >= TELL && (
          <Gaps gaps={gaps} total={total} graph={graph} onOpen={onOpen} />
        )}
        {sumOf(queues) / total >= TELL && (
          <>{share(sumOf(queues), total)} passed in the queue for an engine. </>
        )}
        {running && (
          <>
            <CallName graph={graph} id={running.id} onOpen={onOpen} /> has run for{" "}
            {seconds(running.to - running.from)}.{" "}
          </>
        )}
        {prompt > 0 && `The run ${fromCache(cached, prompt)}.`}
      </p>
      {total > 0 && <Wall segments={segments} total={total} graph={graph} onOpen={onOpen} />}
    </section>
  );
}

/** Which calls took the time: by their functions, or by their number if there are many. */
function Main({ told, segments, total, graph, onOpen }) {
  const calls = segments.filter(({ kind }) => kind === "call");
  const main = told.reduce((sum, one) => sum + one.sum, 0);
  const open = (id) => <CallName graph={graph} id={id} onOpen={onOpen} kind="as-name crit" />;
  if (main < MOST * sumOf(calls)) {
    const longest = calls.reduce((a, b) => (b.to - b.from > a.to - a.from ? b : a));
    return (
      <>
        <b>{share(sumOf(calls), total)}</b> of {seconds(total)} were spent in {calls.length} calls
        one after the other. {open(longest.id)} took the longest,{" "}
        {seconds(longest.to - longest.from)}.{" "}
      </>
    );
  }
  return (
    <>
      <b>{share(main, total)}</b> of {seconds(total)} {told.length > 1 ? "were" : "was"} spent in{" "}
      <span class="crit">
        {told.map((one, i) => (
          <span key={one.id}>
            {i > 0 && " → "}
            {open(one.id)}
            {one.number > 1 && ` ×${one.number}`}
          </span>
        ))}
      </span>
      .{" "}
    </>
  );
}

function Gaps({ gaps, total, graph, onOpen }) {
  const longest = gaps.reduce((a, b) => (b.to - b.from > a.to - a.from ? b : a));
  const { before } = longest;
  return (
    <>
      {share(sumOf(gaps), total)} passed in your program
      {gaps.length > 1 && ` in ${gaps.length} parts`}
      {before?.name && (
        <>
          , {gaps.length > 1 && "mostly "}before it set <code>{before.name}</code>
        </>
      )}
      {before?.call && (
        <>
          , {gaps.length > 1 && "mostly "}before it called{" "}
          <CallName graph={graph} id={before.call} onOpen={onOpen} />
        </>
      )}
      {longest.isLast &&
        (gaps.length > 1 ? ", mostly after its last call" : ", after its last call")}
      .{" "}
    </>
  );
}

/** The failure that is told once, at its cause. */
function Failure({ failure: { id, message, others }, graph, onOpen }) {
  return (
    <p class="cause">
      <CallName graph={graph} id={id} onOpen={onOpen} kind="as-name failed" /> failed
      {message && <>: {message}</>}
      {!/[.!?…]["'”’)]?$/.test(message) && "."}
      {others.length > 0 && (
        <>
          {" "}
          {others.length === 1 ? "One call" : `${others.length} calls`} did not run because of it.
        </>
      )}
    </p>
  );
}

const KINDS = { call: "c", running: "r", program: "p", queue: "q" };

function Wall({ segments, total, graph, onOpen }) {
  return (
    <div class={segments.length > MANY ? "wall many" : "wall"}>
      {segments.map((segment, i) => {
        const { kind, from, to, id } = segment;
        const name =
          kind === "program"
            ? "your program"
            : kind === "queue"
              ? "queue"
              : graph.calls.get(id).func_name;
        const percent = share(to - from, total);
        const shown = {
          class: graph.calls.get(id)?.state === "failed" ? "f" : KINDS[kind],
          style: { flexGrow: (100 * (to - from)) / total },
          title: `${name}: ${seconds(to - from)}`,
          children: (to - from) / total > 0.06 && (
            <>
              <span class="nm">{name} </span>
              <span class="share-of">{percent}</span>
            </>
          ),
        };
        return kind === "program" || kind === "queue" ? (
          <span key={i} {...shown} />
        ) : (
          <button
            key={i}
            {...shown}
            type="button"
            aria-label={`${name} ${percent}, ${seconds(to - from)}`}
            data-call={id}
            onClick={() => onOpen(id)}
          />
        );
      })}
    </div>
  );
}

/** The message of the first cause; its type if the visitor may not see it. */
export const errorText = (errors) => {
  const cause = errors?.at(-1);
  return cause ? cause.message.replace(NATIVE_ERROR, "") || cause.type.replaceAll("_", " ") : "";
};

/** What failed first, and which calls did not run because of it. */
export function failureOf(graph, rows) {
  const failed = [...graph.calls].filter(([, call]) => call.state === "failed");
  const own = failed
    .filter(([, call]) => call.ready_s != null)
    .sort(([, a], [, b]) => a.finished_s - b.finished_s);
  const [first] = own.length ? own : failed;
  if (!first) return null;
  const errors =
    first[1].outputs.map((output) => rows.get(`var:${output}`)?.errors).find(Boolean) ?? [];
  return {
    id: first[0],
    message: cut(errorText(errors), MAX_MESSAGE),
    others: failed.filter(([, call]) => call.ready_s == null).map(([id]) => id),
    number: own.length,
  };
}
