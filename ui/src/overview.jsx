// The service at a glance: engines, and sessions with their work.
import { post, useFeed } from "./api.js";
import { AskButton } from "./ask.jsx";
import { Age, Notice, State, count, nameOf, runState, seconds, share } from "./format.jsx";

const rowsOf = (rows, kind) =>
  [...rows].filter(([key]) => key.startsWith(`${kind}:`)).map(([, row]) => row);

export function Overview({ isOperator }) {
  const feed = useFeed("overview");
  const service = feed.rows.get("service");
  const sessions = rowsOf(feed.rows, "session").sort((a, b) => b.created_at - a.created_at);
  return (
    <>
      <Notice feed={feed} />
      <section>
        <h2>Engines</h2>
        <Engines engines={rowsOf(feed.rows, "engine")} isOperator={isOperator} />
        {service && (
          <p>
            Queue: {service.queued} {service.queued === 1 ? "call" : "calls"}
          </p>
        )}
      </section>
      <section>
        <h2>Runs</h2>
        <Runs runs={sessions} isReady={feed.rows.size > 0} />
      </section>
    </>
  );
}

function Engines({ engines, isOperator }) {
  if (!engines.length) return <p class="hint">No engine has registered yet.</p>;
  const haveServers = engines.some((engine) => engine.server);
  return (
    <div class="scroll" tabindex="0" role="region" aria-label="Engines">
      <table>
        <thead>
          <tr>
            <th>Engine</th>
            <th>State</th>
            <th>Model</th>
            <th class="number">Running</th>
            <th>KV</th>
            <th title="KV that the engine keeps in its machine's memory">KV on the host</th>
            {haveServers && (
              <th title="Requests at the server behind the engine, of all its clients">Its server</th>
            )}
            {haveServers && <th>Its server's KV</th>}
            <th class="number">Step</th>
            <th class="number" title="Prompt tokens that were cached">
              Cached
            </th>
            <th class="number" title="Prompt tokens computed although they were cached once">
              Recomputed
            </th>
            {isOperator && <th aria-label="Actions" />}
          </tr>
        </thead>
        <tbody>
          {engines.map((engine) => (
            <tr key={engine.engine_id}>
              <td>{engine.engine_name}</td>
              <td>
                <EngineState engine={engine} />
              </td>
              <td title={sampling(engine.default_sampling)}>{engine.model}</td>
              <td class="number">{engine.num_running}</td>
              <td>
                <Room total={engine.blocks} free={engine.free_blocks} name="KV blocks in use" />
              </td>
              <td>
                <Room total={engine.host_blocks} free={engine.host_free_blocks} name="KV blocks on the host" />
              </td>
              {haveServers && <ServerCells load={engine.server} />}
              <td class="number">{engine.step_ms > 0 && seconds(engine.step_ms / 1000)}</td>
              <td class="number">{count(engine.hit_tokens)}</td>
              <td class="number">{count(engine.recomputed_tokens)}</td>
              {isOperator && (
                <td>
                  <DrainButton engine={engine} />
                </td>
              )}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** What holds for a request that does not set its own sampling; a foreign server's is not known. */
function sampling(defaults) {
  if (!defaults) return undefined;
  const values = Object.entries(defaults).map(([name, value]) => `${name} ${value}`);
  return `Default sampling: ${values.join(", ")}`;
}

function EngineState({ engine }) {
  if (!engine.is_draining) return <span class="state done">serving</span>;
  return engine.num_running ? (
    <span class="state queued">draining</span>
  ) : (
    <span class="state">drained</span>
  );
}

function DrainButton({ engine }) {
  const drain = (is_wanted) => post(`engines/${engine.engine_id}/drain`, { is_wanted });
  if (engine.is_draining) {
    return (
      <button class="quiet" title="Send it calls again" onClick={() => drain(false)}>
        Resume
      </button>
    );
  }
  return (
    <AskButton
      label="Drain…"
      question={`Drain ${engine.engine_name}? It gets no more calls. Its running calls finish.`}
      confirm="Drain"
      onConfirm={() => drain(true)}
    />
  );
}

function Room({ total, free, name }) {
  if (!total) return null;
  return (
    <>
      <meter min="0" max={total} value={total - free} aria-label={name} /> {share(total - free, total)}
    </>
  );
}

function ServerCells({ load }) {
  if (!load) return [<td />, <td />];
  return (
    <>
      <td>
        {load.running} running, {load.waiting} waiting
        {load.others > 0 && <span class="state queued">{load.others} of others</span>}
      </td>
      <td>
        {load.kv != null && <Room total={1} free={1 - load.kv} name="KV in use at its server" />}
        {load.others_kv > 0 && <span class="state queued">{share(load.others_kv, 1)} by others</span>}
      </td>
    </>
  );
}

function Runs({ runs, isReady }) {
  if (!runs.length) {
    return (
      isReady && (
        <p class="hint">
          There is no run yet. Start a program, or <a href="#/playground">write a call here</a>.
        </p>
      )
    );
  }
  return (
    <div class="scroll" tabindex="0" role="region" aria-label="Runs">
      <table>
        <thead>
          <tr>
            <th>Run</th>
            <th>State</th>
            <th>Tenant</th>
            <th>Models</th>
            <th>Calls</th>
            <th class="number">Prompt</th>
            <th class="number">Cached</th>
            <th class="number">Output</th>
            <th class="number">Began</th>
            <th class="number">Took</th>
            <th aria-label="Actions" />
          </tr>
        </thead>
        <tbody>
          {runs.map((run) => (
            <RunRow key={run.id} run={run} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function RunRow({ run }) {
  const name = nameOf(run);
  const isLive = run.state === "active";
  return (
    <tr>
      <td>
        <a href={`#/run/${run.id}`}>{name}</a>
      </td>
      <td>
        <State state={runState(run)} />
      </td>
      <td>{run.tenant}</td>
      <td>{run.models.join(", ")}</td>
      <td>
        <Progress run={run} />
      </td>
      <td class="number">{count(run.prompt_tokens)}</td>
      <td class="number">
        {share(run.cached_tokens, run.prompt_tokens)}
        {run.prefix_breaks > 0 && (
          <span class="state failed" title="Prompts that left what their program had sent before">
            {run.prefix_breaks} {run.prefix_breaks === 1 ? "break" : "breaks"}
          </span>
        )}
      </td>
      <td class="number">{count(run.output_tokens)}</td>
      <td class="number">
        <Age since={run.created_at} /> ago
      </td>
      <td class="number">{isLive ? "" : seconds(run.ended_at - run.created_at)}</td>
      <td>{isLive ? <EndButton run={run} name={name} /> : <DeleteButton run={run} name={name} />}</td>
    </tr>
  );
}

const EndButton = ({ run, name }) => (
  <AskButton
    label="End…"
    question={`End ${name}? Its running calls stop, and its program can no longer read values.`}
    confirm="End the run"
    onConfirm={() => post(`sessions/${run.id}/end`)}
  />
);

const DeleteButton = ({ run, name }) => (
  <AskButton
    label="Delete…"
    question={`Delete ${name}? Its prompts and values cannot be restored.`}
    confirm="Delete the run"
    onConfirm={() => post(`runs/${run.id}/delete`)}
  />
);

function Progress({ run }) {
  return (
    <>
      {run.done} of {run.calls}
      {run.running > 0 && <span class="state running">{run.running} running</span>}
      {run.failed > 0 && <span class="state failed">{run.failed} failed</span>}
      {run.cancelled > 0 && <span class="state">{run.cancelled} cancelled</span>}
    </>
  );
}
