// All runs: what runs, what ran and what failed, with the service's last ten minutes above.
import { useMemo } from "preact/hooks";
import { rowsOf, useFeed } from "./api.js";
import { count, plural, seconds } from "./format.js";
import { Bird, Glyph, Icon } from "./icons.jsx";
import { EngineCards, Tiles } from "./overview.jsx";
import {
  Bones,
  Choice,
  CopyButton,
  Empty,
  Legend,
  Live,
  Notice,
  Search,
  Segments,
  useNow,
  useSlow,
} from "./parts.jsx";
import { go, useTitle, withQuery } from "./route.js";
import { FILTERS, entriesOf, foldEntries, grouped, isNow, matches } from "./run_list.js";
import { RunTable } from "./run_table.jsx";

const FILTER_NAMES = {
  all: "All",
  running: "Running",
  finished: "Finished",
  failed: "Failed",
  cancelled: "Cancelled",
};
const KINDS = { program: "Programs", agent: "Agents", API: "API requests" };

export function Runs({ query, unfolded }) {
  useTitle("Runs");
  const feed = useFeed("overview");
  const service = feed.rows.get("service");
  const runs = useMemo(() => rowsOf(feed.rows, "session"), [feed.rows]);
  const engines = rowsOf(feed.rows, "engine");
  const isSlow = useSlow(!service);
  return (
    <div class="screen">
      <div class="head">
        <h1>Runs</h1>
        <Live feed={feed} />
        <span class="end">
          <a class="btn main" href="#/playground">
            <Icon name="play" />
            New in playground
          </a>
        </span>
      </div>
      <Notice feed={feed} />
      {!service && isSlow && !feed.error && <Bones />}
      {service?.closing && (
        <p class="notice">
          <Glyph state="queued" />
          <span>The server is stopping. It accepts no new calls.</span>
        </p>
      )}
      {service && <Tiles rows={feed.rows} engines={engines} service={service} />}
      {service && <EngineCards engines={engines} />}
      {service &&
        (runs.length ? (
          <List {...{ runs, query, service, unfolded }} />
        ) : (
          <Nothing engines={engines} />
        ))}
    </div>
  );
}

/** The filters in the address. */
function filtersOf(query) {
  const filter = Object.keys(FILTERS).find((name) => query.has(name)) ?? "all";
  const value = (name) => query.get(name) ?? "";
  return {
    filter,
    q: value("q"),
    kind: value("kind"),
    tenant: value("tenant"),
    sort: value("sort"),
  };
}

function List({ runs, query, service, unfolded }) {
  const filters = filtersOf(query);
  const { filter, q, kind, tenant, sort } = filters;
  const set = (changed) => {
    const { filter: name, ...rest } = { ...filters, ...changed };
    go(withQuery("/", { ...(name !== "all" && { [name]: true }), ...rest }), true);
  };
  const entries = useMemo(() => entriesOf(runs), [runs]);
  const now = useNow(entries.some(isNow));
  const found = entries.filter(
    (entry) =>
      (!kind || entry.kind === kind) &&
      (!tenant || entry.run.tenant === tenant) &&
      matches(entry, q),
  );
  const entriesShown = found.filter(FILTERS[filter]);
  const shown = foldEntries(entriesShown);
  const numbers = Object.keys(FILTERS).map((id) => [id, found.filter(FILTERS[id]).length]);
  const kinds = [...new Set(entries.map((entry) => entry.kind))];
  const tenants = [...new Set(runs.map((run) => run.tenant))].sort();
  return (
    <>
      <div class="bar">
        <Segments
          label="Which runs"
          options={numbers
            .filter(([id, number]) => number || id !== "cancelled" || id === filter)
            .map(([id, number]) => ({ id, name: FILTER_NAMES[id], number: count(number) }))}
          chosen={filter}
          onChoose={(name) => set({ filter: name })}
        />
        <Search
          label="Search runs"
          placeholder="Name, function, words of a prompt or error"
          value={q}
          onInput={(text) => set({ q: text })}
        />
        {kinds.length > 1 && (
          <Choice
            label="Kind"
            all="All kinds"
            options={kinds.map((name) => [name, KINDS[name] ?? name])}
            value={kind}
            onChoose={(name) => set({ kind: name })}
          />
        )}
        {tenants.length > 1 && (
          <Choice
            label="Tenant"
            all="All tenants"
            options={tenants.map((name) => [name, name])}
            value={tenant}
            onChoose={(name) => set({ tenant: name })}
          />
        )}
      </div>
      {shown.length ? (
        <RunTable
          groups={grouped(shown, sort, now)}
          sort={sort}
          onSort={(name) => set({ sort: name })}
          now={now}
          hasTenants={tenants.length > 1}
          unfolded={unfolded}
        />
      ) : (
        <div class="card table">
          <Empty title="No run matches">
            <p>
              The search looks in names, functions, tenants, prompts and errors of the runs that are
              kept.
            </p>
            <button class="btn" type="button" onClick={() => go("/", true)}>
              Clear the search
            </button>
          </Empty>
        </div>
      )}
      <Note rows={shown.length} number={entriesShown.length} service={service} />
    </>
  );
}

/** What the rows stand for, and how long they stay. */
function Note({ rows, number, service: { max_runs, max_age_s } }) {
  return (
    <div class="faint note">
      {rows > 0 && (
        <Legend name="legend only-wide" words={BARS}>
          Timeline: one bar for each call
        </Legend>
      )}
      <p>
        {plural(rows, "row")} with {plural(number, "run")}: API requests of one client share a row.{" "}
        {max_runs > 0
          ? `The last ${count(max_runs)} finished runs are kept, each for ${seconds(max_age_s)}. Older runs disappear from this list, but `
          : "Finished runs are not kept, but "}
        <a href="#/tenants">Tenants</a> still counts what engines did for them.
      </p>
    </div>
  );
}

const BARS = { "k-bar": "finished", "k-use": "running", "k-soft": "queued", "k-failed": "failed" };

/** What to do first. */
function Nothing({ engines }) {
  const steps = [
    ["Ask a question", 'parrot chat "Name three birds."'],
    ["Run a program with a graph", "parrot run examples/map_reduce_summary.py"],
    ["Use your OpenAI client", `export OPENAI_BASE_URL=${location.origin}/v1`],
  ];
  const [engine] = engines;
  return (
    <div class="empty">
      <Bird />
      <h2>There is no run yet</h2>
      <p>
        {engine ? (
          <>
            {engine.engine_name} is ready with <code>{engine.model}</code>.{" "}
          </>
        ) : (
          "No engine has registered yet. "
        )}
        A run appears here when it starts, and stays when it has ended.
      </p>
      <ol class="card try">
        {steps.map(([what, command], i) => (
          <li key={what}>
            <span class="no">{i + 1}</span>
            <span>{what}</span>
            <code>{command}</code>
            <CopyButton text={command} what="the command">
              Copy
            </CopyButton>
          </li>
        ))}
      </ol>
      <p class="acts">
        <a class="btn main" href="#/playground">
          Write a call here
        </a>
      </p>
    </div>
  );
}
