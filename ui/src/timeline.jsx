// Where the time went: a lane for each engine, a bar for each call, waiting and running apart.
import { seconds } from "./format.js";

const ROW = 16;
const WIDTH = 1000;
const LANE_GAP = 22;

/** Bars of one engine in as few rows as they need without overlapping. */
function pack(calls) {
  const ends = [];
  return calls
    .sort((a, b) => a[1].ready_s - b[1].ready_s)
    .map(([id, call]) => {
      const end = call.finished_s ?? Infinity;
      let row = ends.findIndex((other) => other <= call.ready_s);
      if (row < 0) row = ends.push(0) - 1;
      ends[row] = end;
      return { id, call, row };
    });
}

export function Timeline({ graph, critical, show }) {
  const shown = [...graph.calls].filter(([, call]) => call.ready_s != null);
  if (!shown.length) return <p class="hint">No call was ready yet.</p>;
  const times = shown.flatMap(([, call]) => [call.started_s ?? 0, call.finished_s ?? 0, call.ready_s]);
  const first = Math.min(...shown.map(([, call]) => call.ready_s));
  const last = Math.max(...times, first + 0.001);
  const x = (time) => ((time - first) / (last - first)) * WIDTH;
  const lanes = new Map();
  for (const entry of shown) {
    const lane = entry[1].engine ?? (entry[1].kind === "native" ? "sandbox" : "no engine yet");
    lanes.set(lane, [...(lanes.get(lane) ?? []), entry]);
  }
  let top = 0;
  const drawn = [...lanes].map(([name, calls]) => {
    const bars = pack(calls);
    const lane = { name, bars, top };
    top += LANE_GAP + ROW * (1 + Math.max(...bars.map((bar) => bar.row)));
    return lane;
  });
  return (
    <div class="scroll" tabindex="0" role="region" aria-label="Timeline">
      <svg class="timeline" viewBox={`0 0 ${WIDTH} ${top + 16}`} role="img" aria-label="Calls over time">
        {drawn.map((lane) => (
          <g key={lane.name} transform={`translate(0,${lane.top})`}>
            <text class="lane" x="0" y="13">
              {lane.name}
            </text>
            {lane.bars.map((bar) => (
              <Bar key={bar.id} {...{ bar, x, show, isCritical: critical.has(bar.id), last }} />
            ))}
          </g>
        ))}
        <text class="lane" x="0" y={top + 12}>
          {seconds(first)}
        </text>
        <text class="lane end" x={WIDTH} y={top + 12}>
          {seconds(last)}
        </text>
      </svg>
      <p class="hint legend">
        <i class="queued" /> queued, <i /> prefill, <i class="decode" /> generating. Outlined: critical path.
        Times are seconds since the session began.
      </p>
    </div>
  );
}

function Bar({ bar: { id, call, row }, x, show, isCritical, last }) {
  const y = LANE_GAP - 4 + row * ROW;
  const started = call.started_s ?? last;
  const finished = call.finished_s ?? last;
  const width = (from, to) => Math.max(1, x(to) - x(from));
  const firstToken = call.decode_s == null ? finished : Math.max(started, finished - call.decode_s);
  const label = `${call.func_name}: queued ${seconds(started - call.ready_s)}, ran ${seconds(finished - started)}`;
  return (
    <g class={`bar ${call.state}${isCritical ? " critical" : ""}`} onClick={() => show(id)}>
      <title>{label}</title>
      <rect class="queued" x={x(call.ready_s)} y={y} width={width(call.ready_s, started)} height={ROW - 4} />
      {call.started_s != null && <rect x={x(started)} y={y} width={width(started, finished)} height={ROW - 4} rx="2" />}
      {firstToken < finished && (
        <rect class="decode" x={x(firstToken)} y={y} width={width(firstToken, finished)} height={ROW - 4} rx="2" />
      )}
    </g>
  );
}
