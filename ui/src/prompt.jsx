// The prompt of a call: as the model saw it, with its cached part marked, or as its template.
import { useState } from "preact/hooks";
import { promptPath } from "./again.js";
import { get } from "./api.js";
import { count } from "./format.js";
import { CopyButton, Segments, useRead } from "./parts.jsx";

const FORMS = [
  { id: "seen", name: "As the model saw it" },
  { id: "template", name: "Template" },
];

export function Prompt({ call, pieces, texts, seen, output, run }) {
  const [chosen, setForm] = useState("seen");
  const wasSent = call.started_s != null;
  const form = wasSent ? chosen : "template";
  const filled = pieces
    .map((piece) => (piece.text === undefined ? (texts.get(piece.var)?.text ?? "") : piece.text))
    .join("");
  const copied =
    form === "template"
      ? pieces.map((piece) => piece.text ?? `{{${nameOf(piece, run)}}}`).join("")
      : seen
        ? seen.prompt.map((piece) => piece.text ?? "").join("")
        : filled;
  return (
    <section>
      <div class="row">
        <h2>Prompt</h2>
        {wasSent && (
          <Segments label="Form of the prompt" options={FORMS} chosen={form} onChoose={setForm} />
        )}
        <span class="end">
          <CopyButton text={copied} what="the prompt" />
        </span>
      </div>
      <div class="prompt" role="region" tabindex="0" aria-label="Prompt">
        {form === "template" ? (
          <Template pieces={pieces} output={output} run={run} />
        ) : seen ? (
          <Seen seen={seen} call={call} output={output} />
        ) : (
          <Filled pieces={pieces} texts={texts} call={call} output={output} run={run} />
        )}
      </div>
    </section>
  );
}

const nameOf = (piece, { rows }) =>
  piece.name ?? rows.get(`var:${piece.var}`)?.name ?? "earlier output";

/** The prompt with roles and the cached part; null until the call has one. */
export function useSeen({ id, seesValues }, call) {
  const path = call && seesValues && call.ready_s != null ? promptPath(id, call) : null;
  const seen = useRead(() => path && get(path), null, [path, call?.finished_s]);
  return seen?.prompt?.length ? seen : null;
}

/** A part of one role: texts, and variables by name. */
const Turn = ({ role, isFresh, children }) => (
  <div class={isFresh ? "turn fresh" : "turn"}>
    <b>{role}</b>
    <div>{children}</div>
  </div>
);

const Template = ({ pieces, output, run }) => (
  <>
    <Turn role="prompt">
      {pieces.map((piece, i) =>
        piece.text === undefined ? (
          <button key={i} class="ph link" type="button" onClick={() => run.open(piece.var)}>
            {`{{${nameOf(piece, run)}}}`}
          </button>
        ) : (
          <span key={i}>{piece.text}</span>
        ),
      )}
    </Turn>
    <div class="turn out">
      <b>output</b>
      <div>
        <span class="ph out">{`{{${output.name}}}`}</span>
      </div>
    </div>
  </>
);

/** Pieces of a prompt with their values; a piece of a variable has a name. */
const Filling = ({ pieces, nothing }) =>
  pieces.map(({ name, text }, i) =>
    name ? (
      <span key={i} class="fill" data-name={name}>
        {text ?? nothing}
      </span>
    ) : (
      <span key={i}>{text}</span>
    ),
  );

/** Without the server's answer: the template with the inputs' texts, and how much was cached. */
function Filled({ pieces, texts, call, output, run }) {
  const prompt = call.cached_tokens + call.computed_tokens;
  const filled = pieces.map((piece) =>
    piece.text === undefined
      ? { name: nameOf(piece, run), text: texts.get(piece.var)?.text }
      : piece,
  );
  return (
    <>
      <Turn role="prompt">
        <Filling pieces={filled} nothing="…" />
      </Turn>
      {prompt > 0 && (
        <p class="cutline">
          {count(call.cached_tokens)} of {count(prompt)} tokens were in the KV cache,{" "}
          {count(call.computed_tokens)} were computed.
        </p>
      )}
      <Answer output={output} />
    </>
  );
}

const Answer = ({ output }) => (
  <div class="turn fresh out">
    <b>output</b>
    <div>{output.text || <span class="dim">nothing yet</span>}</div>
  </div>
);

/** Pieces of one role that follow each other, cut where the cached part ends. */
function turnsOf(pieces) {
  const turns = [];
  for (const piece of pieces) {
    const last = turns.at(-1);
    const isCached = Boolean(piece.cached);
    const role = ROLES[piece.role] ?? piece.role;
    if (last && last.role === role && last.isCached === isCached) last.pieces.push(piece);
    else turns.push({ role, isCached, isOn: last?.role === role, pieces: [piece] });
  }
  return turns;
}

const ROLES = { template: "prompt", input: "prompt" };

function Seen({ seen, output }) {
  const turns = turnsOf(seen.prompt);
  const cut = turns.findIndex((turn) => !turn.isCached);
  const isKnown = seen.cached_tokens != null;
  return (
    <>
      {turns.map((turn, i) => (
        <Fragment key={i}>
          {isKnown && i === cut && <Cut seen={seen} />}
          <Turn
            role={turn.isOn ? `${turn.role}, continued` : turn.role}
            isFresh={isKnown && !turn.isCached}
          >
            <Filling pieces={turn.pieces} nothing="no value yet" />
          </Turn>
        </Fragment>
      ))}
      {isKnown && cut < 0 && <Cut seen={seen} />}
      {seen.left_by && (
        <p class="cutline">The prompt differs from the one before it: {seen.left_by}</p>
      )}
      <Answer output={output} />
    </>
  );
}

function Cut({ seen: { cached_tokens, prompt_tokens, is_exact } }) {
  return (
    <p class="cutline">
      <span>
        ↑ {count(cached_tokens)} tokens from the KV cache{!is_exact && " (the cut is estimated)"}
      </span>
      <span>↓ {count(prompt_tokens - cached_tokens)} computed</span>
    </p>
  );
}
