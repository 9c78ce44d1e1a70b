// A run's graph from its rows: calls joined by variables, and equal calls folded into one node.
import { place } from "./layout.js";

const FOLD_ABOVE = 4; // equal calls of one stage are one node from here on

/**
 * @param {Map<string, object>} rows of a session's feed
 * @returns {{calls: Map<string, object>, producerOf: Map<string, string>, hasEnded: boolean}} calls
 *   by the id of their first output, by each variable the call that makes it, and whether the run
 *   has ended
 */
export function readGraph(rows) {
  const calls = new Map();
  const producerOf = new Map();
  for (const [key, row] of rows) {
    if (!key.startsWith("call:")) continue;
    const id = key.slice(5);
    calls.set(id, row);
    for (const output of row.outputs) producerOf.set(output, id);
  }
  const session = rows.get("session");
  return { calls, producerOf, hasEnded: session !== undefined && session.state !== "active" };
}

/** The calls that make the inputs of a call. */
export const parentsOf = (graph, id) => [
  ...new Set(
    graph.calls
      .get(id)
      .inputs.map((variable) => graph.producerOf.get(variable))
      .filter((parent) => parent !== undefined && parent !== id),
  ),
];

/** Fold, layer, order and place. The result depends on the calls and their inputs alone. */
export function layOut(graph) {
  const parents = new Map([...graph.calls.keys()].map((id) => [id, parentsOf(graph, id)]));
  const children = new Map([...graph.calls.keys()].map((id) => [id, []]));
  for (const [id, list] of parents) for (const parent of list) children.get(parent).push(id);
  const order = inOrder(parents, children);
  const nodes = fold(graph, order, parents, children);
  return place(nodes);
}

/** The ids so that each comes behind its parents. */
function inOrder(parents, children) {
  const missing = new Map([...parents].map(([id, list]) => [id, list.length]));
  const order = [...missing].filter(([, n]) => n === 0).map(([id]) => id);
  for (const id of order) {
    for (const child of children.get(id)) {
      missing.set(child, missing.get(child) - 1);
      if (missing.get(child) === 0) order.push(child);
    }
  }
  return order;
}

/** Calls of one function are equal if what leads to them, and what follows, looks the same. */
function fold(graph, order, parents, children) {
  const up = shapes(graph, order, parents);
  const down = shapes(graph, [...order].reverse(), children);
  const groups = new Map();
  for (const id of order) {
    const shape = `${up.get(id)}/${down.get(id)}`;
    groups.set(shape, [...(groups.get(shape) ?? []), id]);
  }
  const nodeOf = new Map();
  const nodes = [];
  for (const members of groups.values()) {
    const bundles = members.length > FOLD_ABOVE ? [members] : members.map((id) => [id]);
    for (const bundle of bundles) {
      const node = { id: bundle[0], members: bundle, parents: new Set() };
      nodes.push(node);
      for (const id of bundle) nodeOf.set(id, node);
    }
  }
  for (const [id, list] of parents) {
    const node = nodeOf.get(id);
    for (const parent of list)
      if (nodeOf.get(parent) !== node) node?.parents.add(nodeOf.get(parent));
  }
  return nodes;
}

/** A number for each call: equal for calls of one function with equal neighbours before them. */
function shapes(graph, order, neighbours) {
  const numbers = new Map();
  const known = new Map();
  for (const id of order) {
    const around = [...new Set(neighbours.get(id).map((other) => numbers.get(other)))].sort(
      (a, b) => a - b,
    );
    const text = JSON.stringify([graph.calls.get(id).func_name, around]);
    if (!known.has(text)) known.set(text, known.size);
    numbers.set(id, known.get(text));
  }
  return numbers;
}

/**
 * The calls of the critical path, the last one first, each with the one before it: from the call that
 * has run the longest, or else from the last one to finish, back through the last inputs.
 */
export function criticalPath(graph) {
  const path = new Map();
  let id = lastCall(graph);
  while (id !== undefined && !path.has(id)) {
    const before = lastBefore(graph, id);
    path.set(id, before);
    id = before;
  }
  return path;
}

// A call that became ready this long after its last input waited for its program.
const LEAST_S = 0.002;

/** The call whose end let this one begin: its last input, or the last call that ended before. */
function lastBefore(graph, id) {
  const { ready_s } = graph.calls.get(id);
  const parent = lastParent(graph, id);
  let end = parent === undefined ? -Infinity : graph.calls.get(parent).finished_s;
  let last = parent;
  if (ready_s == null || ready_s - end < LEAST_S) return last;
  for (const [other, call] of graph.calls) {
    if (
      call.started_s != null &&
      call.finished_s != null &&
      call.finished_s <= ready_s &&
      call.finished_s > end
    ) {
      end = call.finished_s;
      last = other;
    }
  }
  return last;
}

function lastCall(graph) {
  const open = [...graph.calls].filter(
    ([, call]) => call.state === "running" || call.state === "queued",
  );
  if (open.length) return open.reduce((a, b) => (b[1].ready_s < a[1].ready_s ? b : a))[0];
  const finished = [...graph.calls].filter(
    ([, call]) => call.finished_s != null && call.started_s != null,
  );
  return finished.length
    ? finished.reduce((a, b) => (b[1].finished_s > a[1].finished_s ? b : a))[0]
    : undefined;
}

/** The parent whose end came last. */
export function lastParent(graph, id) {
  const ended = parentsOf(graph, id).filter((parent) => graph.calls.get(parent).finished_s != null);
  const end = (parent) => graph.calls.get(parent).finished_s;
  return ended.length ? ended.reduce((a, b) => (end(b) > end(a) ? b : a)) : undefined;
}
