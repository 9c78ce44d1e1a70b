// The panel of a run: one call, a group of equal calls, or a variable that the program set.
import { useEffect, useRef } from "preact/hooks";
import { Detail } from "./call_detail.jsx";
import { Group, groupLook } from "./group.jsx";
import { Icon, Pill } from "./icons.jsx";
import { looks } from "./states.js";
import { variableState } from "./tables.jsx";

/** `target`: `{variable}` or `{node}`. `run`: what all parts of the run's view share. */
export function Panel({ target, run, isWide, setWide, close }) {
  const panel = useRef(null);
  const name = target.node ? `node ${target.node.id}` : target.variable;
  useEffect(() => {
    panel.current.scrollTop = 0;
    if (run.isOver && run.wasOpened.current) panel.current.focus({ preventScroll: true });
    run.wasOpened.current = false;
  }, [name]);
  const { graph, rows } = run;
  const producer = target.node ? target.node.members[0] : graph.producerOf.get(target.variable);
  const call = graph.calls.get(producer);
  const row = rows.get(`var:${target.variable}`);
  const title = call ? call.func_name || call.output : (row?.name ?? target.variable);
  const number = target.node?.members.length;
  const look = target.node
    ? groupLook(target.node, graph)
    : call
      ? looks(call, graph.hasEnded)
      : row && variableState(row, null, graph.hasEnded);
  return (
    <>
      {run.isOver && <div class="scrim" onClick={close} />}
      <aside
        class="panel"
        tabindex="-1"
        ref={panel}
        aria-label={call ? `Call ${title}` : `Variable ${title}`}
      >
        <header>
          <span class="grab" />
          <h2 class="cut">{number > 1 ? `${title} ×${number}` : title}</h2>
          {look && <Pill {...look} />}
          <span class="end">
            <button
              class="btn ghost icon only-wide"
              type="button"
              aria-label="Wider"
              aria-pressed={isWide}
              title="Wider"
              onClick={() => setWide(!isWide)}
            >
              <Icon name="wide" />
            </button>
            <button
              class="btn ghost icon"
              type="button"
              aria-label="Close (Esc)"
              title="Close (Esc)"
              onClick={close}
            >
              <Icon name="close" />
            </button>
          </span>
        </header>
        {target.node ? (
          <Group node={target.node} run={run} />
        ) : (
          <Detail key={target.variable} variable={target.variable} producer={producer} run={run} />
        )}
      </aside>
    </>
  );
}
