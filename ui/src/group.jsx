// Equal calls of a run in the panel.
import { plural, seconds } from "./format.js";
import { stateOfAll } from "./graph_view.jsx";
import { Mark } from "./icons.jsx";
import { Table } from "./parts.jsx";
import { looks, placeOf } from "./states.js";

/** The state of most interest, and how many calls are in it. */
export function groupLook(node, graph) {
  const calls = node.members.map((id) => graph.calls.get(id));
  const state = stateOfAll(calls, graph.hasEnded);
  const word = calls
    .map((call) => looks(call, graph.hasEnded))
    .find((look) => look.state === state).word;
  return {
    state,
    word: `${calls.filter((call) => looks(call, graph.hasEnded).state === state).length} ${word}`,
  };
}

/** Equal calls: the slowest is named, and each can be opened. */
export function Group({ node, run }) {
  const { graph, rows, now, wall, open } = run;
  const members = node.members.map((id) => [id, graph.calls.get(id)]);
  const took = (call) =>
    call.started_s == null ? null : (call.finished_s ?? now) - call.started_s;
  const slowest = members.reduce((a, b) => ((took(b[1]) ?? -1) > (took(a[1]) ?? -1) ? b : a));
  const failed = members.filter(([, call]) => call.state === "failed");
  const engines = [...new Set(members.map(([, call]) => call.engine).filter(Boolean))];
  const critical = members.find(([id]) => wall.path.has(id));
  return (
    <>
      <section>
        <p class="why">
          {plural(members.length, "call")} of one function
          {engines.length > 0 && `, on ${plural(engines.length, "engine")}`}.{" "}
          {took(slowest[1]) !== null && (
            <>
              The slowest ran for {seconds(took(slowest[1]))}
              {critical &&
                (critical[0] === slowest[0]
                  ? " and is on the critical path"
                  : `; the one that ended last is on the critical path`)}
              .
            </>
          )}{" "}
          {failed.length > 0 && `${plural(failed.length, "call")} failed.`}
        </p>
      </section>
      <section>
        <div class="row">
          <h2>Calls</h2>
        </div>
        <Table label="Calls" heads={[["First words"], ["Engine"], ["Ran", true]]}>
          <tbody>
            {members.map(([id, call], i) => (
              <tr key={id} class="row" data-call={id} onClick={() => open(id)}>
                <td>
                  <span class="cell">
                    <Mark {...looks(call, graph.hasEnded)} />
                    <button
                      class="as-link cut"
                      type="button"
                      onClick={(event) => (event.stopPropagation(), open(id))}
                    >
                      {i + 1} {headOf(call, rows)}
                    </button>
                  </span>
                </td>
                <td class="dim">{placeOf(call)}</td>
                <td class="n">
                  {id === slowest[0] ? <b>{seconds(took(call))}</b> : seconds(took(call))}
                </td>
              </tr>
            ))}
          </tbody>
        </Table>
      </section>
    </>
  );
}

/** The first words of a call's own input, or of its output. */
function headOf(call, rows) {
  const heads = [...call.inputs, ...call.outputs].map((id) => rows.get(`var:${id}`)?.head);
  return heads.find(Boolean) ?? call.output;
}
