// Who uses how much: calls, tokens and costs of tenants and of their functions.
import { rowsOf, useFeed } from "./api.js";
import { count, dollars, seconds, share } from "./format.js";
import { Icon } from "./icons.jsx";
import { Bones, Empty, Live, Notice, Table, save, useOpen, useSlow } from "./parts.jsx";
import { useTitle } from "./route.js";
import { Parts } from "./spark.jsx";

const SUMS = ["calls", "prompt", "cached", "generation", "service_s", "cost"];

const sums = (rows) =>
  Object.fromEntries(SUMS.map((key) => [key, rows.reduce((sum, row) => sum + (row[key] ?? 0), 0)]));
const byUse = (rows) => [...rows].sort((a, b) => b.prompt + b.generation - a.prompt - a.generation);

export function Tenants({ visitor, leave }) {
  useTitle("Tenants");
  const feed = useFeed("usage");
  const isSlow = useSlow(!feed.isLive && !feed.rows.size);
  const rows = rowsOf(feed.rows, "usage");
  const tenants = byUse(
    [...Map.groupBy(rows, (row) => row.tenant)].map(([tenant, functions]) => ({
      tenant,
      functions: byUse(functions),
      ...sums(functions),
    })),
  );
  return (
    <div class="screen">
      <div class="head">
        <h1>Tenants</h1>
        <Live feed={feed} />
        <span class="dim">
          Signed in as{" "}
          {visitor.tenant === null ? (
            "operator"
          ) : (
            <>
              tenant <b>{visitor.tenant}</b>
            </>
          )}
        </span>
        <span class="end">
          <button class="btn small only-phone" type="button" onClick={leave}>
            Sign out
          </button>
          {tenants.length > 0 && (
            <button
              class="btn small"
              type="button"
              onClick={() => save(asCsv(rows), "tenants.csv", "text/csv")}
            >
              Save as CSV
            </button>
          )}
        </span>
      </div>
      <Notice feed={feed} />
      {isSlow && !feed.error && !feed.lostAt && <Bones />}
      {tenants.length > 0 && <Usage tenants={tenants} />}
      {tenants.length > 0 && (
        <p class="faint note">
          Calls that engines ran since the server started. Reused results and Python functions are
          not counted. Engine time: the part of the engines' steps that these tokens took. Calls of
          one batch share a step, so it is less than the time that the calls ran. Costs need{" "}
          <code>prices</code> in the configuration.
        </p>
      )}
      {feed.isLive && !tenants.length && (
        <Empty title="No call has completed yet">
          <p>Calls, tokens, engine time and costs of each tenant and its functions appear here.</p>
        </Empty>
      )}
    </div>
  );
}

const FIELDS = ["tenant", "function", ...SUMS];

const asCsv = (rows) =>
  [FIELDS, ...rows.map((row) => FIELDS.map((field) => row[field] ?? ""))]
    .map((line) =>
      line
        .map((value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value))
        .join(","),
    )
    .join("\n");

function Usage({ tenants }) {
  const [open, toggle] = useOpen(tenants.length === 1 ? [tenants[0].tenant] : []);
  const total = tenants.reduce((sum, tenant) => sum + tenant.service_s, 0);
  const hasCosts = tenants.some((tenant) => tenant.cost > 0);
  const isShared = tenants.length > 1;
  return (
    <div class="card table">
      <Table
        label="Tenants"
        heads={[
          ["Tenant and function"],
          ["Calls", true],
          ["Prompt", true],
          ["Cached", true],
          ["Output", true],
          ["Engine time", true],
          isShared && ["Share"],
          hasCosts && ["Cost", true],
        ]}
      >
          {tenants.map(({ tenant, functions, ...sum }) => {
            const isOpen = open.has(tenant);
            const part = total ? Math.round((100 * sum.service_s) / total) : 0;
            return (
              <tbody key={tenant}>
                <tr>
                  <th scope="rowgroup">
                    <button
                      class="as-link cell"
                      type="button"
                      aria-expanded={isOpen}
                      onClick={() => toggle(tenant)}
                    >
                      <Icon name={isOpen ? "down" : "right"} />
                      {tenant}
                    </button>
                  </th>
                  <Numbers row={sum} />
                  {isShared && (
                    <td>
                      <Parts
                        kind="share"
                        parts={[
                          ["fg", part],
                          ["bg", 100 - part],
                        ]}
                        label={`${part} % of engine time`}
                      />
                      <span class="dim">{part} %</span>
                    </td>
                  )}
                  {hasCosts && <td class="n">{dollars(sum.cost)}</td>}
                </tr>
                {isOpen &&
                  functions.map((row) => (
                    <tr key={row.function} class="sub">
                      <td class="inner">{row.function}</td>
                      <Numbers row={row} isDim />
                      {isShared && <td />}
                      {hasCosts && <td class="n dim">{dollars(row.cost)}</td>}
                    </tr>
                  ))}
              </tbody>
            );
          })}
      </Table>
    </div>
  );
}

function Numbers({ row, isDim }) {
  const name = isDim ? "n dim" : "n";
  return (
    <>
      <td class={name}>{count(row.calls)}</td>
      <td class={name}>{count(row.prompt)}</td>
      <td class={name}>{share(row.cached, row.prompt)}</td>
      <td class={name}>{count(row.generation)}</td>
      <td class={name}>{seconds(row.service_s)}</td>
    </>
  );
}
