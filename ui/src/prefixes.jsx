// The prefixes that engines hold in KV, as a tree: a prefix stands below the one that it continues.
import { useState } from "preact/hooks";
import { count, plural } from "./format.js";
import { Glyph, Icon } from "./icons.jsx";
import { Segments, useOpen } from "./parts.jsx";

const OPEN_DEPTH = 2; // Levels that are unfolded at first.
const MAX_ROWS = 200;

export function Prefixes({ contexts, engines }) {
  const [chosen, setChosen] = useState(null);
  const [toggled, toggle] = useOpen();
  const names = engines.map((engine) => engine.engine_name);
  const name =
    chosen ?? names.find((one) => contexts.some((context) => context.engine === one)) ?? names[0];
  const own = contexts.filter((context) => context.engine === name);
  const children = Map.groupBy(own, (context) => context.parent);
  const sizes = new Map();
  for (const context of own) sizeOf(context, children, sizes);
  const rows = [];
  const add = (parent, depth) => {
    const list = [...(children.get(parent) ?? [])].sort(
      (a, b) => sizes.get(b.id) - sizes.get(a.id),
    );
    for (const context of list) {
      const isOpen = depth < OPEN_DEPTH !== toggled.has(context.id);
      rows.push({ context, depth, isOpen, hasMore: children.has(context.id) });
      if (isOpen) add(context.id, depth + 1);
    }
  };
  add(null, 0);
  return (
    <section class="card box">
      <header>
        <h2>Prefixes in KV</h2>
        {names.length > 1 && (
          <Segments
            label="Engine"
            options={names.map((id) => ({ id, name: id }))}
            chosen={name}
            onChoose={setChosen}
          />
        )}
        <span class="end">
          {count(own.reduce((sum, context) => sum + context.own_tokens, 0))} tokens
        </span>
      </header>
      {!rows.length && <p class="hint">The engine holds no prefix.</p>}
      {rows.length > 0 && (
        <ul class="tree">
          <li class="th" aria-hidden="true">
            <span>First words</span>
            <span />
            <span class="n">Tokens</span>
            <span class="n">Read again</span>
          </li>
          {rows.slice(0, MAX_ROWS).map((row) => (
            <Prefix key={row.context.id} {...row} toggle={toggle} />
          ))}
        </ul>
      )}
      {rows.length > MAX_ROWS && (
        <p class="hint">{plural(rows.length - MAX_ROWS, "smaller prefix")} not listed.</p>
      )}
    </section>
  );
}

/** Tokens of a prefix and of all that continue it. */
function sizeOf(context, children, sizes) {
  if (sizes.has(context.id)) return sizes.get(context.id);
  const below = (children.get(context.id) ?? []).reduce(
    (sum, child) => sum + sizeOf(child, children, sizes),
    0,
  );
  sizes.set(context.id, context.own_tokens + below);
  return sizes.get(context.id);
}

function Prefix({ context, depth, isOpen, hasMore, toggle }) {
  const words = context.head === "" ? "generated text" : context.head;
  const owner =
    context.owner === ""
      ? "another tenant's words"
      : context.is_shared
        ? `shared prefix of ${context.owner}`
        : "of a run";
  const length = Math.min(
    100,
    Math.max(1.5, Math.log10(Math.max(1, context.own_tokens)) * 22 - 18),
  );
  return (
    <li>
      <span class={`words d${Math.min(depth, 3)}`}>
        {hasMore ? (
          <button
            type="button"
            aria-expanded={isOpen}
            aria-label="Continuations"
            onClick={() => toggle(context.id)}
          >
            <Icon name={isOpen ? "down" : "right"} />
          </button>
        ) : (
          <span class="gap" />
        )}
        <span class={words ? "cut" : "cut faint"} title={words ?? owner}>
          {words ?? owner}
        </span>
        {context.in_use && (
          <span class="st running">
            <Glyph state="running" />
            <span class="sr">in use</span>
          </span>
        )}
      </span>
      <svg class="len" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">
        <rect class="bg" width="100" height="8" />
        <rect class={context.in_use ? "use" : undefined} width={length} height="8" />
      </svg>
      <span class="n">
        {count(context.own_tokens)}
        <span class="sr"> tokens</span>
      </span>
      <span class="n dim">
        <span class="sr">read again </span>
        {context.forks ? plural(context.forks, "time") : "not yet"}
      </span>
    </li>
  );
}
