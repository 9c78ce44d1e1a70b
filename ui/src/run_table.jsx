// The table of runs: one row for a run, or for all API requests of one client.
import { memo } from "./memo.js";
import { useMemo, useState } from "preact/hooks";
import { WORDS, clock, count, dollars, fullDate, plural, seconds, share } from "./format.js";
import { Glyph, Icon, Mark } from "./icons.jsx";
import { BREAKS, wallSeconds, entryOf } from "./run_list.js";

const STEP = 200; // Rows that are drawn at first, and with each "Show more".
const SHAPE = "The calls of the run, from its start to its end";
const MAX_MEMBERS = 20; // Requests of an unfolded client that are listed.

/** `unfolded`: `[open, toggle]`, the rows whose requests are listed. */
export function RunTable({ groups, sort, onSort, now, hasTenants, unfolded: [open, toggle] }) {
  const [limit, setLimit] = useState(STEP);
  const all = groups.flatMap(([, entries]) => entries);
  const hasCosts = all.some((entry) => entry.run.cost > 0);
  const hasShapes = all.some((entry) => entry.run.shape?.length);
  const number = 7 + hasTenants + hasCosts + hasShapes;
  const columns = useMemo(
    () => ({ number, hasTenants, hasCosts, hasShapes }),
    [hasTenants, hasCosts, hasShapes],
  );
  let left = limit;
  const head = { sort, onSort };
  return (
    <div class="card table">
      <div class="scroll">
        <table class="runs">
          <thead>
            <tr>
              <Head label="Run" {...head} />
              {hasShapes && (
                <th scope="col" class="only-wide c-shape" title={SHAPE}>
                  Timeline
                </th>
              )}
              <Head label="Calls" id="calls" isNumber {...head} />
              <Head label="Prompt" id="prompt" isNumber name="c-tokens" {...head} />
              <Head label="Output" id="output" isNumber name="c-tokens" {...head} />
              <Head label="Cached" id="cached" isNumber {...head} />
              <Head label="Time" id="time" isNumber {...head} />
              {hasCosts && <Head label="Cost" id="cost" isNumber name="c-cost" {...head} />}
              {hasTenants && <Head label="Tenant" name="c-tenant" {...head} />}
              <Head label="Started" id="" isNumber {...head} />
            </tr>
          </thead>
          <tbody>
            {groups.map(([title, entries]) => {
              const shown = entries.slice(0, Math.max(0, left));
              left -= entries.length;
              return (
                <Fragment key={title}>
                  {title && shown.length > 0 && (
                    <tr class="group">
                      <th colspan={number} scope="rowgroup">
                        {title}
                      </th>
                    </tr>
                  )}
                  {shown.map((entry) => (
                    <Row
                      key={entry.id}
                      entry={entry}
                      time={seconds(wallSeconds(entry.run, now))}
                      {...{ toggle, columns }}
                      isOpen={open.has(entry.id)}
                      now={open.has(entry.id) ? now : 0}
                    />
                  ))}
                </Fragment>
              );
            })}
          </tbody>
        </table>
      </div>
      {all.length > limit && (
        <p class="more">
          <button class="btn" type="button" onClick={() => setLimit(limit + STEP)}>
            Show more of {plural(all.length, "row")}
          </button>
        </p>
      )}
    </div>
  );
}

function Head({ label, id, isNumber, name = "", sort, onSort }) {
  const isSorted = id !== undefined && sort === id;
  return (
    <th
      scope="col"
      class={isNumber ? `n ${name}` : name}
      aria-sort={isSorted ? "descending" : undefined}
    >
      {id === undefined ? (
        label
      ) : (
        <button type="button" onClick={() => onSort(id)}>
          {label}
          {isSorted && " ↓"}
        </button>
      )}
    </th>
  );
}

/** Open the row's link, unless the click is on something else or ends a selection of text. */
function openRow(event) {
  if (event.target.closest("a, button") || getSelection().toString()) return;
  event.currentTarget.querySelector("a, button")?.click();
}

const Row = memo(function Row({
  entry,
  time,
  toggle,
  isOpen,
  columns,
  now,
}) {
  const { run, state } = entry;
  const isFold = entry.members.length > 1;
  const isBad = state === "failed" || entry.isBad;
  return (
    <>
      <tr class="row" onClick={openRow}>
        <td>
          <div class="run">
            <Mark state={state} />
            <div class="cut">
              <div class="t">
                {isFold ? (
                  <button
                    class="as-link"
                    type="button"
                    aria-expanded={isOpen}
                    onClick={() => toggle(entry.id)}
                  >
                    {entry.name}
                  </button>
                ) : (
                  <a href={`#/run/${run.id}`}>{entry.name}</a>
                )}
                <span class="tag">{entry.tag}</span>
                {isFold && <Icon name={isOpen ? "down" : "right"} />}
                {!["done", "failed"].includes(state) && (
                  <span class={`st ${state}`}>{WORDS[state]}</span>
                )}
                {run.prefix_breaks > 0 && (
                  <span class="st queued" title={BREAKS}>
                    {plural(run.prefix_breaks, "prefix break")}
                  </span>
                )}
                {run.failed > 0 && state !== "failed" && (
                  <span class="st failed">
                    <Glyph state="failed" />
                    {count(run.failed)} failed
                  </span>
                )}
              </div>
              <div class={isBad ? "w bad" : "w cut"} title={entry.words}>
                {entry.words || (state === "waiting" ? "waits for your program" : "")}
              </div>
            </div>
          </div>
        </td>
        <Cells entry={entry} time={time} columns={columns} />
      </tr>
      {isOpen &&
        entry.members
          .slice(0, MAX_MEMBERS)
          .map((member) => (
            <Member key={member.id} entry={entryOf(member)} columns={columns} now={now} />
          ))}
      {isOpen && entry.members.length > MAX_MEMBERS && (
        <tr class="sub">
          <td colspan={columns.number}>
            {count(entry.members.length - MAX_MEMBERS)} older requests are not listed.
          </td>
        </tr>
      )}
    </>
  );
});

/** The cells of a row after its first one. */
const Cells = ({ entry: { run, at, members }, time, columns }) => (
  <>
    {columns.hasShapes && (
      <td class="only-wide c-shape">{members.length < 2 && <Shape bars={run.shape ?? []} />}</td>
    )}
    <td class="n c-calls">
      {run.done === run.calls ? count(run.calls) : `${count(run.done)} of ${count(run.calls)}`}
      <span class="only-phone"> {run.calls === 1 ? "call" : "calls"}</span>
    </td>
    <td class="n hide c-tokens">{count(run.prompt_tokens)}</td>
    <td class="n hide c-tokens">{count(run.output_tokens)}</td>
    <td class="n">
      {share(run.cached_tokens, run.prompt_tokens)}
      {run.prompt_tokens > 0 && <span class="only-phone"> cached</span>}
    </td>
    <td class="n">{time}</td>
    {columns.hasCosts && <td class="n hide c-cost">{dollars(run.cost)}</td>}
    {columns.hasTenants && <td class="hide c-tenant">{run.tenant}</td>}
    <td class="n dim">
      <time title={fullDate(at)} datetime={new Date(at * 1000).toISOString()}>
        {clock(at)}
      </time>
    </td>
  </>
);

/** One request of an unfolded row. */
function Member({ entry, columns, now }) {
  const { run, state, words, name } = entry;
  return (
    <tr class="sub row" onClick={openRow}>
      <td>
        <div class="run">
          <Mark state={state} />
          <a class="cut" href={`#/run/${run.id}`} title={words}>
            {words || name}
          </a>
        </div>
      </td>
      <Cells entry={entry} time={seconds(wallSeconds(run, now))} columns={columns} />
    </tr>
  );
}

const LEAST_BAR = 3; // Hundredths of the run: shorter bars could not be seen.
const BAR_CLASSES = { running: "r", failed: "f", queued: "q" };

/** A run's timeline in small: `[lane, from, to, state]`, with times in 1/100 of the run. */
function Shape({ bars }) {
  const rows = 1 + Math.max(0, ...bars.map(([row]) => row));
  const height = Math.min(6, 22 / rows);
  const top = (22 - rows * height) / 2;
  return (
    <svg class="shape" viewBox="0 0 100 22" preserveAspectRatio="none" aria-hidden="true">
      {bars.map(([row, from, to, state], i) => (
        <rect
          key={i}
          class={BAR_CLASSES[state]}
          x={Math.min(from, 100 - LEAST_BAR)}
          y={top + row * height}
          width={Math.max(LEAST_BAR, to - from)}
          height={height * 0.7}
          rx="0.8"
        />
      ))}
    </svg>
  );
}
