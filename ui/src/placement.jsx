// Where calls went and why, and what the engines remember: decisions and the tree of prefixes.
import { useFeed } from "./api.js";
import { Age, Notice, count, seconds } from "./format.jsx";

export function Placement() {
  const feed = useFeed("placement");
  const rows = (kind) =>
    [...feed.rows].filter(([key]) => key.startsWith(`${kind}:`)).map(([key, row]) => ({ ...row, key }));
  const contexts = rows("context").map((row) => ({ ...row, id: Number(row.key.slice(8)) }));
  const decisions = rows("decision").sort((a, b) => b.at - a.at);
  return (
    <>
      <Notice feed={feed} />
      <section>
        <h2>The last decisions</h2>
        <Decisions decisions={decisions} />
      </section>
      <section>
        <h2>Prefixes on engines</h2>
        <Prefixes contexts={contexts} />
      </section>
    </>
  );
}

function Decisions({ decisions }) {
  if (!decisions.length) return <p class="hint">No call was placed yet.</p>;
  const hadChoice = decisions.some((d) => d.compared.length); // With one engine there is none.
  return (
    <div class="scroll" tabindex="0" role="region" aria-label="Decisions">
      <table>
        <thead>
          <tr>
            <th>Call</th>
            <th>Engine</th>
            <th class="number">Queued</th>
            <th class="number">Prompt</th>
            <th class="number" title="Prompt tokens that the engine does not have">
              To compute
            </th>
            {hadChoice && <th>Compared, by predicted seconds</th>}
            <th class="number">Age</th>
          </tr>
        </thead>
        <tbody>
          {decisions.map((d) => (
            <tr key={d.key}>
              <td>
                <a href={`#/run/${d.session}`}>{d.func}</a>
              </td>
              <td>{d.engine}</td>
              <td class="number">{seconds(d.waited_s)}</td>
              <td class="number">{count(d.prompt_tokens)}</td>
              <td class="number">{count(d.to_compute)}</td>
              {hadChoice && <td>{compared(d)}</td>}
              <td class="number">
                <Age since={d.at} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function compared({ compared: others, engine }) {
  if (!others.length) return <small>no alternative</small>;
  const ordered = [...others].sort((a, b) => (a.seconds ?? Infinity) - (b.seconds ?? Infinity));
  return ordered.map((other, i) => {
    const text = `${other.engine} ${other.seconds === null ? "full" : seconds(other.seconds)}`;
    return (
      <span key={other.engine}>
        {i > 0 && ", "}
        {other.engine === engine ? <b>{text}</b> : text}
      </span>
    );
  });
}

/** A tree for each engine: a context stands below the one that it was forked from. */
function Prefixes({ contexts }) {
  if (!contexts.length) return <p class="hint">No engine holds a prefix.</p>;
  const children = Map.groupBy(contexts, (context) => context.parent);
  const engines = Map.groupBy(children.get(null) ?? [], (context) => context.engine);
  return [...engines].map(([engine, roots]) => (
    <section key={engine}>
      <h3>{engine}</h3>
      <Branch contexts={roots} children={children} />
    </section>
  ));
}

function Branch({ contexts, children }) {
  return (
    <ul class="tree">
      {contexts.map((context) => (
        <li key={context.id}>
          {count(context.own_tokens)} tokens
          {context.forks > 0 && <small> forked {context.forks} times</small>}
          {context.in_use && <span class="state running">in use</span>}
          {context.is_shared && <span class="state">kept for its tenant</span>}
          {children.has(context.id) && <Branch contexts={children.get(context.id)} children={children} />}
        </li>
      ))}
    </ul>
  );
}
