// Places for the nodes of a graph: layers from left to right. Edges that skip layers have lanes.

export const NODE = { width: 172, height: 54, gapX: 42, gapY: 22 };
const LANE = 12; // The height of a lane.
const MAX_LANES = 3000; // With more, long edges run behind the nodes.
const SWEEPS = 6;

/**
 * @param {{id: string, members: string[], parents: Set<object>}[]} nodes each gets `x` and `y`
 * @returns {{nodes: object[], edges: object[], width: number, height: number}} an edge has `from`,
 *   `to` and `lanes`
 */
export function place(nodes) {
  const depth = depths(nodes);
  const layers = [];
  const items = new Map();
  for (const node of nodes) {
    const item = { node, height: NODE.height, before: [], after: [], layer: depth.get(node) };
    items.set(node, item);
    (layers[item.layer] ??= []).push(item);
  }
  const hasLanes = countLanes(nodes, depth) <= MAX_LANES;
  const edges = [];
  const lanesOf = new Map(); // of each node, by layer: all edges that leave it share them
  for (const to of nodes) {
    for (const from of to.parents) {
      const lanes = hasLanes ? lanesBetween(items.get(from), items.get(to), lanesOf, layers) : [];
      if (!hasLanes) join(items.get(from), items.get(to));
      edges.push({ from, to, lanes });
    }
  }
  order(layers);
  const height = setHeights(layers);
  for (const [number, layer] of layers.entries()) {
    for (const item of layer) {
      const box = item.node ?? item;
      box.x = number * (NODE.width + NODE.gapX);
      box.y = item.top;
    }
  }
  return {
    nodes,
    edges,
    width: Math.max(1, layers.length) * (NODE.width + NODE.gapX) - NODE.gapX,
    height,
  };
}

/** The longest path to each node. */
function depths(nodes) {
  const depth = new Map();
  for (const first of nodes) {
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
  }
  return depth;
}

function countLanes(nodes, depth) {
  const longest = new Map();
  for (const node of nodes) {
    for (const parent of node.parents) {
      longest.set(
        parent,
        Math.max(longest.get(parent) ?? 0, depth.get(node) - depth.get(parent) - 1),
      );
    }
  }
  return [...longest.values()].reduce((sum, length) => sum + length, 0);
}

function join(before, after) {
  before.after.push(after);
  after.before.push(before);
}

/** The invisible items of an edge in the layers that it skips. */
function lanesBetween(from, to, lanesOf, layers) {
  if (!lanesOf.has(from)) lanesOf.set(from, []);
  const known = lanesOf.get(from);
  let last = from;
  const lanes = [];
  for (let layer = from.layer + 1; layer < to.layer; layer++) {
    let lane = known[layer];
    if (lane === undefined) {
      lane = known[layer] = { height: LANE, before: [], after: [], layer };
      layers[layer].push(lane);
      join(last, lane);
    }
    lanes.push(lane);
    last = lane;
  }
  join(last, to);
  return lanes;
}

/** Order each layer so that items are near their neighbours. */
function order(layers) {
  const number = (layer) => layer.forEach((item, i) => (item.at = i - layer.length / 2));
  layers.forEach(number);
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const side = sweep % 2 === 0 ? "before" : "after";
    for (const layer of sweep % 2 === 0 ? layers : [...layers].reverse()) {
      for (const item of layer) {
        const near = item[side];
        item.mean = near.length
          ? near.reduce((sum, other) => sum + other.at, 0) / near.length
          : item.at;
      }
      layer.sort((a, b) => a.mean - b.mean);
      number(layer);
    }
  }
}

/** Set `top` of all items: near their neighbours, without overlaps. Returns the height. */
function setHeights(layers) {
  for (const layer of layers) {
    let top = 0;
    for (const item of layer) {
      item.middle = top + item.height / 2;
      top += item.height + NODE.gapY;
    }
    for (const item of layer) item.middle -= (top - NODE.gapY) / 2;
  }
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const isForward = sweep % 2 === 0;
    for (const layer of isForward ? layers : [...layers].reverse())
      spread(layer, isForward ? "before" : "after");
  }
  const all = layers.flat();
  const first = Math.min(...all.map((item) => item.middle - item.height / 2), Infinity);
  for (const item of all) item.top = item.middle - item.height / 2 - first;
  return Math.max(1, ...all.map((item) => item.top + item.height));
}

/** Move the items of a layer towards their neighbours on one side, and keep their order. */
function spread(layer, side) {
  const wanted = layer.map((item) => {
    const near = item[side];
    return near.length
      ? near.reduce((sum, other) => sum + other.middle, 0) / near.length
      : item.middle;
  });
  let overshoot = 0;
  let least = -Infinity;
  for (const [i, item] of layer.entries()) {
    item.middle = Math.max(wanted[i], least + item.height / 2);
    overshoot += item.middle - wanted[i];
    least = item.middle + item.height / 2 + NODE.gapY;
  }
  for (const item of layer) item.middle -= overshoot / layer.length;
}
