// Variables and calls of a run as tables: what those who cannot see the graph read instead.
import { errorText } from "./blame.jsx";
import { Mark } from "./icons.jsx";
import { count, seconds, share } from "./format.js";
import { looks } from "./states.js";

const MAX_ROWS = 400; // The last ones are listed.

const Table = ({ label, heads, children }) => (
  <div class="scroll" tabindex="0" role="region" aria-label={label}>
    <table>
      <thead>
        <tr>
          {heads.map(([name, isNumber]) => (
            <th key={name} scope="col" class={isNumber ? "n" : undefined}>
              {name}
            </th>
          ))}
        </tr>
      </thead>
      <tbody>{children}</tbody>
    </table>
  </div>
);

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
              <td class="dim">{call.engine ?? (call.kind === "native" ? "sandbox" : "")}</td>
              <td class="n">{seconds(call.ready_s)}</td>
              <td class="n">{since(call.ready_s, call.started_s)}</td>
              <td class="n">{since(call.started_s, call.finished_s)}</td>
              <td class="n">{prompt > 0 && count(prompt)}</td>
              <td class="n">{share(call.cached_tokens, prompt)}</td>
              <td class="n">{call.output_tokens > 0 && count(call.output_tokens)}</td>
            </tr>
          );
        })}
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

export function Variables({ rows, graph, onOpen }) {
  const readers = new Map();
  for (const call of graph.calls.values()) {
    for (const input of call.inputs)
      readers.set(input, [...(readers.get(input) ?? []), call.func_name || call.output]);
  }
  const all = [...rows].filter(([key]) => key.startsWith("var:"));
  const shown = all.slice(-MAX_ROWS);
  return (
    <>
      <Rest shown={shown.length} all={all.length} what="variables" />
      <Table
        label="Variables"
        heads={[["Name"], ["Made by"], ["Read by"], ["Characters", true], ["Value"]]}
      >
        {shown.map(([key, row]) => {
          const producer = row.producer === null ? null : graph.calls.get(row.producer);
          const { state, word } = variableState(row, producer, graph.hasEnded);
          return (
            <tr key={key} class="row" data-call={row.producer ?? undefined} onClick={openRow}>
              <td>
                <span class="cell">
                  <Mark state={state} word={word} />
                  <button class="as-link mono" type="button" onClick={() => onOpen(key.slice(4))}>
                    {row.name}
                  </button>
                </span>
              </td>
              <td>{producer ? producer.func_name || producer.output : "your program"}</td>
              <td class="dim">
                <div class="cut readers">
                  {[...new Set(readers.get(key.slice(4)) ?? [])].join(", ")}
                </div>
              </td>
              <td class="n">{row.chars > 0 && count(row.chars)}</td>
              <td class={row.errors ? "st failed" : "dim"}>
                <div class="cut value-head">{row.errors ? errorText(row.errors) : row.head}</div>
              </td>
            </tr>
          );
        })}
      </Table>
    </>
  );
}

const Rest = ({ shown, all, what }) =>
  shown < all && (
    <p class="hint">
      The last {count(shown)} of {count(all)} {what}.
    </p>
  );
