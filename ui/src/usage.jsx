// Who used what: calls, tokens and costs of tenants and of their functions.
import { useFeed } from "./api.js";
import { Notice, count, seconds, share } from "./format.jsx";

const SUMS = ["calls", "prompt", "cached", "generation", "service_s", "cost"];

export function Usage() {
  const feed = useFeed("usage");
  const rows = [...feed.rows.values()];
  const tenants = [...Map.groupBy(rows, (row) => row.tenant)]
    .map(([tenant, functions]) => ({ tenant, functions: byUse(functions), ...sums(functions) }))
    .sort((a, b) => b.prompt + b.generation - a.prompt - a.generation);
  return (
    <>
      <Notice feed={feed} />
      <section>
        <h2>Tenants</h2>
        <p class="hint">
          Completed calls since the server started. Engine time: time of the engines that their tokens took.
          Cost: from <code>prices</code> in the config.
        </p>
        {tenants.length ? <Table tenants={tenants} /> : <p class="hint">No calls yet.</p>}
      </section>
    </>
  );
}

const byUse = (rows) => rows.sort((a, b) => b.prompt + b.generation - a.prompt - a.generation);

const sums = (rows) =>
  Object.fromEntries(SUMS.map((key) => [key, rows.reduce((sum, row) => sum + row[key], 0)]));

function Table({ tenants }) {
  return (
    <div class="scroll" tabindex="0" role="region" aria-label="Tenants">
      <table>
        <thead>
          <tr>
            <th>Tenant and function</th>
            <th class="number">Calls</th>
            <th class="number">Prompt</th>
            <th class="number">Cached</th>
            <th class="number">Output</th>
            <th class="number">Engine time</th>
            <th class="number">Cost</th>
          </tr>
        </thead>
        {tenants.map(({ tenant, functions, ...total }) => (
          <tbody key={tenant}>
            <tr class="total">
              <th scope="rowgroup">{tenant}</th>
              <Numbers row={total} />
            </tr>
            {functions.map((row) => (
              <tr key={row.function}>
                <td class="inner">{row.function}</td>
                <Numbers row={row} />
              </tr>
            ))}
          </tbody>
        ))}
      </table>
    </div>
  );
}

function Numbers({ row }) {
  return (
    <>
      <td class="number">{count(row.calls)}</td>
      <td class="number">{count(row.prompt)}</td>
      <td class="number">{share(row.cached, row.prompt)}</td>
      <td class="number">{count(row.generation)}</td>
      <td class="number">{seconds(row.service_s)}</td>
      <td class="number">{row.cost > 0 && row.cost.toFixed(row.cost < 1 ? 4 : 2)}</td>
    </>
  );
}
