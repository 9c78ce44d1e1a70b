// The graph of a run. It can be moved, zoomed, and walked through with the keyboard.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { cut, plural, seconds, share } from "./format.js";
import { Glyph, Icon } from "./icons.jsx";
import { NODE } from "./layout.js";
import { memo } from "./memo.js";
import { looks } from "./states.js";

const FIT_AT_LEAST = 0.8; // A smaller scale cannot be read, so the graph is cut instead.
const FAR = 0.45; // Below this scale only boxes are drawn.
const MARGIN = 20;
const STEP = 60; // Pixels that an arrow key moves the graph.
const MIN_HEIGHT = 190; // Pixels of the window of a graph.
const MAX_HEIGHT = innerWidth > 720 ? 340 : 250;
const MAX_NAME = 17; // Characters of a name that fit into a node.
const MANY_NODES = 200; // With more, nodes far from the window are only boxes.

export function GraphView({ graph, layout, path, shares, shown, onOpen, isLive }) {
  const canvas = useRef(null);
  const group = useRef(null);
  const zoom = useRef(null);
  const view = useRef({ x: 0, y: 0, k: 1, isMoved: false });
  const before = useRef(new Map());
  const [at, setAt] = useState(null); // the node that the Tab key reaches
  const size = useSize(canvas);
  const [near, setNear] = useState(null); // the part of a large graph that is drawn with texts
  const focus = shown ?? focusOf(graph, layout);

  const put = (changed) => {
    Object.assign(view.current, changed);
    const { x, y, k } = view.current;
    group.current.setAttribute("transform", `translate(${x},${y}) scale(${k})`);
    group.current.classList.toggle("far", k < FAR);
    zoom.current.textContent = `${Math.round(k * 100)} %`;
    if (layout.nodes.length > MANY_NODES) setNear((old) => nearPart(view.current, size, old));
  };
  const isNear = (node) =>
    layout.nodes.length <= MANY_NODES || (near !== null && isInside(node, near));
  const fit = () => put({ ...fitted(size, layout, focus), isMoved: false });
  const scale = (by, cx = size.width / 2, cy = size.height / 2) => {
    const { x, y, k } = view.current;
    const next = Math.min(2.5, Math.max(0.15, k * by));
    put({ x: cx - ((cx - x) * next) / k, y: cy - ((cy - y) * next) / k, k: next, isMoved: true });
  };
  const move = (dx, dy) => put({ x: view.current.x + dx, y: view.current.y + dy, isMoved: true });

  useLayoutEffect(() => {
    if (size === null) return;
    const old = before.current;
    const anchor = view.current.isMoved && layout.nodes.find((node) => old.has(node.id));
    if (anchor) {
      const { k, x, y } = view.current;
      put({
        x: x + (old.get(anchor.id).x - anchor.x) * k,
        y: y + (old.get(anchor.id).y - anchor.y) * k,
      });
    } else {
      fit();
    }
    before.current = new Map(layout.nodes.map((node) => [node.id, { x: node.x, y: node.y }]));
  }, [layout, size]);
  usePointers(canvas, view, put, scale);

  const show = (node) => {
    setAt(node.id);
    const element = group.current.querySelector(`[data-node="${CSS.escape(node.id)}"]`);
    element.focus({ preventScroll: true });
    const { x, y, k } = view.current;
    const { width, height } = size;
    const left = x + node.x * k;
    const top = y + node.y * k;
    const dx = left < 8 ? 8 - left : Math.min(0, width - 8 - left - NODE.width * k);
    const dy = top < 8 ? 8 - top : Math.min(0, height - 8 - top - NODE.height * k);
    if (dx || dy) move(dx, dy);
  };
  const walk = (event, node) => {
    const next = neighbour(layout.nodes, node, event.key);
    if (!next) return;
    event.preventDefault();
    event.stopPropagation();
    show(next);
  };
  const pan = (event) => {
    const [dx, dy] = DIRECTIONS[event.key] ?? [];
    if (dx === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move(-dx * STEP, -dy * STEP);
  };
  const reached =
    at && layout.nodes.some((node) => node.id === at) ? at : (focus?.id ?? layout.nodes[0]?.id);
  return (
    <section class="card box" aria-label="Graph">
      <header>
        <h2>Graph</h2>
        <span class="dim only-wide">
          {plural(graph.calls.size, "call")}, {plural(layout.nodes.length, "node")}
        </span>
        <span class="end">
          <button
            class="btn ghost small"
            type="button"
            aria-label="Zoom out"
            title="Zoom out"
            onClick={() => scale(0.8)}
          >
            −
          </button>
          <span ref={zoom} />
          <button
            class="btn ghost small"
            type="button"
            aria-label="Zoom in"
            title="Zoom in"
            onClick={() => scale(1.25)}
          >
            +
          </button>
          <button
            class="btn ghost small"
            type="button"
            aria-label="Fit to the window"
            title="Fit to the window"
            onClick={fit}
          >
            <Icon name="fit" />
          </button>
        </span>
      </header>
      <div class="canvas" ref={canvas} style={{ height: `${heightOf(layout, size)}px` }}>
        <svg
          class="g"
          role="group"
          tabindex="0"
          aria-label="Graph of calls. Arrow keys move it; in it, they go from call to call."
          onKeyDown={pan}
        >
          <g ref={group}>
            {size &&
              layout.edges.map((edge) => (
                <Edge
                  key={`${edge.from.id} ${edge.to.id}`}
                  {...edgeLook(edge, graph, path)}
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
        <p class="key">
          <span>
            <i class="c" />
            critical path
          </span>
          {isLive && (
            <span>
              <i class="w" />
              waits
            </span>
          )}
          <span>
            <i class="f" />
            failed because of
          </span>
        </p>
      </div>
    </section>
  );
}

/** The window is as high as the graph, within bounds. */
function heightOf({ width, height }, size) {
  const k =
    size === null ? 1 : Math.min(1.15, Math.max(FIT_AT_LEAST, (size.width - 2 * MARGIN) / width));
  return Math.round(Math.min(MAX_HEIGHT, Math.max(MIN_HEIGHT, height * k + 96)));
}

const isInside = ({ x, y }, part) =>
  x > part.left && x < part.right && y > part.top && y < part.bottom;

/** The part of the graph in the window, and a window around; the old one while it is enough. */
function nearPart({ x, y, k }, { width, height }, old) {
  const [left, top] = [-x / k, -y / k];
  const [right, bottom] = [left + width / k, top + height / k];
  const isEnough =
    old !== null &&
    left - NODE.width > old.left &&
    right < old.right &&
    top - NODE.height > old.top &&
    bottom < old.bottom;
  if (isEnough && old.k >= k) return old;
  const [dx, dy] = [width / k, height / k];
  return { left: left - dx, right: right + dx, top: top - dy, bottom: bottom + dy, k };
}

/** The size of an element, known before it has content: measuring a large drawing takes long. */
export function useSize(element) {
  const [size, setSize] = useState(null);
  useLayoutEffect(() => {
    const measure = () => {
      const { clientWidth: width, clientHeight: height } = element.current;
      setSize((old) => (old?.width === width && old.height === height ? old : { width, height }));
    };
    measure();
    const watch = new ResizeObserver(([{ contentRect }]) => {
      const { width, height } = contentRect;
      setSize((old) => (old?.width === width && old.height === height ? old : { width, height }));
    });
    watch.observe(element.current);
    return () => watch.disconnect();
  }, []);
  return size;
}

/** The node in the middle of a graph that is too wide: a failed or running one, or the last. */
function focusOf(graph, layout) {
  const has = (state) =>
    layout.nodes.find((node) => node.members.some((id) => graph.calls.get(id)?.state === state));
  return has("running") ?? has("failed") ?? layout.nodes[0];
}

function fitted({ width: clientWidth, height: clientHeight }, { width, height }, focus) {
  const whole = Math.min((clientWidth - 2 * MARGIN) / width, (clientHeight - 52) / height, 1.15);
  const k = Math.max(whole, FIT_AT_LEAST);
  const along = (size, length, middle) => {
    if (length * k <= size - 2 * MARGIN) return (size - length * k) / 2;
    return Math.max(Math.min(MARGIN, size / 2 - middle * k), size - length * k - MARGIN);
  };
  const middleX = focus ? focus.x + NODE.width / 2 : 0;
  const middleY = focus ? focus.y + NODE.height / 2 : 0;
  return { k, x: along(clientWidth, width, middleX), y: along(clientHeight, height, middleY) - 2 };
}

const DIRECTIONS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** The nearest node in the direction of an arrow key. */
function neighbour(nodes, from, key) {
  if (!(key in DIRECTIONS)) return undefined;
  const [dx, dy] = DIRECTIONS[key];
  const distance = (node) => {
    const along = dx * (node.x - from.x) + dy * (node.y - from.y);
    const across = Math.abs(dy * (node.x - from.x) + dx * (node.y - from.y));
    return along > 0 ? along + 2 * across : Infinity;
  };
  const best = nodes.reduce((a, b) => (distance(b) < distance(a) ? b : a));
  return distance(best) < Infinity ? best : undefined;
}

/** One pointer moves the graph, two zoom it, and so does the wheel with Ctrl. */
function usePointers(canvas, view, put, scale) {
  const act = useRef({});
  act.current = { put, scale };
  useEffect(() => {
    const element = canvas.current;
    const pointers = new Map();
    const distance = () => {
      const [a, b] = [...pointers.values()];
      return Math.hypot(a.x - b.x, a.y - b.y);
    };
    const down = (event) => {
      if (event.button) return;
      pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    };
    const drag = (event) => {
      const last = pointers.get(event.pointerId);
      if (!last) return;
      const wide = pointers.size === 2 ? distance() : 0;
      pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
      if (wide) {
        const [a, b] = [...pointers.values()];
        const box = element.getBoundingClientRect();
        act.current.scale(distance() / wide, (a.x + b.x) / 2 - box.x, (a.y + b.y) / 2 - box.y);
      } else if (pointers.size === 1) {
        act.current.put({
          x: view.current.x + event.clientX - last.x,
          y: view.current.y + event.clientY - last.y,
          isMoved: true,
        });
      }
    };
    const up = (event) => pointers.delete(event.pointerId);
    const wheel = (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = element.getBoundingClientRect();
      act.current.scale(
        event.deltaY < 0 ? 1.12 : 0.89,
        event.clientX - box.x,
        event.clientY - box.y,
      );
    };
    element.addEventListener("pointerdown", down);
    addEventListener("pointermove", drag);
    addEventListener("pointerup", up);
    addEventListener("pointercancel", up);
    element.addEventListener("wheel", wheel, { passive: false });
    return () => {
      removeEventListener("pointermove", drag);
      removeEventListener("pointerup", up);
      removeEventListener("pointercancel", up);
    };
  }, []);
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
  if (to.members.some((id) => from.members.includes(path.get(id)))) return { look: "c" };
  if (some(from, (call) => call.state === "failed") && some(to, (call) => call.state === "failed"))
    return { look: "f" };
  if (some(to, (call) => call.state === "waiting") && some(from, (call) => call.finished_s == null))
    return { look: "w" };
  return { look: "" };
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
    ? `${done} done · ${seconds(took)}`
    : `${done} of ${calls.length} done`;
}

function detailOf(call, graph) {
  const { state, word } = looks(call, graph.hasEnded);
  if (state === "done") {
    const took = seconds(call.finished_s - call.started_s);
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
