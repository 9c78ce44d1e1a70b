// The service above the list of runs: its engines, and figures of the last ten minutes.
import { useMemo, useState } from "preact/hooks";
import { rowsOf, useFeed } from "./api.js";
import { ago, count, plural, seconds, share } from "./format.js";
import { Glyph } from "./icons.jsx";
import { Slots, Spark } from "./spark.jsx";

const STEP_S = 10; // Seconds between two values of the series.

export const engineState = (engine) =>
  engine.is_draining
    ? {
        state: engine.num_running ? "queued" : "stopped",
        word: engine.num_running ? "draining" : "drained",
      }
    : { state: "done", word: "serving" };

/** The used share of an engine's KV; of the server behind it, if there is one. */
export const kvShare = (engine) =>
  engine.server?.kv ??
  (engine.blocks ? (engine.blocks - engine.free_blocks) / engine.blocks : null);

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
      {engine.tasks_capacity > 0 && (
        <Slots used={engine.num_running} total={engine.tasks_capacity} />
      )}
      <span class="facts">
        {engine.num_running == null ? null : engine.is_draining ? (
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

const STEPS = 60;

/** The last steps of the service, the oldest first; null where there was none yet. */
export function useSeries() {
  const feed = useFeed("series");
  return useMemo(() => {
    const steps = rowsOf(feed.rows, "step")
      .sort((a, b) => a.at - b.at)
      .slice(-STEPS);
    return steps.length ? [...Array(STEPS - steps.length).fill(null), ...steps] : [];
  }, [feed.rows]);
}

export const courseOf = (series, read) =>
  series.length ? series.map((step) => (step === null ? null : (read(step) ?? null))) : undefined;

/** When a step was, if it is not the last one. */
const agoOf = (step) =>
  step < 0 || step === STEPS - 1 ? "" : `, ${ago(0, (STEPS - 1 - step) * STEP_S)}`;

const number = (value) => (value == null ? "–" : count(Math.round(value)));
const percent = (value) => (value == null ? "–" : share(value, 1));
const duration = (value) => (value == null ? "–" : seconds(value));

/** Figures of now, with their course where the service records one. */
export function Tiles({ rows, engines, service }) {
  const series = useSeries();
  const runs = [...rows].filter(([key]) => key.startsWith("session:")).map(([, row]) => row);
  const sum = (field) => runs.reduce((all, run) => all + (run[field] ?? 0), 0);
  const running = engines.reduce((all, engine) => all + (engine.num_running ?? 0), 0);
  const shares = engines.map(kvShare).filter((kv) => kv !== null);
  const kv = shares.length ? shares.reduce((a, b) => a + b, 0) / shares.length : null;
  const course = (field) => courseOf(series, (step) => step[field]);
  const last = series.at(-1);
  const lastToken = series.findLastIndex((step) => step?.first_token_s != null);
  return (
    <section
      class="card tiles"
      aria-label="The service now"
      tabindex={innerWidth < 720 ? 0 : undefined}
    >
      {last ? (
        <Tile
          title="Tokens/s"
          value={number(last.tokens_s)}
          unit="last 10 s"
          values={course("tokens_s")}
          write={number}
        />
      ) : (
        <Tile title="Output" value={count(sum("output_tokens"))} unit="tokens" />
      )}
      {engines.some((engine) => engine.num_running != null) && (
        <Tile
          title="Running calls"
          value={count(running)}
          unit={`+ ${service.queued ?? 0} queued`}
          values={course("running")}
          second={course("queued")}
          write={number}
        />
      )}
      <Tile
        title="From cache"
        value={
          last?.cached == null
            ? share(sum("cached_tokens"), sum("prompt_tokens")) || "–"
            : percent(last.cached)
        }
        unit={last?.cached == null ? "of listed runs" : "of prompts, last 10 s"}
        values={course("cached")}
        write={percent}
      />
      {kv !== null && (
        <Tile
          title="KV in use"
          value={percent(kv)}
          unit={`of ${plural(engines.length, "engine")}`}
          values={course("kv")}
          write={percent}
        />
      )}
      {last && (
        <Tile
          title="First token"
          value={duration(series[lastToken]?.first_token_s)}
          unit={`median${agoOf(lastToken)}`}
          values={course("first_token_s")}
          write={duration}
        />
      )}
    </section>
  );
}

function Tile({ title, value, unit, values, second, write }) {
  const [at, setAt] = useState(null);
  const isPast = at !== null && values?.[at] != null;
  return (
    <div class="tile">
      <h2 class="cap">{title}</h2>
      <div class="v">
        {isPast ? write(values[at]) : value}{" "}
        <small>{isPast ? agoOf(at).slice(2) : unit}</small>
      </div>
      {values && (
        <Spark values={values} second={second} label={title} write={write} onPoint={setAt} />
      )}
    </div>
  );
}
