// Small drawings: a line over the last ten minutes, the slots of a batch, and parts of a whole.
import { useState } from "preact/hooks";

const WIDTH = 200;
const HEIGHT = 34;
const MAX_SLOTS = 64; // Above this, one drawn slot stands for several.

/** The parts of a line without its unknown values. */
function linesOf(values, max) {
  const lines = [];
  values.forEach((value, i) => {
    if (value == null) return;
    const point = `${((i / Math.max(1, values.length - 1)) * WIDTH).toFixed(1)},${(HEIGHT - (value / max) * 32).toFixed(1)}`;
    if (values[i - 1] == null) lines.push([point]);
    else lines.at(-1).push(point);
  });
  return lines.map((line) => (line.length > 1 ? line : [line[0], line[0]]));
}

const stroke = (lines) => lines.map((line) => `M${line.join("L")}`).join("");

/** The line down to the ground and back. */
const area = (lines) =>
  lines
    .map(
      (line) =>
        `M${line[0].split(",")[0]},${HEIGHT}L${line.join("L")}L${line.at(-1).split(",")[0]},${HEIGHT}Z`,
    )
    .join("");

/** `values`: one for each step, null: unknown. `onPoint` gets the number under the pointer, or null. */
export function Spark({ values, second, label, write, onPoint }) {
  const [at, setAt] = useState(null);
  const known = values.filter((value) => value != null);
  const max = Math.max(0, ...known, ...(second ?? []).filter((value) => value != null)) * 1.12 || 1;
  const lines = linesOf(values, max);
  const point = (number) => {
    setAt(number);
    onPoint?.(number);
  };
  const follow = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const number = Math.round(((event.clientX - box.x) / box.width) * (values.length - 1));
    if (number >= 0 && number < values.length) point(number);
  };
  const x = at === null ? null : (at / Math.max(1, values.length - 1)) * WIDTH;
  return (
    <svg
      class="spark"
      viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
      preserveAspectRatio="none"
      role="img"
      aria-label={`${label}, the last 10 minutes: now ${write(values.at(-1))}, highest ${write(known.length ? Math.max(...known) : null)}`}
      onPointerMove={follow}
      onPointerLeave={() => point(null)}
    >
      <line x1="0" x2={WIDTH} y1="33.5" y2="33.5" />
      <path class="area" d={area(lines)} />
      <path d={stroke(lines)} />
      {second && <path class="second" d={stroke(linesOf(second, max))} />}
      {x !== null && <line class="at" x1={x} x2={x} y1="0" y2={HEIGHT} />}
    </svg>
  );
}

export function Slots({ used, total }) {
  const drawn = Math.min(total, MAX_SLOTS);
  const on = Math.round((used / Math.max(1, total)) * drawn);
  const width = drawn * 7 - 2;
  return (
    <svg
      class="slots"
      viewBox={`0 0 ${width} 10`}
      width={Math.min(width, 224)}
      preserveAspectRatio="none"
      role="img"
      aria-label={`${used} of ${total} slots of the batch in use`}
    >
      {Array.from({ length: drawn }, (_, i) => (
        <rect key={i} class={i < on ? "on" : undefined} x={i * 7} width="5" height="10" rx="1" />
      ))}
    </svg>
  );
}

/** `parts`: pairs of a class and a share in 1/100, drawn one after the other. */
export function Parts({ kind, parts, label }) {
  let x = 0;
  return (
    <svg class={kind} viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label={label}>
      {parts.map(([name, width]) => {
        const from = x;
        x += width;
        return (
          width > 0 && (
            <rect key={name} class={name} x={from} width={Math.max(0.5, width - 0.4)} height="10" />
          )
        );
      })}
    </svg>
  );
}
