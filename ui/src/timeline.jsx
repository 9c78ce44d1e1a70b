// When each call ran: a lane for each engine, and one for the program's own code.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { cut, seconds } from "./format.js";
import { useSize } from "./graph_moves.js";
import { memo } from "./memo.js";
import { Legend } from "./parts.jsx";
import { placeOf } from "./states.js";

const TALL = 24; // The height of a bar, and of a folded group.
const LOW = 13; // The height of a bar in a lane with many rows.
const MANY_ROWS = 6;
const GAP = 4;
const LANE_GAP = 14;
const TOP = 26; // Room for the ticks.
const MANY_CALLS = 300; // With more, the timeline is drawn after the graph.
const CHAR = 6.6; // The width of a character of a label.

/**
 * The bars of one lane in as few rows as they need, each as if it took `least` seconds or more. A
 * folded group is one bar. `before` and `next`: the neighbours of a bar in its row.
 * @returns {{bars: {from: number, row: number, id: string, members: string[]}[], rows: number}}
 */
function pack(items, least) {
  const rows = [];
  const ends = [];
  const bars = [...items]
    .sort((a, b) => a.from - b.from)
    .map((item) => {
      let row = ends.findIndex((end) => end <= item.from + 1e-6);
      if (row < 0) row = ends.push(0) - 1;
      ends[row] = Math.max(item.to, item.from + least);
      const bar = { ...item, row, before: rows[row] };
      if (bar.before) bar.before.next = bar;
      return (rows[row] = bar);
    });
  return { bars, rows: rows.length };
}

/** Calls by lane; equal ones of a node as one item for each lane if they are folded. */
function lanesOf(graph, layout, isFolded, now) {
  const lanes = new Map();
  for (const node of layout.nodes) {
    const started = node.members.filter(
      (id) => graph.calls.get(id)?.started_s != null || graph.calls.get(id)?.ready_s != null,
    );
    const byLane = Map.groupBy(started, (id) => laneOf(graph.calls.get(id)));
    for (const [lane, ids] of byLane) {
      const groups =
        isFolded && ids.length > 1 && node.members.length > 1 ? [ids] : ids.map((id) => [id]);
      for (const members of groups) {
        const calls = members.map((id) => graph.calls.get(id));
        const from = Math.min(...calls.map((call) => call.ready_s ?? call.started_s));
        const to = Math.max(...calls.map((call) => call.finished_s ?? now));
        if (!lanes.has(lane)) lanes.set(lane, []);
        lanes.get(lane).push({ id: members[0], node: node.id, members, from, to });
      }
    }
  }
  return new Map([...lanes].sort(([a], [b]) => rank(a) - rank(b) || (a < b ? -1 : 1)));
}

const laneOf = (call) => placeOf(call) || "no engine";
const rank = (lane) => ["reused", "sandbox", "no engine"].indexOf(lane);

/** Round distances between ticks: about one for each 90 pixels, and at least 1 ms. */
function ticksOf(length, width) {
  const wanted = Math.max(0.001, length / Math.max(3, width / 90));
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= wanted);
  return Array.from({ length: Math.floor(length / step + 1e-9) + 1 }, (_, i) => i * step);
}

const tick = (s, step) =>
  s === 0 ? "0 s" : step < 0.0995 && s < 1 ? `${Math.round(s * 1000)} ms` : step < 1 ? seconds(s) : s < 100 ? `${Math.round(s)} s` : seconds(s);

/** Whether to draw: a large timeline waits until the graph above it was drawn. */
function useAfterDrawing(isLarge) {
  const [isReady, setReady] = useState(!isLarge);
  useEffect(() => {
    let timer;
    const frame = requestAnimationFrame(() => (timer = setTimeout(() => setReady(true))));
    return () => {
      cancelAnimationFrame(frame);
      clearTimeout(timer);
    };
  }, []);
  return isReady;
}

export function Timeline({ graph, layout, wall, now, isFolded, shown, onOpen }) {
  const isReady = useAfterDrawing(graph.calls.size > MANY_CALLS);
  const box = useRef(null);
  const size = useSize(box);
  const width = Math.max(300, size?.width ?? 0);
  const lanes = useMemo(
    () => lanesOf(graph, layout, isFolded, now),
    [graph, layout, isFolded, now],
  );
  const isNarrow = width < 520;
  const left = isNarrow ? 74 : 96;
  const right = 14;
  const last = Math.max(0.001, wall.total, ...[...lanes.values()].flat().map((item) => item.to));
  const gaps = wall.segments.filter(({ kind }) => kind === "program");
  const has = (test) => [...graph.calls.values()].some(test);
  const isRunning = has((call) => call.state === "running");
  const ticks = ticksOf(last, width - left);
  const step = ticks[1] ?? last;
  // While calls run, the scale changes only in steps of half a tick.
  const length = isRunning ? (Math.ceil((2 * last) / step + 0.2) * step) / 2 : last * 1.02;
  const x = (time) => left + (time / length) * (width - left - right);
  let y = TOP;
  const drawn = [...lanes].map(([name, items]) => {
    // Reused calls take no time: each has a row, so that its label has room.
    const isAlone = name === "reused" && items.length <= MANY_ROWS;
    const { bars, rows } = pack(items, isAlone ? Infinity : last / 200);
    const height = rows > MANY_ROWS ? LOW : TALL;
    const lane = { name, bars, top: y, height };
    y += rows * (height + GAP) + LANE_GAP;
    return lane;
  });
  const programTop = y;
  if (gaps.length) y += 18 + LANE_GAP;
  return (
    <div class="tl" ref={box}>
      {!lanes.size && <p class="hint">No call was ready yet.</p>}
      {lanes.size > 0 && size && isReady && (
        <svg
          role="group"
          aria-label="Timeline of calls"
          viewBox={`0 0 ${width} ${y}`}
          width={width}
          height={y}
        >
          {ticks.map((time) => (
            <Tick key={time} x={x(time)} bottom={y - 8} text={tick(time, step)} isFirst={!time} />
          ))}
          {drawn.map((lane) => (
            <Lane
              key={lane.name}
              {...{ lane, graph, path: wall.path, x, now, shown, isNarrow, onOpen }}
              end={width}
            />
          ))}
          {gaps.length > 0 && (
            <text class="lane" x="14" y={programTop + 13}>
              {isNarrow ? "program" : "your program"}
            </text>
          )}
          {gaps.map(({ from, to, before }) => (
            <Gap
              key={from}
              x={x(from)}
              y={programTop}
              width={x(to) - x(from)}
              label={before?.name ? `before it set ${before.name}` : ""}
              time={to - from}
            />
          ))}
          {isRunning && (
            <>
              <line class="now" x1={x(now)} x2={x(now)} y1="8" y2={y - 8} />
              <text x={x(now) - 4} y={y - 2} text-anchor="end">
                now
              </text>
            </>
          )}
        </svg>
      )}
      <Legend
        words={{
          ...LEGEND,
          ...(gaps.length > 0 && { "k-prog": "your program" }),
          ...(isRunning && { "k-use": "running" }),
          ...(has((call) => call.state === "failed") && { "k-failed": "failed" }),
          ...(has((call) => call.reused) && { "k-reused": "reused" }),
        }}
        name="legend tl-legend"
      />
    </div>
  );
}

const Tick = ({ x, bottom, text, isFirst }) => (
  <g>
    <line class="tick" x1={x} x2={x} y1="20" y2={bottom} />
    <text x={x} y="14" text-anchor={isFirst ? "start" : "middle"}>
      {text}
    </text>
  </g>
);

function Lane({ lane, graph, path, x, now, shown, isNarrow, end, onOpen }) {
  return (
    <g>
      <text class="lane" x="14" y={lane.top + 15}>
        {cut(lane.name, isNarrow ? 9 : 13)}
        <title>{lane.name}</title>
      </text>
      {lane.bars.map((bar) => (
        <Bar
          key={`${bar.id} ${bar.members.length}`}
          {...lookOf(bar, graph, path, x, lane, now)}
          id={bar.id}
          node={bar.node}
          isGroup={bar.members.length > 1}
          isShown={bar.members.length > 1 ? shown === `node ${bar.node}` : shown === bar.id}
          isNarrow={isNarrow}
          least={bar.before ? x(bar.before.to) : 0}
          most={bar.next ? x(bar.next.from) : end}
          onOpen={onOpen}
        />
      ))}
    </g>
  );
}

const LEGEND = {
  "k-queue": "queued",
  "k-soft": "prefill",
  "k-bar": "generating",
  "k-shared": "critical path",
};

const Gap = ({ x, y, width, label, time }) => (
  <g>
    <title>Your program: {seconds(time)}</title>
    <rect class="prog" x={x} y={y} width={Math.max(2, width)} height="18" rx="3" />
    {label && width > label.length * CHAR + 12 && (
      <text class="prog-t" x={x + 6} y={y + 13}>
        {label}
      </text>
    )}
  </g>
);

/** What a bar shows, as plain values. */
function lookOf(bar, graph, path, x, lane, now) {
  const calls = bar.members.map((id) => graph.calls.get(id));
  const [call] = calls;
  const states = new Set(calls.map((one) => one.state));
  const state = states.has("failed")
    ? "failed"
    : states.has("running")
      ? "running"
      : states.has("cancelled")
        ? "cancelled"
        : call.reused
          ? "reused"
          : "";
  const started = Math.min(...calls.map((one) => one.started_s ?? now));
  const ready = Math.min(...calls.map((one) => one.ready_s ?? started));
  const finished = Math.max(...calls.map((one) => one.finished_s ?? now));
  const first = Math.min(...calls.map((one) => firstToken(one, now)));
  const isGroup = calls.length > 1;
  const name = call.func_name || call.output;
  return {
    label: isGroup ? `${name} ×${calls.length}` : name,
    title: titleOf(name, calls, { ready, started, first, finished }),
    state,
    isCritical: bar.members.some((id) => path.has(id)),
    y: lane.top + bar.row * (lane.height + GAP),
    height: lane.height,
    xReady: x(ready),
    xStart: x(started),
    xFirst: x(Math.min(first, finished)),
    xEnd: x(finished),
    steps: isGroup ? stepsOf(calls, x, first, now, lane.height) : "",
  };
}

/** Seconds until the first token of a call; its end, if it has none; its start, if it is not known. */
function firstToken(call, now) {
  const end = call.finished_s ?? now;
  const start = call.started_s ?? now;
  if (call.first_token_s != null) return call.first_token_s;
  if (call.kind === "native" || call.reused) return start;
  if (call.finished_s == null) return "first_token_s" in call ? end : start;
  return call.decode_s == null ? end : Math.max(start, end - call.decode_s);
}

function titleOf(name, calls, { ready, started, first, finished }) {
  if (calls.length > 1)
    return `${name} ×${calls.length}: from ${seconds(started)} to ${seconds(finished)}. The height is how many still run.`;
  const parts = [
    started - ready > 0.001 && `queued ${seconds(started - ready)}`,
    first - started > 0.001 && `prefill ${seconds(first - started)}`,
    calls[0].reused ? "reused" : finished - first > 0.001 && `generating ${seconds(finished - first)}`,
  ];
  return `${name}: from ${seconds(ready)} to ${seconds(finished)}${parts.some(Boolean) ? `; ${parts.filter(Boolean).join(", ")}` : ""}`;
}

/** The outline of a group: its height is how many calls still run. */
function stepsOf(calls, x, first, now, height) {
  const ends = calls.map((call) => call.finished_s ?? now).sort((a, b) => a - b);
  let d = `M${x(first)},0`;
  ends.forEach(
    (end, i) => (d += `H${x(Math.max(end, first))}V${((i + 1) / ends.length) * height}`),
  );
  return `${d}H${x(first)}Z`;
}

const Bar = memo(function Bar({
  id,
  node,
  isGroup,
  label,
  title,
  state,
  isCritical,
  isShown,
  isNarrow,
  least,
  most,
  y,
  height,
  xReady,
  xStart,
  xFirst,
  xEnd,
  steps,
  onOpen,
}) {
  const open = () => onOpen(isGroup ? { group: node } : id);
  const press = (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    open();
  };
  const need = label.length * CHAR + 12;
  const isInside = xEnd - xFirst > need;
  const isBefore = !isInside && xFirst - xStart > need;
  const isLeft = !isInside && !isBefore && xEnd + need > most;
  // The label may not cover a neighbour, nor the label of the one before.
  const isFree = !isLeft || xReady - 2 * need > least;
  const hasLabel =
    height > LOW && isFree && (isInside || isBefore || !isNarrow || state === "failed");
  const x = isInside ? xFirst + 6 : isBefore ? xStart + 6 : isLeft ? xReady - 6 : xEnd + 6;
  const colour = !isInside ? "" : state === "running" ? "on-run" : isCritical ? "on" : "";
  return (
    <g
      class={["bar-g", state, isCritical && state !== "failed" && "c", isShown && "shown"]
        .filter(Boolean)
        .join(" ")}
      role="button"
      tabindex="0"
      aria-label={title}
      data-node={node}
      data-call={isGroup ? undefined : id}
      onClick={open}
      onKeyDown={press}
    >
      {xStart - xReady > 1 && (
        <rect
          class="queue"
          x={xReady}
          y={y + 1}
          width={xStart - xReady}
          height={height - 2}
          rx="3"
        />
      )}
      {xFirst - xStart >= 0.5 && (
        <rect class="pre" x={xStart} y={y} width={xFirst - xStart} height={height} rx="3" />
      )}
      {steps ? (
        <path class="dec" d={steps} transform={`translate(0,${y})`} />
      ) : (
        <rect
          class="dec"
          x={xFirst}
          y={y}
          width={Math.max(3, xEnd - xFirst)}
          height={height}
          rx="3"
        />
      )}
      {isShown && (
        <rect
          class="frame"
          x={xReady - 1.5}
          y={y - 1.5}
          width={Math.max(4, xEnd - xReady) + 3}
          height={height + 3}
          rx="4"
        />
      )}
      {hasLabel && (
        <text class={colour} x={x} y={y + height / 2 + 4} text-anchor={isLeft ? "end" : undefined}>
          {label}
        </text>
      )}
    </g>
  );
});
