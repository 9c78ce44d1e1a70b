// One session: its graph as it runs, where its time went, and any variable of it.
import { useMemo, useState } from "preact/hooks";
import { post, useFeed } from "./api.js";
import { AskButton } from "./ask.jsx";
import { ago, count, seconds } from "./format.js";
import { Notice, useNow } from "./parts.jsx";
import { RunActions } from "./run_actions.jsx";
import { nameOf } from "./run_list.js";
import { State } from "./legacy.jsx";
import { criticalPath, layOut, readGraph, why } from "./graph.js";
import { Timeline } from "./timeline.jsx";
import { Variable } from "./variable.jsx";

export function Run({ id, shown }) {
  const feed = useFeed(`sessions/${id}`);
  const [folded, setFolded] = useState(null);
  const graph = useMemo(() => readGraph(feed.rows), [feed.rows]);
  const outline = [...graph.calls].map(([call, row]) => `${call}:${row.inputs.join()}`).join();
  const layout = useMemo(() => layOut(graph), [outline]);
  const critical = useMemo(() => criticalPath(graph), [feed.rows]);
  const session = feed.rows.get("session");
  const show = (variable) => (location.hash = `#/run/${id}/${variable}`);
  if (feed.error && !feed.rows.size) return <NoSuchRun reason={feed.error} />;
  const members = folded && layout.nodes.find((node) => node.id === folded)?.members;
  return (
    <>
      <Notice feed={feed} />
      {session && (
        <h1>
          {nameOf({ functions: firstFunctions(graph), ...session })}{" "}
          {session.state !== "active" && <State state={session.state} />}{" "}
          <small>
            tenant {session.tenant}, {graph.calls.size} calls, began {ago(session.created_at, useNow())}
            {session.ended_at != null && `, took ${seconds(session.ended_at - session.created_at)}`}
          </small>
        </h1>
      )}
      {session && <RunActions run={{ functions: firstFunctions(graph), ...session }} running={[...graph.calls.values()].filter((call) => call.state === "running").length} after={() => (location.hash = "#/")} />}
      <div class="split">
        <div class="views">
          <section>
            <h2>Graph</h2>
            <Graph
              graph={graph}
              layout={layout}
              critical={critical}
              shown={shown}
              onOpen={(node) => {
                setFolded(node.members.length > 1 ? node.id : null);
                if (node.members.length === 1) show(node.id);
              }}
            />
          </section>
          {members && <Members graph={graph} members={members} show={show} />}
          <section>
            <h2>Timeline</h2>
            <Timeline graph={graph} critical={critical} show={show} />
          </section>
          <section>
            <h2>Variables</h2>
            <Variables rows={feed.rows} show={show} />
          </section>
        </div>
        {shown && (
          <aside aria-label="Variable">
            <Call id={id} isLive={session?.state === "active"} graph={graph} variable={shown} />
            <Variable key={shown} session={id} id={shown} rows={feed.rows} show={show} />
          </aside>
        )}
      </div>
    </>
  );
}

const firstFunctions = (graph) => [...new Set([...graph.calls.values()].map((call) => call.func_name))].slice(0, 3);

const COLOURS = ["running", "queued", "waiting", "failed", "cancelled", "idle", "done"];

/** The state of several calls that is worth the most attention. */
const stateOf = (graph, members) => {
  const states = new Set(members.map((id) => graph.calls.get(id)?.state));
  return COLOURS.find((state) => states.has(state)) ?? "idle";
};

function Graph({ graph, layout, critical, shown, onOpen }) {
  if (!layout.nodes.length) return <p class="hint">Nothing was called yet.</p>;
  const { width, height } = layout.size;
  const isCritical = (from, to) => to.members.some((id) => from.members.includes(critical.get(id)));
  const edges = layout.nodes.flatMap((node) => [...node.parents].map((parent) => [parent, node]));
  return (
    <div class="scroll graph" tabindex="0" role="region" aria-label="Graph of calls">
      <svg width={layout.width + 2} height={layout.height + 2} viewBox={`-1 -1 ${layout.width + 2} ${layout.height + 2}`}>
        {edges.map(([from, to]) => (
          <path
            key={`${from.id} ${to.id}`}
            class={isCritical(from, to) ? "edge critical" : "edge"}
            d={curve(from.x + width, from.y + height / 2, to.x, to.y + height / 2)}
          />
        ))}
        {layout.nodes.map((node) => (
          <GraphNode key={node.id} {...{ node, graph, critical, shown, onOpen, width, height }} />
        ))}
      </svg>
    </div>
  );
}

const curve = (x1, y1, x2, y2) => {
  const middle = (x1 + x2) / 2;
  return `M${x1},${y1}C${middle},${y1} ${middle},${y2} ${x2},${y2}`;
};

function GraphNode({ node, graph, critical, shown, onOpen, width, height }) {
  const calls = node.members.map((id) => graph.calls.get(id)).filter(Boolean);
  if (!calls.length) return null;
  const done = calls.filter((call) => call.state === "done").length;
  const name = calls[0].func_name;
  const label = calls.length > 1 ? `${name} ×${calls.length}` : name;
  const detail = calls.length > 1 ? `${done} done` : detailOf(calls[0]);
  const classes = ["node", stateOf(graph, node.members)];
  if (node.members.some((id) => critical.has(id))) classes.push("critical");
  if (node.members.includes(shown)) classes.push("shown");
  const open = () => onOpen(node);
  return (
    <g
      class={classes.join(" ")}
      transform={`translate(${node.x},${node.y})`}
      role="button"
      tabindex="0"
      aria-label={`${label}: ${detail}`}
      onClick={open}
      onKeyDown={(event) => (event.key === "Enter" || event.key === " ") && open()}
    >
      {calls.length > 1 && <rect class="behind" x="4" y="-4" width={width - 4} height={height} rx="6" />}
      <rect width={width} height={height} rx="6" />
      <text x="10" y="18">
        {label.length > 22 ? `${label.slice(0, 21)}…` : label}
      </text>
      <text class="detail" x="10" y="35">
        {detail}
      </text>
    </g>
  );
}

function detailOf(call) {
  if (call.finished_s == null || call.started_s == null) return call.state;
  return `${call.output}, ${seconds(call.finished_s - call.started_s)}`.slice(0, 26);
}

function Members({ graph, members, show }) {
  return (
    <section>
      <h2>
        {graph.calls.get(members[0])?.func_name} ×{members.length}
      </h2>
      <ul class="members">
        {members.map((id) => {
          const call = graph.calls.get(id);
          return (
            call && (
              <li key={id}>
                <button class="link" onClick={() => show(id)}>
                  {call.output}
                </button>{" "}
                <State state={call.state} />
              </li>
            )
          );
        })}
      </ul>
    </section>
  );
}

function Variables({ rows, show }) {
  const variables = [...rows].filter(([key]) => key.startsWith("var:"));
  return (
    <ul class="members">
      {variables.map(([key, row]) => (
        <li key={key}>
          <button class="link" onClick={() => show(key.slice(4))}>
            {row.name}
          </button>{" "}
          <State state={row.state} /> {row.chars > 0 && <small>{count(row.chars)} characters</small>}
        </li>
      ))}
    </ul>
  );
}

const NoSuchRun = ({ reason }) => (
  <section>
    <h1>There is no such run</h1>
    <p>{reason}.</p>
    <p>
      <a href="#/">All runs</a>
    </p>
  </section>
);

function Call({ id, isLive, graph, variable }) {
  const producer = graph.producerOf.get(variable);
  const call = producer && graph.calls.get(producer);
  if (!call) return null;
  const isOpen = isLive && !["done", "failed", "cancelled"].includes(call.state);
  return (
    <section>
      <h2>
        {call.func_name} <State state={call.state} />
      </h2>
      <p>{why(graph, producer)}</p>
      {call.remark && <p class="notice">{call.remark}</p>}
      {isOpen && (
        <AskButton
          label="Stop this call…"
          title={`Stop ${call.func_name}?`}
          question="Calls that need its output do not run."
          confirm="Stop the call"
          keep="Keep it running"
          onConfirm={() => post(`sessions/${id}/cancel/${call.request_id}`)}
        />
      )}
    </section>
  );
}
