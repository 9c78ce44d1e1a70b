// Is there room, and does sharing work: engines, the prefixes in their KV, and the last decisions.
import { post, rowsOf, useFeed } from "./api.js";
import { AskButton } from "./ask.jsx";
import { ago, clock, count, fullDate, plural, seconds, share } from "./format.js";
import { Pill } from "./icons.jsx";
import { courseOf, engineState, kvShare, useSeries } from "./overview.jsx";
import { Bones, Empty, Legend, Live, Notice, Table, say, useNow, useSlow } from "./parts.jsx";
import { Prefixes } from "./prefixes.jsx";
import { useTitle } from "./route.js";
import { Parts, Slots, Spark } from "./spark.jsx";

export function Engines({ isOperator }) {
  useTitle("Engines");
  const overview = useFeed("overview");
  const placement = useFeed("placement");
  const series = useSeries();
  const service = overview.rows.get("service");
  const isSlow = useSlow(!service);
  const engines = rowsOf(overview.rows, "engine");
  const contexts = rowsOf(placement.rows, "context").map((row) => ({
    ...row,
    id: Number(row.key),
  }));
  return (
    <div class="screen">
      <div class="head">
        <h1>Engines and KV</h1>
        <Live feed={overview} />
        {service && (
          <span class="dim">
            {plural(engines.length, "engine")}, {plural(service.queued, "call")} queued
          </span>
        )}
        <span class="end">
          <a class="btn small" href="#/events">
            What happened
          </a>
        </span>
      </div>
      <Notice feed={overview} />
      {!service && isSlow && !overview.lostAt && <Bones rows={4} />}
      {service && !engines.length && (
        <Empty title="No engine has registered">
          <p>Calls wait until an engine registers.</p>
        </Empty>
      )}
      {engines.length > 0 && (
        <div class="cards">
          {engines.map((engine) => (
            <EngineCard
              key={engine.key}
              engine={engine}
              contexts={contexts.filter((context) => context.engine === engine.engine_name)}
              series={series}
              others={engines.length - 1}
              isOperator={isOperator}
              isLive={overview.isLive}
            />
          ))}
        </div>
      )}
      <div class="two">
        <Prefixes contexts={contexts} engines={engines} />
        <Decisions decisions={rowsOf(placement.rows, "decision").sort((a, b) => b.at - a.at)} />
      </div>
    </div>
  );
}

function EngineCard({ engine, contexts, series, others, isOperator, isLive }) {
  const { state, word } = engineState(engine);
  const course = (field) => courseOf(series, (step) => step.engines?.[engine.engine_name]?.[field]);
  const steps = course("step_ms");
  const rates = course("tokens_s");
  const rate = (value) => (value == null ? "–" : count(Math.round(value)));
  const time = (value) => (value == null ? "–" : seconds(value / 1000));
  return (
    <article class="card ecard" aria-label={engine.engine_name}>
      <header>
        <h2>{engine.engine_name}</h2>
        <Pill state={state} word={word} />
        <span class="dim" title={sampling(engine.default_sampling)}>
          {engine.model}
        </span>
        {isOperator && <DrainButton engine={engine} others={others} isLive={isLive} />}
      </header>
      <div class="pair">
        {engine.tasks_capacity > 0 && (
          <Figure
            name="Batch"
            value={engine.num_running}
            unit={` of ${engine.tasks_capacity}`}
          >
            <Slots used={engine.num_running} total={engine.tasks_capacity} />
          </Figure>
        )}
        {engine.step_ms > 0 && (
          <Figure name="A step" value={seconds(engine.step_ms / 1000)}>
            {steps && <Spark values={steps} label="Step time" write={time} />}
          </Figure>
        )}
        {rates && (
          <Figure name="Tokens/s" value={rate(rates.at(-1))}>
            <Spark values={rates} label="Tokens per second" write={rate} />
          </Figure>
        )}
        {engine.server && <Server load={engine.server} />}
      </div>
      <Tiers engine={engine} contexts={contexts} />
      {engine.hit_tokens > 0 && (
        <p class="note dim">
          Since the engine registered, {count(engine.hit_tokens)} prompt tokens were in its KV when
          their call was placed
          {engine.recomputed_tokens > 0 &&
            `, ${count(engine.recomputed_tokens)} were computed again after an eviction`}
          .
        </p>
      )}
      {engine.warning && (
        <p class="note dim" title={fullDate(engine.warned_at)}>
          Last warning, at {clock(engine.warned_at)}: {engine.warning}
        </p>
      )}
    </article>
  );
}

/** Values for requests that do not set their own sampling; of a foreign server they are unknown. */
function sampling(defaults) {
  if (!defaults) return undefined;
  return `Default sampling: ${Object.entries(defaults)
    .map(([name, value]) => `${name} ${value}`)
    .join(", ")}`;
}

const Figure = ({ name, value, unit, children }) => (
  <div>
    <h3>{name}</h3>
    <div class="v">
      {value}
      <small>{unit}</small>
    </div>
    {children}
  </div>
);

const Server = ({ load }) => (
  <Figure name="Its server" value={load.running} unit={` running, ${load.waiting} waiting`}>
    <p class="dim">
      {load.others} of other clients
      {load.others_kv > 0 && `, with ${share(load.others_kv, 1)} of its KV`}
    </p>
  </Figure>
);

function DrainButton({ engine, others, isLive }) {
  const drain = (is_wanted) => post(`engines/${engine.engine_id}/drain`, { is_wanted });
  if (engine.is_draining) {
    return (
      <button
        class="btn small"
        type="button"
        disabled={!isLive}
        onClick={() => drain(false).catch((failure) => say(failure.message))}
      >
        Resume
      </button>
    );
  }
  const rest = others
    ? `New calls go to ${others === 1 ? "the other engine" : `the ${others} other engines`}.`
    : "It is the only engine, so new calls wait.";
  return (
    <AskButton
      label="Drain…"
      title={`Drain ${engine.engine_name}?`}
      question={`Its ${plural(engine.num_running ?? 0, "running call")} finish. ${rest} You can resume it at any time.`}
      confirm={`Drain ${engine.engine_name}`}
      keep="Keep it serving"
      disabled={!isLive}
      onConfirm={() => drain(true)}
    />
  );
}

const TIERS = {
  "k-shared": "shared prefixes",
  "k-use": "running calls",
  "k-kept": "kept for later",
  "k-free": "free",
};

/** KV in use, split into shared prefixes, running calls, and contexts kept for later. */
function Tiers({ engine, contexts }) {
  const kv = kvShare(engine);
  if (kv === null) return null;
  const used = 100 * kv;
  const sum = (rows) => rows.reduce((all, row) => all + row.own_tokens, 0);
  const whole = sum(contexts) || 1;
  const shared = (used * sum(contexts.filter((c) => c.is_shared))) / whole;
  const kept = (used * sum(contexts.filter((c) => !c.is_shared && !c.in_use))) / whole;
  const running = contexts.length ? used - shared - kept : used;
  const host = engine.host_blocks
    ? (100 * (engine.host_blocks - engine.host_free_blocks)) / engine.host_blocks
    : null;
  const text = engine.blocks ? `${share(kv, 1)} of ${count(engine.blocks)} blocks` : share(kv, 1);
  return (
    <div class="tiers">
      <span class="dim">KV</span>
      <Parts
        kind="tier"
        parts={[
          ["shared", shared],
          ["use", running],
          ["kept", kept],
          ["free", 100 - used],
        ]}
        label={`KV: ${text}`}
      />
      <span class="n">{text}</span>
      {host !== null && (
        <>
          <span class="dim">Host</span>
          <Parts
            kind="tier"
            parts={[
              ["kept", host],
              ["free", 100 - host],
            ]}
            label={`KV in CPU memory: ${Math.round(host)} %`}
          />
          <span class="n">
            {Math.round(host)} % of {count(engine.host_blocks)} blocks
          </span>
        </>
      )}
      <Legend words={TIERS} />
    </div>
  );
}

/** Equal decisions of one run that follow each other become one row. */
function fold(decisions) {
  const folded = [];
  for (const decision of decisions) {
    const last = folded.at(-1);
    if (last && ["session", "func", "engine"].every((field) => last[0][field] === decision[field]))
      last.push(decision);
    else folded.push([decision]);
  }
  return folded;
}

function Decisions({ decisions }) {
  const now = useNow(decisions.length > 0);
  const folded = fold(decisions);
  return (
    <section class="card box">
      <header>
        <h2>Last placements</h2>
        <span class="dim">and what the scheduler predicted</span>
      </header>
      {!folded.length && <p class="hint">No call was placed yet.</p>}
      {folded.length > 0 && (
        <Table
          label="Decisions"
          heads={[["Call"], ["Went to"], ["Expected cached", true], ["Age", true]]}
        >
          <tbody>
            {folded.map((group) => (
              <DecisionRow key={group[0].key} group={group} now={now} />
            ))}
          </tbody>
        </Table>
      )}
    </section>
  );
}

function DecisionRow({ group, now }) {
  const [last] = group;
  const sum = (field) => group.reduce((all, one) => all + (one[field] ?? 0), 0);
  const prompt = sum("prompt_tokens");
  const waited = Math.max(...group.map((one) => one.waited_s ?? 0));
  return (
    <tr>
      <td>
        <a href={`#/run/${last.session}`}>
          {last.func || "call"}
          {group.length > 1 && ` ×${group.length}`}
        </a>
      </td>
      <td>
        {last.engine}
        <Compared decision={last} />
        {waited >= 0.1 && <div class="dim">queued {seconds(waited)}</div>}
      </td>
      <td class="n">{share(prompt - sum("to_compute"), prompt)}</td>
      <td class="n dim" title={fullDate(last.at)}>
        {ago(last.at, now)}
      </td>
    </tr>
  );
}

/** Predicted seconds there and on the best other engine; nothing if there was no choice. */
function Compared({ decision: { compared = [], engine } }) {
  if (compared.length < 2) return null;
  const text = (one) => (one.seconds === null ? "full" : seconds(one.seconds));
  const others = compared
    .filter((one) => one.engine !== engine)
    .sort((a, b) => (a.seconds ?? Infinity) - (b.seconds ?? Infinity));
  const own = compared.find((one) => one.engine === engine);
  return (
    <div class="dim">
      {own && `predicted ${text(own)}; `}
      {others
        .slice(0, 2)
        .map((one) => `${one.engine} ${text(one)}`)
        .join(", ")}
    </div>
  );
}
