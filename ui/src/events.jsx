// What happened to engines, calls and runs, the last first.
import { useEffect, useState } from "preact/hooks";
import { post, readOnce, rowsOf, useFeed } from "./api.js";
import { clock, count, day, fullDate } from "./format.js";
import { Bones, Empty, Live, Notice, Search, Segments, say, useRead, useSlow } from "./parts.jsx";
import { go, useTitle, withQuery } from "./route.js";
import { setSeen, severityOf } from "./severity.js";

const SEVERITIES = {
  all: "All",
  serious: "Serious",
  warning: "Warnings",
  information: "Information",
};
const GLYPHS = {
  serious: ["failed", "failed"],
  warning: ["warn", "queued"],
  information: ["info", "stopped"],
};
const KINDS = { "session expired": "run expired" };

export function Events({ isOperator, query }) {
  useTitle("Events");
  const feed = useFeed("events");
  const isSlow = useSlow(!feed.isLive && !feed.rows.size);
  useEffect(() => setSeen(feed.rows), [feed.rows]);
  const events = rowsOf(feed.rows, "event").sort((a, b) => b.at - a.at || b.key - a.key);
  const filter = Object.keys(SEVERITIES).find((name) => query.has(name)) ?? "all";
  const q = query.get("q") ?? "";
  const set = (name, text) =>
    go(withQuery("/events", { ...(name !== "all" && { [name]: true }), q: text }), true);
  const found = events.filter((event) =>
    `${kindOf(event)} ${event.engine} ${event.session} ${event.text}`
      .toLowerCase()
      .includes(q.toLowerCase()),
  );
  const isOf = (name) => (event) => name === "all" || severityOf(event) === name;
  const shown = found.filter(isOf(filter));
  return (
    <div class="screen">
      <div class="head">
        <h1>Events</h1>
        <Live feed={feed} />
        <span class="dim">The last 256 are kept.</span>
      </div>
      <Notice feed={feed} />
      {isSlow && !feed.error && !feed.lostAt && <Bones />}
      {events.length > 0 && (
        <div class="bar">
          <Segments
            label="Which events"
            options={Object.keys(SEVERITIES).map((id) => ({
              id,
              name: SEVERITIES[id],
              number: count(found.filter(isOf(id)).length),
            }))}
            chosen={filter}
            onChoose={(name) => set(name, q)}
          />
          <Search
            label="Search events"
            placeholder="Engine, run or words"
            value={q}
            onInput={(text) => set(filter, text)}
          />
        </div>
      )}
      {shown.length > 0 && (
        <div class="card table">
          <List events={shown} isOperator={isOperator} />
        </div>
      )}
      {feed.isLive && !shown.length && (
        <Empty title={events.length ? "No event matches" : "Nothing has happened yet"}>
          <p>
            Engines that join, drain or are lost, calls that were tried again, and runs that failed or
            expired appear here.
          </p>
        </Empty>
      )}
    </div>
  );
}

const kindOf = (event) => {
  const kind = KINDS[event.kind] ?? event.kind;
  return kind[0].toUpperCase() + kind.slice(1);
};

/** Neighbours that say the same become one entry, by day. */
function fold(events) {
  const entries = [];
  for (const event of events) {
    const last = entries.at(-1);
    const same =
      last && ["kind", "text", "engine"].every((field) => last[0][field] === event[field]);
    if (same && day(last[0].at) === day(event.at)) last.push(event);
    else entries.push([event]);
  }
  return Map.groupBy(entries, ([event]) => day(event.at));
}

function List({ events, isOperator }) {
  const [open, setOpen] = useState(null);
  const number = events.filter((event) => event.kind.startsWith("engine")).length;
  const engines = useRead(readEngines, new Map(), [number]);
  return [...fold(events)].map(([name, entries]) => (
    <section key={name} aria-label={name}>
      <h2 class="day">{name}</h2>
      <ol class="events">
        {entries.flatMap((entry) => {
          const [event] = entry;
          const isOpen = open === event.key;
          return [
            <Event
              key={event.key}
              event={event}
              number={entry.length}
              isOpen={isOpen}
              toggle={() => setOpen(isOpen ? null : event.key)}
              engine={
                isOperator && event.kind === "engine drains" ? engines.get(event.engine) : undefined
              }
            />,
            ...(isOpen
              ? entry.slice(1).map((other) => <Event key={other.key} event={other} number={1} />)
              : []),
          ];
        })}
      </ol>
    </section>
  ));
}

const readEngines = async () =>
  new Map(rowsOf(await readOnce("overview"), "engine").map((one) => [one.engine_name, one]));

/** A text whose parts in backticks are code. */
const withCode = (text) =>
  text.split(/`([^`]+)`/).map((part, i) => (i % 2 ? <code key={i}>{part}</code> : part));

function Event({ event, number, isOpen, toggle, engine }) {
  const severity = severityOf(event);
  const [icon, colour] = GLYPHS[severity];
  const resume = () =>
    post(`engines/${engine.engine_id}/drain`, { is_wanted: false }).catch((failure) =>
      say(failure.message),
    );
  return (
    <li>
      <time title={fullDate(event.at)} datetime={new Date(event.at * 1000).toISOString()}>
        {clock(event.at)}
      </time>
      <svg class={`glyph g-${colour}`} viewBox="0 0 16 16" role="img" aria-label={severity}>
        <use href={`#i-${icon}`} />
      </svg>
      <span class="kind">
        {kindOf(event)}
        {number > 1 && ` ×${number}`}
      </span>
      <span class="txt">
        {event.engine && <b>{event.engine} </b>}
        {withCode(event.text)}
      </span>
      {number > 1 ? (
        <button class="btn small" type="button" aria-expanded={isOpen} onClick={toggle}>
          {isOpen ? "Fold" : "Show all"}
        </button>
      ) : engine?.is_draining ? (
        <button class="btn small" type="button" onClick={resume}>
          Resume
        </button>
      ) : event.has_view ? (
        <a class="btn small" href={`#/run/${event.session}${event.var && `/${event.var}`}`}>
          Open the {event.var ? "call" : "run"}
        </a>
      ) : (
        <span />
      )}
    </li>
  );
}
