// Two runs side by side: what each took as a whole, and what its calls of one function took.
import { readOnce, rowsOf, serverNow, useFeed } from "./api.js";
import { clock, count, day, plural, seconds, share } from "./format.js";
import { Choice, NotFound, Table, useRead } from "./parts.jsx";
import { go, useTitle } from "./route.js";
import { nameOf, wallSeconds } from "./run_list.js";

const sum = (calls, read) => calls.reduce((all, call) => all + (read(call) ?? 0), 0);
const cached = (call) => call.cached_tokens;
const prompt = (call) => call.cached_tokens + call.computed_tokens;
const ran = (call) => call.finished_s - call.started_s;

const points = (part) => plural(Math.round(100 * part), "point");

/** `[what, its value of a run, how it is written, a note, how a difference is written]` for each row. */
function linesOf(runs) {
  const names = new Set(runs.flatMap(({ calls }) => calls.map((call) => call.func_name)));
  return [
    ["Time", ({ session }) => wallSeconds(session, serverNow()), seconds],
    ["Calls", ({ calls }) => calls.length, count],
    ["Prompt tokens", ({ calls }) => sum(calls, prompt), count],
    [
      "From cache",
      ({ calls }) => sum(calls, cached) / sum(calls, prompt) || 0,
      (part) => share(part, 1),
      null,
      points,
    ],
    ["Output tokens", ({ calls }) => sum(calls, (call) => call.output_tokens), count],
    ...[...names].map((name) => {
      const own = ({ calls }) => calls.filter((call) => call.func_name === name);
      const note = (run) =>
        `sum of ${plural(own(run).length, "call")}, ${share(sum(own(run), cached), sum(own(run), prompt)) || "0 %"} cached`;
      return [<code>{name}</code>, (run) => sum(own(run), ran), seconds, note];
    }),
  ];
}

/** The other runs of the same program, the newest last. */
const readOthers = async (session) =>
  rowsOf(await readOnce("overview"), "session").filter(
    (run) => run.id !== session.id && nameOf(run) === nameOf(session),
  );
const useOthers = (session) =>
  useRead(() => session && readOthers(session), [], [session?.id]);

export function CompareLink({ session }) {
  const other = useOthers(session).at(-1);
  return (
    other && (
      <a class="btn small" href={`#/compare/${other.id}/${session.id}`}>
        Compare
      </a>
    )
  );
}

/** `ids`: of the runs; the first one can be changed here. */
export function Compare({ ids }) {
  useTitle("Compare");
  const feeds = [useFeed(`sessions/${ids[0]}`), useFeed(`sessions/${ids[1]}`)];
  const runs = feeds.map(({ rows }) => ({
    session: rows.get("session"),
    calls: rowsOf(rows, "call"),
  }));
  const { session } = runs[1];
  const others = useOthers(session);
  const failed = feeds.find((feed) => feed.error);
  if (failed) return <NotFound what="run">{failed.error}.</NotFound>;
  return (
    session && (
      <div class="screen">
        <div class="head">
          <h1>Compare {nameOf(session)}</h1>
          <Choice
            label="With the run"
            options={others.map((run) => [
              run.id,
              `with ${day(run.created_at)}, ${clock(run.created_at)}`,
            ])}
            value={ids[0]}
            onChoose={(other) => go(`/compare/${other}/${ids[1]}`, true)}
          />
        </div>
        {runs[0].session && <Comparison runs={runs} />}
      </div>
    )
  );
}

const Comparison = ({ runs }) => (
  <div class="card table">
    <Table
      label="Comparison"
      heads={[
        ["Run"],
        ...runs.map(({ session }) => [
          <a href={`#/run/${session.id}`}>{clock(session.created_at)}</a>,
          true,
        ]),
        ["Difference", true],
      ]}
    >
      <tbody>
        {linesOf(runs).map(([what, read, write, note, writeChange], i) => (
          <Line key={i} values={runs.map(read)} {...{ what, write, writeChange }}>
            {note && runs.map((run) => <div class="dim only-wide">{note(run)}</div>)}
          </Line>
        ))}
      </tbody>
    </Table>
  </div>
);

function Line({ what, values, write, writeChange = write, children }) {
  const difference = values[1] - values[0];
  const text = writeChange(Math.abs(difference));
  return (
    <tr>
      <th scope="row">{what}</th>
      {values.map((value, i) => (
        <td key={i} class="n">
          {write(value)}
          {children?.[i]}
        </td>
      ))}
      <td class="n">{text !== writeChange(0) && (difference > 0 ? "+" : "−") + text}</td>
    </tr>
  );
}
