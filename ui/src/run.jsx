// One run: why it took its time, its graph and timeline as it runs, and any call or variable of it.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { useFeed } from "./api.js";
import { Blame, failureOf } from "./blame.jsx";
import { CompareLink } from "./compare.jsx";
import { count, dollars, fullDate, plural, seconds, share } from "./format.js";
import { layOut, readGraph } from "./graph.js";
import { GraphView } from "./graph_view.jsx";
import { Glyph, Pill } from "./icons.jsx";
import { Panel } from "./panel.jsx";
import { Bones, CopyButton, NotFound, Notice, Segments, say, useNow, useSlow } from "./parts.jsx";
import { go, useTitle } from "./route.js";
import { AgainButton, RunActions } from "./run_actions.jsx";
import { BREAKS, kindOf, nameOf, stateOf, titleOf } from "./run_list.js";
import { Calls, Variables } from "./tables.jsx";
import { Timeline } from "./timeline.jsx";
import { sharesOf, wallOf } from "./wall.js";

const PANEL_WIDTH = 1180; // Below this width, the panel lies over the run.
const MANY_CALLS = 1024; // ServeCore shows the last calls of a run.
const WORDS = { done: "finished", stopped: "cancelled", waiting: "waits for its program" };

export function Run({ id, shown, group, visitor }) {
  const feed = useFeed(`sessions/${id}`);
  const session = feed.rows.get("session");
  const isSlow = useSlow(!session);
  useTitle(session ? titleOf(withFunctions(session, feed.rows)) : "Run");
  if (feed.error && !session)
    return (
      <NotFound what="run">
        {feed.error[0].toUpperCase() + feed.error.slice(1)}. Finished runs are kept for a limited
        time.
      </NotFound>
    );
  if (!session) {
    return (
      <div class="screen">
        <h1 class="sr">Run</h1>
        <Notice feed={feed} />
        {isSlow && !feed.lostAt && <Bones />}
      </div>
    );
  }
  return (
    <Loaded
      id={id}
      shown={shown}
      group={group}
      visitor={visitor}
      feed={feed}
      session={withFunctions(session, feed.rows)}
    />
  );
}

/** The run's row, with the names of its first functions if it has none. */
function withFunctions(session, rows) {
  if (session.functions) return session;
  const names = [...rows]
    .filter(([key]) => key.startsWith("call:"))
    .map(([, call]) => call.func_name);
  return { ...session, functions: [...new Set(names)].filter(Boolean).slice(0, 3) };
}

function Loaded({ id, shown, group, visitor, feed, session }) {
  const { rows } = feed;
  const isLive = session.state === "active";
  const graph = useMemo(() => readGraph(rows), [rows]);
  const outline = [...graph.calls].map(([call, row]) => `${call}:${row.inputs.join()}`).join();
  const layout = useMemo(() => layOut(graph), [outline]);
  const isBusy = [...graph.calls.values()].some(
    (call) => call.state === "running" || call.state === "queued",
  );
  const clock = useNow(isLive);
  const now = isLive ? clock - session.created_at : 0;
  const end = isLive ? now : session.ended_at - session.created_at;
  const wall = useMemo(
    () => wallOf(graph, rows, now, kindOf(session) === "API" ? null : end),
    [graph, rows, end],
  );
  const shares = useMemo(() => sharesOf(wall), [wall]);
  const failure = useMemo(() => failureOf(graph, rows), [graph, rows]);
  const tokens = tokensOf(session, graph);
  const { target, open, close } = useTarget({ id, shown, group, graph, layout });
  const [isWide, setWide] = useState(false);
  const isOver = useNarrow();
  const wasOpened = useRef(false);
  const openHere = (wanted) => {
    wasOpened.current = true;
    open(wanted);
  };
  const shownCall = target?.variable && graph.producerOf.get(target.variable);
  const shownNode =
    target?.node ?? (shownCall && layout.nodes.find((node) => node.members.includes(shownCall)));
  const run = {
    id,
    graph,
    rows,
    now,
    wall,
    isLive,
    isOver,
    wasOpened,
    open: openHere,
    seesValues: visitor.sees_values,
    tenant: session.tenant,
    isApi: kindOf(session) === "API",
  };
  useEnd(session);
  const hover = useMemo(() => linkedHover(layout), [layout]);
  const openNode = (node) => openHere(node.members.length > 1 ? { group: node.id } : node.id);
  return (
    <div
      class={target ? "runpage with-panel" : "runpage"}
      style={{ "--panel": isWide ? "720px" : "464px" }}
      {...hover}
    >
      <div class="views">
        <nav class="crumb" aria-label="Path">
          <a href="#/">Runs</a>/<span>{session.tenant}</span>
          {kindOf(session) === "API" && <>/ {nameOf(session)}</>}
        </nav>
        <Head
          session={session}
          graph={graph}
          failure={failure}
          isLive={feed.isLive}
          isBusy={isBusy}
          again={
            visitor.sees_values &&
            graph.calls.size > 1 && <AgainButton run={session} graph={graph} rows={rows} />
          }
        />
        <Notice feed={feed} />
        <Totals session={session} graph={graph} tokens={tokens} took={wall.total || end} />
        <Blame {...{ graph, wall, failure, tokens }} onOpen={openHere} />
        <Cut session={session} graph={graph} />
        {graph.calls.size > 0 ? (
          <GraphView
            graph={graph}
            layout={layout}
            path={wall.path}
            shares={shares}
            shown={shownNode}
            onOpen={openNode}
          />
        ) : (
          <section class="card empty-run">
            <p class="hint">Nothing was called yet.</p>
          </section>
        )}
        <Lower
          run={run}
          layout={layout}
          shares={shares}
          shown={target?.node ? `node ${target.node.id}` : shownCall}
        />
      </div>
      {target && (
        <Panel target={target} run={run} isWide={isWide} setWide={setWide} close={close} />
      )}
    </div>
  );
}

/** How many calls are shown, if there may be more. */
const Cut = ({ session, graph }) =>
  graph.calls.size >= MANY_CALLS && (
    <p class="notice">
      <Glyph state="queued" />
      <span>
        You see the last {count(graph.calls.size)}
        {session.calls > graph.calls.size && ` of ${count(session.calls)}`} calls.
      </span>
    </p>
  );

/** The timeline, the variables or the calls. */
function Lower({ run: { graph, rows, wall, now, open }, layout, shares, shown }) {
  const [tab, setTab] = useState("timeline");
  const [isFolded, setFolded] = useState(true);
  const number = [...rows.keys()].filter((key) => key.startsWith("var:")).length;
  return (
    <section class="card box" aria-label="Timeline, variables and calls">
      <header>
        <Segments
          label="Timeline, variables or calls"
          options={[
            { id: "timeline", name: "Timeline" },
            { id: "variables", name: "Variables", number: count(number) },
            { id: "calls", name: "Calls", number: count(graph.calls.size) },
          ]}
          chosen={tab}
          onChoose={setTab}
        />
        {tab === "timeline" && layout.nodes.length < graph.calls.size && (
          <span class="end">
            <button
              class="btn ghost small"
              type="button"
              aria-pressed={!isFolded}
              onClick={() => setFolded(!isFolded)}
            >
              {isFolded ? "Unfold" : "Fold equal calls"}
            </button>
          </span>
        )}
      </header>
      {tab === "timeline" && (
        <Timeline {...{ graph, layout, wall, now, isFolded, shown }} onOpen={open} />
      )}
      {tab === "variables" && <Variables {...{ rows, graph, layout }} onOpen={open} />}
      {tab === "calls" && <Calls graph={graph} shares={shares} onOpen={open} />}
    </section>
  );
}

/** Say once that the run has ended while it was shown. */
function useEnd(session) {
  const state = useRef(session.state);
  useEffect(() => {
    if (state.current === "active" && session.state !== "active")
      say(`${nameOf(session)} ${session.state}`);
    state.current = session.state;
  }, [session.state]);
}

/** What the panel shows: what the address names, or at first the running or failed call. */
function useTarget({ id, shown, group, graph, layout }) {
  const first = useRef(undefined);
  if (first.current === undefined && graph.calls.size) {
    first.current = innerWidth > PANEL_WIDTH ? firstCall(graph) : null;
  }
  const opened = useRef(null); // the element that opened the panel
  const node = group && layout.nodes.find((one) => one.members.includes(group));
  const variable = shown ?? (node ? undefined : first.current) ?? undefined;
  const target = node ? { node } : variable ? { variable } : null;
  const open = (wanted) => {
    if (!document.activeElement?.closest(".panel")) opened.current = document.activeElement;
    first.current = null;
    go(
      wanted.group
        ? `/run/${id}?group=${encodeURIComponent(wanted.group)}`
        : `/run/${id}/${encodeURIComponent(wanted)}`,
    );
  };
  const close = () => {
    const back =
      node || layout.nodes.find((one) => one.members.includes(graph.producerOf.get(variable)));
    first.current = null;
    go(`/run/${id}`, true);
    setTimeout(() => {
      const element =
        opened.current?.isConnected && opened.current !== document.body
          ? opened.current
          : document.querySelector(`.node[data-node="${CSS.escape(back?.id ?? "")}"]`);
      element?.focus({ preventScroll: true });
      opened.current = null;
    });
  };
  const latest = useRef(null);
  latest.current = target && close;
  useEffect(() => {
    const press = (event) => {
      if (event.key === "Escape" && latest.current && !document.querySelector("dialog[open]"))
        latest.current();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
  return { target, open, close };
}

function firstCall(graph) {
  const calls = [...graph.calls];
  const found =
    calls.find(([, call]) => call.state === "running") ??
    calls.find(([, call]) => call.state === "failed" && call.ready_s != null) ??
    (calls.length === 1 ? calls[0] : undefined);
  return found?.[0] ?? null;
}

/** Whether the panel lies over the run. */
function useNarrow() {
  const [isNarrow, setNarrow] = useState(innerWidth <= PANEL_WIDTH);
  useEffect(() => {
    const measure = () => setNarrow(innerWidth <= PANEL_WIDTH);
    addEventListener("resize", measure);
    return () => removeEventListener("resize", measure);
  }, []);
  return isNarrow;
}

/**
 * Handlers that mark a call in the bar, the graph, the timeline and the tables while the pointer or the
 * focus is on it in one of them.
 */
function linkedHover(layout) {
  const nodeOf = new Map(layout.nodes.flatMap((node) => node.members.map((id) => [id, node.id])));
  const clear = (page) => {
    for (const hot of page.querySelectorAll(".hot")) hot.classList.remove("hot");
  };
  const mark = (event) => {
    const page = event.currentTarget;
    const element = event.target.closest?.("[data-call], [data-node]");
    clear(page);
    if (!element) return;
    const { call, node = nodeOf.get(call) } = element.dataset;
    const folded = node === undefined ? "" : `[data-node="${CSS.escape(node)}"]`;
    const same = call
      ? [`[data-call="${CSS.escape(call)}"]`, folded && `${folded}:not([data-call])`]
          .filter(Boolean)
          .join()
      : folded;
    for (const other of page.querySelectorAll(same)) other.classList.add("hot");
  };
  const unmark = (event) =>
    event.currentTarget.contains(event.relatedTarget) || clear(event.currentTarget);
  return { onMouseOver: mark, onFocusIn: mark, onMouseLeave: unmark, onFocusOut: unmark };
}

function Head({ session, graph, failure, isLive, isBusy, again }) {
  const state =
    session.state === "active"
      ? isBusy
        ? "running"
        : session.kind === "API" || session.kind === "conversation"
          ? stateOf({ ...session, running: 0 })
          : "waiting"
      : stateOf(session);
  const calls = [...graph.calls.values()];
  const notRun = failure ? failure.others.length : 0;
  const running = calls.filter(
    (call) => call.state === "running" || call.state === "queued",
  ).length;
  return (
    <div class="head">
      <h1>{titleOf(session)}</h1>
      <Pill state={state} word={WORDS[state]} />
      {failure && state !== "failed" && (
        <span class="st failed">
          <Glyph state="failed" />
          {Math.max(1, failure.number)} failed{notRun > 0 && `, ${notRun} not run`}
        </span>
      )}
      {session.prefix_breaks > 0 && (
        <span class="st queued" title={BREAKS}>
          {plural(session.prefix_breaks, "prefix break")}
        </span>
      )}
      <span class="end">
        {again}
          {kindOf(session) !== "API" && <CompareLink session={session} />}
        <CopyButton text={() => location.href} what="the address">
          Link
        </CopyButton>
        <Downloads session={session} />
        <RunActions run={session} running={running} disabled={!isLive} after={() => go("/")} />
      </span>
    </div>
  );
}

/** `[label, file of the API, ending of the saved file, what it is]`. */
const FILES = [
  ["JSON", "run.json", "json", "The run with its calls, variables and texts"],
  ["Trace", "trace.json", "perfetto.json", "Timeline for ui.perfetto.dev"],
];

const Downloads = ({ session }) =>
  FILES.map(([label, file, ending, title]) => (
    <a
      key={file}
      class="btn small"
      href={`api/sessions/${session.id}/${file}`}
      download={`${nameOf(session).replaceAll(/[^\w.-]+/g, "_")}.${ending}`}
      title={title}
    >
      {label}
    </a>
  ));

/** The tokens of a run; until its row has them, those of the calls that are shown. */
function tokensOf(session, graph) {
  const calls = [...graph.calls.values()];
  const sum = (field) => calls.reduce((all, call) => all + (call[field] ?? 0), 0);
  const cached = session.cached_tokens ?? sum("cached_tokens");
  return {
    cached,
    prompt: session.prompt_tokens ?? cached + sum("computed_tokens"),
    output: session.output_tokens ?? sum("output_tokens"),
  };
}

function Totals({ session, graph, tokens: { cached, prompt, output }, took }) {
  const calls = [...graph.calls.values()];
  const done = session.done ?? calls.filter((call) => call.state === "done").length;
  const all = session.calls ?? calls.length;
  const totals = [
    ["Time", seconds(took), ""],
    ["Calls", count(done), done === all ? "" : ` of ${count(all)}`],
    ["Prompt", count(prompt), " tokens"],
    ["Output", count(output), " tokens"],
    ["From cache", share(cached, prompt) || "–", ""],
    ...(session.cost > 0 ? [["Cost", dollars(session.cost), ""]] : []),
  ];
  return (
    <dl class="totals">
      {totals.map(([name, value, unit]) => (
        <div
          key={name}
          title={name === "Time" ? `Began ${fullDate(session.created_at)}` : undefined}
        >
          <dt>{name}</dt>
          <dd>
            {value}
            <small>{unit}</small>
          </dd>
        </div>
      ))}
    </dl>
  );
}
