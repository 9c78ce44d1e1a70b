// Variables and calls of a run as tables: what those who cannot see the graph read instead.
import { useState } from "preact/hooks";
import { errorText } from "./blame.jsx";
import { Icon, Mark } from "./icons.jsx";
import { count, seconds, share } from "./format.js";
import { Table } from "./parts.jsx";
import { looks, placeOf } from "./states.js";

const MAX_ROWS = 400; // The last ones are listed.

const openRow = (event) =>
  !event.target.closest("button") && event.currentTarget.querySelector("button")?.click();

export function Calls({ graph, shares, onOpen }) {
  const rows = [...graph.calls].slice(-MAX_ROWS);
  const since = (from, to) => (from == null || to == null ? "" : seconds(Math.max(0, to - from)));
  return (
    <>
      <Rest shown={rows.length} all={graph.calls.size} what="calls" />
      <Table
        label="Calls"
        heads={[
          ["Call"],
          ["Engine"],
          ["Ready at", true],
          ["Queued", true],
          ["Ran", true],
          ["Prompt", true],
          ["Cached", true],
          ["Output", true],
        ]}
      >
        <tbody>
        {rows.map(([id, call]) => {
          const { state, word } = looks(call, graph.hasEnded);
          const prompt = call.cached_tokens + call.computed_tokens;
          return (
            <tr key={id} class="row" data-call={id} onClick={openRow}>
              <td>
                <span class="cell">
                  <Mark state={state} word={word} />
                  <button class="as-link" type="button" onClick={() => onOpen(id)}>
                    {call.func_name || call.output}
                  </button>
                  {shares.get(id) >= 0.01 && <span class="tag">{share(shares.get(id), 1)}</span>}
                </span>
              </td>
              <td class="dim">{placeOf(call)}</td>
              <td class="n">{seconds(call.ready_s)}</td>
              <td class="n">{since(call.ready_s, call.started_s)}</td>
              <td class="n">{since(call.started_s, call.finished_s)}</td>
              <td class="n">{prompt > 0 && count(prompt)}</td>
              <td class="n">{share(call.cached_tokens, prompt)}</td>
              <td class="n">{call.output_tokens > 0 && count(call.output_tokens)}</td>
            </tr>
          );
        })}
        </tbody>
      </Table>
    </>
  );
}

const VARIABLE_STATES = {
  ready: ["done", "ready"],
  failed: ["failed", "failed"],
  empty: ["waiting", "empty"],
};

/** The state of a variable; one whose call runs is running. */
export function variableState(row, producer, hasEnded) {
  if (row.state === "empty" && producer) return looks(producer, hasEnded);
  if (row.state === "failed" && producer) return looks(producer, hasEnded);
  const [state, word] = VARIABLE_STATES[row.state] ?? VARIABLE_STATES.empty;
  return state === "waiting" && hasEnded
    ? { state: "skipped", word: "never set" }
    : { state, word };
}

/** Variables of one name that equal calls make, or that equal calls read, stand together. */
function groupsOf(rows, graph, layout) {
  const nodeOf = new Map(
    layout.nodes.flatMap(({ id, members }) => members.map((call) => [call, id])),
  );
  const readers = new Map();
  for (const [id, call] of graph.calls) {
    for (const input of call.inputs) {
      if (!readers.has(input)) readers.set(input, []);
      readers.get(input).push(id);
    }
  }
  const variables = [...rows]
    .filter(([key]) => key.startsWith("var:"))
    .map(([key, row]) => ({ id: key.slice(4), row, readers: readers.get(key.slice(4)) ?? [] }));
  const groups = Map.groupBy(variables, ({ row, readers: ids }) =>
    [row.name, nodeOf.get(row.producer), ...new Set(ids.map((id) => nodeOf.get(id)))].join(" "),
  );
  return { groups: [...groups.values()], number: variables.length };
}

const FOLD_ABOVE = 4; // As in the graph.

export function Variables({ rows, graph, layout, onOpen }) {
  const [open, setOpen] = useState(null);
  const { groups, number } = groupsOf(rows, graph, layout);
  const shown = groups.slice(-MAX_ROWS);
  const lookOf = ({ row }) =>
    variableState(row, graph.calls.get(row.producer) ?? null, graph.hasEnded);
  const drawn = (variable) => (
    <VariableRow
      key={variable.id}
      {...variable}
      {...lookOf(variable)}
      graph={graph}
      onOpen={onOpen}
    />
  );
  return (
    <>
      {shown.length < groups.length && <Rest shown={shown.length} all={number} what="variables" />}
      <Table
        label="Variables"
        heads={[["Name"], ["Made by"], ["Read by"], ["Characters", true], ["Value"]]}
      >
        <tbody>
        {shown.flatMap((group) => {
          if (group.length <= FOLD_ABOVE) return group.map(drawn);
          const [{ id }] = group;
          const odd = group.find((one) => lookOf(one).state !== "done") ?? group[0];
          const chars = group.reduce((sum, { row }) => sum + row.chars, 0);
          return [
            <VariableRow
              key={`all ${id}`}
              {...odd}
              {...lookOf(odd)}
              chars={chars}
              times={group.length}
              isOpen={open === id}
              graph={graph}
              onOpen={() => setOpen(open === id ? null : id)}
            />,
            ...(open === id ? group.map(drawn) : []),
          ];
        })}
        </tbody>
      </Table>
    </>
  );
}

/** One variable; with `times`, the row of several equal ones. */
function VariableRow({
  id,
  row,
  readers,
  state,
  word,
  chars = row.chars,
  times,
  isOpen,
  graph,
  onOpen,
}) {
  const nameOf = (call) => graph.calls.get(call)?.func_name || graph.calls.get(call)?.output;
  return (
    <tr class="row" data-call={times ? undefined : (row.producer ?? undefined)} onClick={openRow}>
      <td>
        <span class="cell">
          <Mark state={state} word={word} />
          <button
            class="as-link mono"
            type="button"
            aria-expanded={times ? isOpen : undefined}
            onClick={() => onOpen(id)}
          >
            {row.name}
            {times && ` ×${times}`}
          </button>
          {times && <Icon name={isOpen ? "down" : "right"} />}
        </span>
      </td>
      <td>{row.producer === null ? "your program" : nameOf(row.producer)}</td>
      <td class="dim">
        <div class="cut readers">{[...new Set(readers.map(nameOf))].join(", ")}</div>
      </td>
      <td class="n">{chars > 0 && count(chars)}</td>
      <td class={row.errors ? "st failed" : "dim"}>
        <div class="cut value-head">{row.errors ? errorText(row.errors) : row.head}</div>
      </td>
    </tr>
  );
}

const Rest = ({ shown, all, what }) =>
  shown < all && (
    <p class="hint">
      The last {count(shown)} of {count(all)} {what}.
    </p>
  );
