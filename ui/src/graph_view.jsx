// The graph of a run. It can be moved, zoomed, and walked through with the keyboard.
import { useState } from "preact/hooks";
import { cut, plural, seconds, share } from "./format.js";
import { heightOf, neighbour, useView } from "./graph_moves.js";
import { Glyph, Icon } from "./icons.jsx";
import { NODE } from "./layout.js";
import { memo } from "./memo.js";
import { Legend } from "./parts.jsx";
import { looks } from "./states.js";

const EDGES = { c: "critical path", w: "waits", f: "failed because of" };
const MAX_NAME = 17; // Characters of a name that fit into a node.

export function GraphView({ graph, layout, path, shares, shown, onOpen }) {
  const [at, setAt] = useState(null); // the node that the Tab key reaches
  const focus = shown ?? focusOf(graph, layout);
  const { refs, size, fit, scale, pan, reveal, isNear } = useView(layout, focus);
  const walk = (event, node) => {
    const next = neighbour(layout.nodes, node, event.key);
    if (!next) return;
    event.preventDefault();
    event.stopPropagation();
    setAt(next.id);
    const name = CSS.escape(next.id);
    refs.group.current.querySelector(`[data-node="${name}"]`).focus({ preventScroll: true });
    reveal(next);
  };
  const looksOf = layout.edges.map((edge) => edgeLook(edge, graph, path));
  const isThere = at && layout.nodes.some((node) => node.id === at);
  const reached = isThere ? at : (focus?.id ?? layout.nodes[0]?.id);
  return (
    <section class="card box" aria-label="Graph">
      <header>
        <h2>Graph</h2>
        <span class="dim only-wide">
          {plural(graph.calls.size, "call")}, {plural(layout.nodes.length, "node")}
        </span>
        <Zoom value={refs.zoom} scale={scale} fit={fit} />
      </header>
      <div class="canvas" ref={refs.canvas} style={{ height: `${heightOf(layout, size)}px` }}>
        <svg
          class="g"
          role="group"
          tabindex="0"
          aria-label="Graph of calls. Arrow keys move it; in it, they go from call to call."
          onKeyDown={pan}
        >
          <g ref={refs.group}>
            {size &&
              layout.edges.map((edge, i) => (
                <Edge
                  key={`${edge.from.id} ${edge.to.id}`}
                  look={looksOf[i]}
                  {...shapeOf(edge)}
                />
              ))}
            {size &&
              layout.nodes.map((node) => (
                <Node
                  key={node.id}
                  node={node}
                  {...nodeLook(node, graph, shares)}
                  x={node.x}
                  y={node.y}
                  isNear={isNear(node)}
                  isShown={node === shown}
                  isReached={node.id === reached}
                  onOpen={onOpen}
                  onKey={walk}
                />
              ))}
          </g>
        </svg>
        <Legend
          name="key"
          words={Object.fromEntries(
            Object.entries(EDGES).filter(([look]) => looksOf.includes(look)),
          )}
        />
      </div>
    </section>
  );
}

const Zoom = ({ value, scale, fit }) => {
  const button = (label, onClick, children) => (
    <button
      class="btn ghost small"
      type="button"
      aria-label={label}
      title={label}
      onClick={onClick}
    >
      {children}
    </button>
  );
  return (
    <span class="end">
      {button("Zoom out", () => scale(0.8), "−")}
      <span ref={value} />
      {button("Zoom in", () => scale(1.25), "+")}
      {button("Fit to the window", fit, <Icon name="fit" />)}
    </span>
  );
};

/** The node in the middle of a graph that is too wide: a failed or running one, or the last. */
function focusOf(graph, layout) {
  const has = (state) =>
    layout.nodes.find((node) => node.members.some((id) => graph.calls.get(id)?.state === state));
  return has("running") ?? has("failed") ?? layout.nodes[0];
}

function shapeOf({ from, to, lanes }) {
  const points = [
    ...lanes.map((lane) => [lane.x, lane.y + lane.height / 2, lane.x + NODE.width]),
    [to.x, to.y + NODE.height / 2],
  ];
  let [x, y] = [from.x + NODE.width, from.y + NODE.height / 2];
  let d = `M${x},${y}`;
  for (const [nextX, nextY, end] of points) {
    const middle = (x + nextX) / 2;
    d += `C${middle},${y} ${middle},${nextY} ${nextX},${nextY}`;
    if (end !== undefined) d += `H${end}`;
    [x, y] = [end ?? nextX, nextY];
  }
  return { d };
}

function edgeLook({ from, to }, graph, path) {
  const some = (node, test) =>
    node.members.some((id) => graph.calls.has(id) && test(graph.calls.get(id), id));
  if (to.members.some((id) => from.members.includes(path.get(id)))) return "c";
  if (some(from, (call) => call.state === "failed") && some(to, (call) => call.state === "failed"))
    return "f";
  if (some(to, (call) => call.state === "waiting") && some(from, (call) => call.finished_s == null))
    return "w";
  return "";
}

const Edge = memo(({ look, d }) => <path class={look ? `edge ${look}` : "edge"} d={d} />);

const ORDER = ["failed", "running", "queued", "waiting", "skipped", "stopped", "done"];

/** The state of several calls that is worth the most attention. */
export function stateOfAll(calls, hasEnded) {
  const states = new Set(calls.map((call) => looks(call, hasEnded).state));
  return ORDER.find((state) => states.has(state)) ?? "done";
}

/** What a node shows, as plain values: it is drawn again only if one of them changes. */
function nodeLook(node, graph, shares) {
  const calls = node.members.map((id) => graph.calls.get(id)).filter(Boolean);
  const [first] = calls;
  const state = stateOfAll(calls, graph.hasEnded);
  const percent = Math.round(
    100 * node.members.reduce((sum, id) => sum + (shares.get(id) ?? 0), 0),
  );
  const isCritical = node.members.some((id) => shares.has(id));
  return {
    name: first.func_name || first.output,
    number: calls.length > 1 ? ` ×${calls.length}` : "",
    detail: calls.length > 1 ? groupDetail(calls) : detailOf(first, graph),
    state,
    word: calls.length > 1 ? "" : looks(first, graph.hasEnded).word,
    percent,
    isCritical,
    isNative: first.kind === "native",
  };
}

function groupDetail(calls) {
  const done = calls.filter((call) => call.state === "done").length;
  const failed = calls.filter((call) => call.state === "failed").length;
  const ends = calls.filter((call) => call.finished_s != null && call.started_s != null);
  const took =
    ends.length === calls.length
      ? Math.max(...ends.map((call) => call.finished_s)) -
        Math.min(...ends.map((call) => call.started_s))
      : null;
  if (failed) return `${failed} failed of ${calls.length}`;
  return done === calls.length
    ? `${done} ${calls.every((call) => call.reused) ? "reused" : "done"} · ${seconds(took)}`
    : `${done} of ${calls.length} done`;
}

function detailOf(call, graph) {
  const { state, word } = looks(call, graph.hasEnded);
  if (state === "done") {
    const took = seconds(call.finished_s - call.started_s);
    if (call.reused) return `reused · ${took}`;
    return call.output_tokens ? `${took} · ${plural(call.output_tokens, "token")}` : took;
  }
  if (state === "running" && call.output_tokens)
    return `${plural(call.output_tokens, "token")} so far`;
  if (state === "waiting" && call.activated_s != null) {
    const open = call.inputs
      .map((variable) => graph.producerOf.get(variable))
      .find((parent) => parent && graph.calls.get(parent).finished_s == null);
    return open ? `waits for ${graph.calls.get(open).func_name}` : "waits";
  }
  return word;
}

const Node = memo(function Node({
  node,
  x,
  y,
  name,
  number,
  detail,
  state,
  word,
  percent,
  isCritical,
  isNative,
  isNear,
  isShown,
  isReached,
  onOpen,
  onKey,
}) {
  const { width, height } = NODE;
  const isGroup = number !== "";
  const open = () => onOpen(node);
  const press = (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      open();
    } else {
      onKey(event, node);
    }
  };
  const part = isCritical && percent > 0 ? `, ${percent} % of the time, on the critical path` : "";
  const classes = ["node", state, isCritical && "c", isShown && "shown"].filter(Boolean).join(" ");
  return (
    <g
      class={classes}
      transform={`translate(${x},${y})`}
      role="button"
      tabindex={isReached ? 0 : -1}
      aria-label={`${name}${number} ${detail}${part}${word && word !== detail ? `, ${word}` : ""}`}
      data-node={node.id}
      data-call={isGroup ? undefined : node.id}
      onClick={open}
      onKeyDown={press}
    >
      {isGroup && <rect class="b" x="5" y="-5" width={width - 5} height={height} rx="9" />}
      <rect class="b" width={width} height={height} rx={isNative ? 2 : 9} />
      {isNear && <Inside {...{ name, number, detail, state, percent, isCritical }} />}
    </g>
  );
});

/** What a node shows in its box. */
function Inside({ name, number, detail, state, percent, isCritical }) {
  const { width, height } = NODE;
  return (
    <>
      {isCritical && <rect class="strip" x="0" y="9" width="3.5" height={height - 18} rx="1.75" />}
      <rect class="ring" x="-4" y="-4" width={width + 8} height={height + 8} rx="12" />
      <Glyph state={state} x="12" y="11" width="16" height="16" />
      <text x="34" y="24">
        {cut(name, MAX_NAME - number.length)}
        {number}
      </text>
      <text class="d" x="34" y="42">
        {cut(detail, 22)}
      </text>
      {percent > 0 && isCritical && (
        <g class="chip" transform={`translate(${width - 48},-9)`}>
          <rect width="40" height="18" rx="9" />
          <text class="p" x="20" y="13">
            {share(percent, 100)}
          </text>
        </g>
      )}
    </>
  );
}
