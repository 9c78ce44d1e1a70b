// A session's graph from its rows: calls joined by variables, equal ones folded, laid out in layers.

const FOLD_ABOVE = 4; // equal calls of one stage are one node from here on
const NODE = { width: 168, height: 44, gapX: 56, gapY: 14 };
const SWEEPS = 4;

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

const parentsOf = (graph, id) => [
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
    for (const parent of list) if (nodeOf.get(parent) !== node) node?.parents.add(nodeOf.get(parent));
  }
  return nodes;
}

/** A number for each call: equal for calls of one function with equal neighbours before them. */
function shapes(graph, order, neighbours) {
  const numbers = new Map();
  const known = new Map();
  for (const id of order) {
    const around = [...new Set(neighbours.get(id).map((other) => numbers.get(other)))].sort((a, b) => a - b);
    const text = JSON.stringify([graph.calls.get(id).func_name, around]);
    if (!known.has(text)) known.set(text, known.size);
    numbers.set(id, known.get(text));
  }
  return numbers;
}

/** Layers from left to right by the longest path; in each, nodes near their parents. */
function place(nodes) {
  const depth = new Map();
  const depthOf = (first) => {
    const stack = [first];
    while (stack.length) {
      const node = stack[stack.length - 1];
      const open = [...node.parents].filter((parent) => !depth.has(parent));
      if (open.length) {
        stack.push(...open);
      } else {
        depth.set(node, 1 + Math.max(-1, ...[...node.parents].map((parent) => depth.get(parent))));
        stack.pop();
      }
    }
    return depth.get(first);
  };
  const layers = [];
  for (const node of nodes) (layers[depthOf(node)] ??= []).push(node);
  const childrenOf = new Map(nodes.map((node) => [node, []]));
  for (const node of nodes) for (const parent of node.parents) childrenOf.get(parent).push(node);
  const at = new Map();
  const number = (layer) => layer.forEach((node, i) => at.set(node, i - layer.length / 2));
  layers.forEach(number);
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const isForward = sweep % 2 === 0;
    for (const layer of isForward ? layers : [...layers].reverse()) {
      const mean = (node) => {
        const near = isForward ? [...node.parents] : childrenOf.get(node);
        return near.length ? near.reduce((sum, other) => sum + at.get(other), 0) / near.length : at.get(node);
      };
      const means = new Map(layer.map((node) => [node, mean(node)]));
      layer.sort((a, b) => means.get(a) - means.get(b));
      number(layer);
    }
  }
  const tallest = Math.max(1, ...layers.map((layer) => layer.length));
  const step = NODE.height + NODE.gapY;
  for (const [x, layer] of layers.entries()) {
    const top = ((tallest - layer.length) * step) / 2;
    layer.forEach((node, y) => {
      node.x = x * (NODE.width + NODE.gapX);
      node.y = top + y * step;
    });
  }
  const width = Math.max(1, layers.length) * (NODE.width + NODE.gapX) - NODE.gapX;
  return { nodes, width, height: tallest * step - NODE.gapY, size: NODE };
}

/** The calls of the realised critical path, from the last to finish back through what it waited for: each with the one before it. */
export function criticalPath(graph) {
  const finished = [...graph.calls].filter(([, call]) => call.finished_s != null);
  const path = new Map();
  let [id] = finished.reduce((a, b) => (b[1].finished_s > a[1].finished_s ? b : a), [undefined, { finished_s: -1 }]);
  while (id !== undefined && !path.has(id)) {
    const parent = lastParent(graph, id);
    path.set(id, parent);
    id = parent;
  }
  return path;
}

/** The parent whose end came last. */
export function lastParent(graph, id) {
  const ended = parentsOf(graph, id).filter((parent) => graph.calls.get(parent).finished_s != null);
  const end = (parent) => graph.calls.get(parent).finished_s;
  return ended.length ? ended.reduce((a, b) => (end(b) > end(a) ? b : a)) : undefined;
}

/** One sentence: what a call has waited for, and what it did. */
export function why(graph, id) {
  const call = graph.calls.get(id);
  const since = (from, to) => (from == null || to == null ? 0 : Math.max(0, to - from));
  if (call.state === "failed" || call.state === "cancelled") return whyNot(graph, id, since);
  if (call.activated_s == null) {
    return graph.hasEnded ? "Did not run: no reader needed its output." : "No reader needs its output yet.";
  }
  const parts = [];
  const parent = lastParent(graph, id);
  if (call.ready_s == null) {
    const open = parentsOf(graph, id).filter((p) => graph.calls.get(p).finished_s == null);
    const names = open.map((p) => graph.calls.get(p).func_name).slice(0, 3).join(", ");
    return names ? `Waits for ${names}${open.length > 3 ? " and others" : ""}.` : "Waits for an input.";
  }
  const waited = since(call.activated_s, call.ready_s);
  if (waited > 0.001 && parent !== undefined) {
    parts.push(`waited ${time(waited)} for ${graph.calls.get(parent).func_name}, its last input`);
  } else if (waited > 0.001) {
    parts.push(`waited ${time(waited)} for an input that the program set`);
  }
  if (call.started_s == null) return sentence([...parts, "is queued for an engine"]);
  const queued = since(call.ready_s, call.started_s);
  if (queued > 0.001) parts.push(`queued ${time(queued)}`);
  if (call.reused) parts.push("took the result of an identical call");
  else if (call.kind === "native") parts.push("ran in the sandbox");
  else {
    const prompt = call.cached_tokens + call.computed_tokens;
    const again = call.recomputed_tokens ? `, of which ${call.recomputed_tokens} once more` : "";
    if (prompt) parts.push(`computed ${call.computed_tokens} of ${prompt} prompt tokens${again}`);
    if (call.output_tokens) parts.push(`generated ${call.output_tokens} tokens`);
    if (call.attempts > 1) parts.push(`needed ${call.attempts} attempts`);
  }
  const where = call.engine ? ` on ${call.engine}` : "";
  const took = call.finished_s == null ? "" : ` in ${time(since(call.started_s, call.finished_s))}`;
  return sentence(parts, `${took}${where}`);
}

/** One sentence on a call that failed or was stopped. */
function whyNot(graph, id, since) {
  const call = graph.calls.get(id);
  const verb = call.state === "failed" ? "failed" : "was stopped";
  if (call.ready_s == null) {
    const cause = parentsOf(graph, id).find((parent) => graph.calls.get(parent).state === call.state);
    if (cause !== undefined) return `Did not run, because ${graph.calls.get(cause).func_name} ${verb}.`;
    return call.state === "failed" ? "Did not run, because an input failed." : "Was stopped before it ran.";
  }
  if (call.started_s == null) {
    return sentence([`${verb} after ${time(since(call.ready_s, call.finished_s))} in the queue`]);
  }
  const where = call.engine ? ` on ${call.engine}` : "";
  const attempts = call.attempts > 1 ? `, in attempt ${call.attempts}` : "";
  return sentence([`${verb} ${time(since(call.started_s, call.finished_s))} after its start${where}${attempts}`]);
}

const time = (s) => (s < 0.0995 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(1)} s`);

function sentence(parts, end = "") {
  const text = parts.length > 1 ? `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}` : parts[0] ?? "ran";
  return `${text[0].toUpperCase()}${text.slice(1)}${end}.`;
}
