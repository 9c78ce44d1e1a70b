// A variable: its value as it grows, the prompt that makes it, and why it failed.
import { useFeed } from "./api.js";
import { count } from "./format.js";
import { State } from "./legacy.jsx";
import { Notice } from "./parts.jsx";

export function Variable({ session, id, rows, show }) {
  const feed = useFeed(`sessions/${session}/vars/${id}`);
  const row = feed.rows.get("var");
  const call = feed.rows.get("call");
  if (!row) return <Notice feed={feed} />;
  const pieces = [...feed.rows].filter(([key]) => key.startsWith("text:"));
  const text = pieces
    .sort(([a], [b]) => a.slice(5) - b.slice(5))
    .map(([, piece]) => piece.text)
    .join("");
  const isLeftOut = row.is_left_out;
  const isHidden = row.chars > 0 && !text;
  const why = row.state === "empty" && call?.comes_whole;
  return (
    <section>
      <Notice feed={feed} />
      <h2>
        {row.name} <State state={row.state} />
      </h2>
      {row.errors?.map((error, i) => (
        <p class="notice" key={i}>
          {i > 0 && "because of "}
          <b>{error.type}</b>: {error.message}
        </p>
      ))}
      {why && <p class="hint">The value comes at the end: {why}.</p>}
      {isLeftOut ? (
        <p class="hint">{count(row.chars)} characters, which were not kept: the run has too much text.</p>
      ) : isHidden ? (
        <p class="hint">{count(row.chars)} characters, which only their tenant may read.</p>
      ) : (
        <pre class="value" role="region" tabindex="0" aria-label={`Value of ${row.name}`}>
          {text}
        </pre>
      )}
      {call?.prompt && (
        <>
          <h3>Prompt</h3>
          <pre class="prompt" role="region" tabindex="0" aria-label="Prompt">
            {call.prompt.map((piece, i) =>
              piece.text === undefined ? (
                <button class="link" key={i} onClick={() => show(piece.var)}>
                  {`{{${piece.name ?? rows.get(`var:${piece.var}`)?.name ?? "earlier output"}}}`}
                </button>
              ) : (
                <span key={i}>{piece.text}</span>
              ),
            )}
          </pre>
        </>
      )}
      {call?.source && (
        <>
          <h3>Native function</h3>
          <pre class="prompt" role="region" tabindex="0" aria-label="Source">
            {call.source}
          </pre>
        </>
      )}
    </section>
  );
}
