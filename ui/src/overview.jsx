// The service at a glance: engines, and sessions with their work.
import { post, useFeed } from "./api.js";
import { Age, Notice, count, seconds, share } from "./format.jsx";

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
        <h2>Sessions</h2>
        <Sessions sessions={sessions} />
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
  const is_wanted = !engine.is_draining;
  const title = is_wanted ? "Give it no more calls; those that run go on" : "Give it calls again";
  return (
    <button
      class="quiet"
      title={title}
      onClick={() => post(`engines/${engine.engine_id}/drain`, { is_wanted })}
    >
      {is_wanted ? "Drain" : "Resume"}
    </button>
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

function Sessions({ sessions }) {
  if (!sessions.length) {
    return (
      <p class="hint">
        No session is live. Run a program, or <a href="#/playground">write a call here</a>.
      </p>
    );
  }
  return (
    <div class="scroll" tabindex="0" role="region" aria-label="Sessions">
      <table>
        <thead>
          <tr>
            <th>Session</th>
            <th>Tenant</th>
            <th>Models</th>
            <th>Calls</th>
            <th class="number">Prompt</th>
            <th class="number">Cached</th>
            <th class="number">Output</th>
            <th class="number">Age</th>
            <th aria-label="Actions" />
          </tr>
        </thead>
        <tbody>
          {sessions.map((session) => (
            <tr key={session.id}>
              <td>
                <a href={`#/session/${session.id}`}>{session.apps.join(", ") || session.id}</a>
              </td>
              <td>{session.tenant}</td>
              <td>{session.models.join(", ")}</td>
              <td>
                <Progress session={session} />
              </td>
              <td class="number">{count(session.prompt_tokens)}</td>
              <td class="number">
                {share(session.cached_tokens, session.prompt_tokens)}
                {session.prefix_breaks > 0 && (
                  <span class="state failed" title="Prompts that left what their program had sent before">
                    {session.prefix_breaks} {session.prefix_breaks === 1 ? "break" : "breaks"}
                  </span>
                )}
              </td>
              <td class="number">{count(session.output_tokens)}</td>
              <td class="number">
                <Age since={session.created_at} />
              </td>
              <td>
                <button class="quiet" onClick={() => post(`sessions/${session.id}/end`)}>
                  End
                </button>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Progress({ session }) {
  const failed = session.failed + session.cancelled;
  return (
    <>
      {session.done} of {session.calls}
      {session.running > 0 && <span class="state running">{session.running} running</span>}
      {failed > 0 && <span class="state failed">{failed} failed</span>}
    </>
  );
}
