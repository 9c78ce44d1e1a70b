// The service above the list of runs: its engines, and figures of the last ten minutes.
import { useState } from "preact/hooks";
import { count, plural, seconds, share } from "./format.js";
import { Glyph } from "./icons.jsx";
import { Slots, Spark } from "./spark.jsx";

const STEP_S = 10; // Seconds between two values of the series.

export const engineState = (engine) =>
  engine.is_draining ? { state: engine.num_running ? "queued" : "stopped", word: engine.num_running ? "draining" : "drained" } : { state: "done", word: "serving" };

/** The used share of an engine's KV; of the server behind it, if there is one. */
export const kvShare = (engine) =>
  engine.server?.kv ?? (engine.blocks ? (engine.blocks - engine.free_blocks) / engine.blocks : null);

export function EngineCards({ engines }) {
  if (!engines.length) {
    return (
      <p class="notice">
        <Glyph state="queued" />
        <span>No engine has registered. Calls wait until one does.</span>
      </p>
    );
  }
  return (
    <div class="engines" role="group" aria-label="Engines">
      {engines.map((engine) => (
        <EngineCard key={engine.key} engine={engine} />
      ))}
    </div>
  );
}

function EngineCard({ engine }) {
  const { state, word } = engineState(engine);
  const kv = kvShare(engine);
  return (
    <a class="card eng" href="#/engines">
      <span class="name">
        <Glyph state={state} />
        <span>{engine.engine_name}</span>
        <span class="sr">{word}</span>
        <span class="dim cut">{engine.model}</span>
      </span>
      {engine.tasks_capacity > 0 && <Slots used={engine.num_running} total={engine.tasks_capacity} />}
      <span class="facts">
        {engine.is_draining ? (
          <span>
            <b>{word}</b>
            {engine.num_running > 0 && `, ${plural(engine.num_running, "call")} left`}
          </span>
        ) : (
          <span>
            <b>
              {engine.num_running} of {engine.tasks_capacity}
            </b>{" "}
            running
          </span>
        )}
        {kv !== null && (
          <span>
            <b>{share(kv, 1)}</b> KV
          </span>
        )}
        {engine.server && (
          <span>
            <b>{engine.server.others}</b> of others
          </span>
        )}
        {engine.step_ms > 0 && (
          <span>
            <b>{seconds(engine.step_ms / 1000)}</b> a step
          </span>
        )}
      </span>
    </a>
  );
}

/** Figures of now from the rows, with their course where there is a series. */
export function Tiles({ rows, engines, service }) {
  const runs = [...rows].filter(([key]) => key.startsWith("session:")).map(([, row]) => row);
  const sum = (field) => runs.reduce((all, run) => all + (run[field] ?? 0), 0);
  const running = engines.reduce((all, engine) => all + engine.num_running, 0);
  const shares = engines.map(kvShare).filter((kv) => kv !== null);
  const kv = shares.length ? shares.reduce((a, b) => a + b, 0) / shares.length : null;
  return (
    <section class="card tiles" aria-label="The service now">
      <Tile title="Running, queued" value={count(running)} unit={`+ ${service.queued}`} />
      <Tile title="From cache" value={share(sum("cached_tokens"), sum("prompt_tokens")) || "–"} unit="of prompts" />
      <Tile title="Output" value={count(sum("output_tokens"))} unit="tokens" />
      <Tile title="KV in use" value={kv === null ? "–" : share(kv, 1)} unit={`of ${plural(engines.length, "engine")}`} />
    </section>
  );
}

function Tile({ title, value, unit, values, second, write }) {
  const [at, setAt] = useState(null);
  const isPast = at !== null && values;
  return (
    <div class="tile">
      <h2 class="cap">{title}</h2>
      <div class="v">
        {isPast ? write(values[at]) : value}
        <small>{isPast ? `${(values.length - 1 - at) * STEP_S} s ago` : unit}</small>
      </div>
      {values && <Spark values={values} second={second} label={title} write={write} onPoint={setAt} />}
    </div>
  );
}
