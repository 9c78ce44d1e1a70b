// How the window of a graph moves: it fits, pans and zooms, by pointer, wheel and keyboard.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { NODE } from "./layout.js";

const FIT_AT_LEAST = 0.8; // A smaller scale cannot be read, so the graph is cut instead.
const FAR = 0.45; // Below this scale only boxes are drawn.
const MARGIN = 20;
const EDGE = 8; // Pixels between the window's edge and a node that the keyboard goes to.
const STEP = 60; // Pixels that an arrow key moves the graph.
const MIN_HEIGHT = 190; // Pixels of the window of a graph.
const MAX_HEIGHT = innerWidth > 720 ? 340 : 250;
const MANY_NODES = 200; // With more, nodes far from the window are only boxes.
const CLICK_PIXELS = 5; // A pointer that moved more has dragged the graph.

/**
 * The window of a graph. `focus`: the node in the middle if not all fits.
 * @returns {{refs: object, size: ?object, fit: Function, scale: Function, pan: Function,
 *   reveal: Function, isNear: Function}}
 */
export function useView(layout, focus) {
  const refs = { canvas: useRef(null), group: useRef(null), zoom: useRef(null) };
  const view = useRef({ x: 0, y: 0, k: 1, isMoved: false });
  const before = useRef(new Map());
  const size = useSize(refs.canvas);
  const [near, setNear] = useState(null); // the part of a large graph that is drawn with texts
  const isLarge = layout.nodes.length > MANY_NODES;
  const put = (changed) => {
    Object.assign(view.current, changed);
    const { x, y, k } = view.current;
    refs.group.current.setAttribute("transform", `translate(${x},${y}) scale(${k})`);
    refs.group.current.classList.toggle("far", k < FAR);
    refs.zoom.current.textContent = `${Math.round(k * 100)} %`;
    if (isLarge) setNear((old) => nearPart(view.current, size, old));
  };
  const fit = () => put({ ...fitted(size, layout, focus), isMoved: false });
  const scale = (by, cx = size.width / 2, cy = size.height / 2) => {
    const { x, y, k } = view.current;
    const next = Math.min(2.5, Math.max(0.15, k * by));
    put({ x: cx - ((cx - x) * next) / k, y: cy - ((cy - y) * next) / k, k: next, isMoved: true });
  };
  const move = (dx, dy) => put({ x: view.current.x + dx, y: view.current.y + dy, isMoved: true });
  useLayoutEffect(() => {
    if (size === null) return;
    // What the user looks at stays where it is when the graph grows.
    const anchor = view.current.isMoved && layout.nodes.find(({ id }) => before.current.has(id));
    const { x, y, k } = view.current;
    const old = anchor && before.current.get(anchor.id);
    if (anchor) put({ x: x + (old.x - anchor.x) * k, y: y + (old.y - anchor.y) * k });
    else fit();
    before.current = new Map(layout.nodes.map((node) => [node.id, { x: node.x, y: node.y }]));
  }, [layout, size]);
  usePointers(refs.canvas, view, put, scale);
  const pan = (event) => {
    const [dx, dy] = DIRECTIONS[event.key] ?? [];
    if (dx === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move(-dx * STEP, -dy * STEP);
  };
  const reveal = (node) => {
    const [dx, dy] = distanceTo(node, view.current, size);
    if (dx || dy) move(dx, dy);
  };
  const isNear = (node) => !isLarge || (near !== null && isInside(node, near));
  return { refs, size, fit, scale, pan, reveal, isNear };
}

/** How far the graph has to move so that a node is in the window. */
function distanceTo(node, { x, y, k }, { width, height }) {
  const along = (start, length, all) =>
    start < EDGE ? EDGE - start : Math.min(0, all - EDGE - start - length);
  return [
    along(x + node.x * k, NODE.width * k, width),
    along(y + node.y * k, NODE.height * k, height),
  ];
}

/** The window is as high as the graph, within bounds. */
export function heightOf({ width, height }, size) {
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
export function neighbour(nodes, from, key) {
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
    let moved = 0; // pixels since the pointer went down
    const down = (event) => {
      if (event.button) return;
      if (!pointers.size) moved = 0;
      pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    };
    const drag = (event) => {
      const last = pointers.get(event.pointerId);
      if (!last) return;
      const wide = pointers.size === 2 ? distance() : 0;
      pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
      moved += Math.abs(event.clientX - last.x) + Math.abs(event.clientY - last.y);
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
    const click = (event) => moved > CLICK_PIXELS && event.stopPropagation(); // It was a drag.
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
    element.addEventListener("click", click, true);
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
