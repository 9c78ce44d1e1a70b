// One call, or one variable that the program set, in the panel of a run.
import { draftOfCall } from "./again.js";
import { post, useFeed } from "./api.js";
import { AskButton } from "./ask.jsx";
import { Sentence } from "./blame.jsx";
import { Errors } from "./call_errors.jsx";
import { Attempts, Facts, Phases } from "./call_facts.jsx";
import { Texts } from "./call_texts.jsx";
import { putDraft } from "./draft.js";
import { count, seconds } from "./format.js";
import { Glyph, Icon } from "./icons.jsx";
import { CopyButton, Notice } from "./parts.jsx";
import { apiCurl, asCurl, readProgram } from "./program.js";
import { Prompt, useSeen } from "./prompt.jsx";
import { textOf, useTexts } from "./texts.js";
import { why } from "./why.js";

const ENDED = ["done", "failed", "cancelled"];

/** `producer`: the id of the call that makes the variable, if one does. */
export function Detail({ variable, producer, run }) {
  const { graph, rows, id } = run;
  const feed = useFeed(`sessions/${id}/vars/${variable}`);
  const call = graph.calls.get(producer);
  const row = feed.rows.get("var") ?? rows.get(`var:${variable}`);
  const source = feed.rows.get("call");
  const inputs = (call?.inputs ?? []).map((input) => [input, rows.get(`var:${input}`)]);
  const texts = useTexts(id, inputs);
  const text = textOf(feed.rows);
  const isHidden = !run.seesValues || isWithheld(row, text, feed);
  const seen = useSeen(run, source?.prompt && !isHidden ? call : null);
  if (!row) return feed.error ? <Notice feed={feed} /> : <p class="hint">Loading…</p>;
  const hasPrompt = source?.prompt && !isHidden;
  // A request of an API is written from the prompt as the model saw it.
  const isKnown = hasPrompt && (seen || !run.isApi);
  const draft = isKnown ? draftOfCall({ call, row, source, texts, seen, origin: id }) : null;
  return (
    <>
      <section>
        {feed.error && <Notice feed={feed} />}
        {call ? <Lead producer={producer} call={call} run={run} /> : <Given row={row} run={run} />}
        {call && <Actions {...{ call, draft, source, seen, run }} isFollowed={feed.isLive} />}
      </section>
      {row.errors && <Errors errors={row.errors} producer={producer} run={run} />}
      {isHidden ? (
        <Withheld row={row} tenant={run.tenant} />
      ) : (
        <Texts {...{ variable, call, row, text, texts, source, run }} />
      )}
      {hasPrompt && (
        <Prompt
          call={call}
          pieces={source.prompt}
          texts={texts}
          seen={seen}
          output={{ name: row.name, text }}
          run={run}
        />
      )}
      {source?.source && <Python source={source.source} />}
      {call && <Attempts attempts={source?.attempts} call={call} />}
      {call && <Facts call={call} source={source} row={row} variable={variable} run={run} />}
    </>
  );
}

/** Whether there is a text that the visitor does not get. */
const isWithheld = (row, text, feed) =>
  row?.chars > 0 && !text && feed.rows.size > 0 && !row.is_left_out;

/** Why the call took its time. */
function Lead({ producer, call, run: { graph, rows, now, open } }) {
  return (
    <>
      <p class="why">
        <Sentence parts={why(graph, producer, rows, now)} graph={graph} onOpen={open} />
      </p>
      <Phases call={call} now={now} />
      {call.remark && (
        <p class="notice">
          <Glyph state="queued" />
          <span>{call.remark}</span>
        </p>
      )}
    </>
  );
}

/** When the program set a variable. */
function Given({ row, run: { graph } }) {
  if (row.state === "empty") {
    const words = graph.hasEnded
      ? "Your program never set it."
      : "Your program has not set it yet.";
    return <p class="why">{words}</p>;
  }
  const when = row.set_s == null ? "" : `, ${seconds(row.set_s)} after the run began`;
  return <p class="why">Your program set it{when}.</p>;
}

function Actions({ call, draft, source, seen, isFollowed, run: { id, isApi, isLive } }) {
  const asCommand = () =>
    isApi
      ? apiCurl(call, seen.prompt, source.sampling ?? {}, location.origin)
      : asCurl(readProgram(draft.calls, draft.settings), draft.values, location.origin);
  return (
    <div class="acts">
      {draft && (
        <button class="btn small" type="button" onClick={() => putDraft(draft)}>
          <Icon name="play" />
          Open in the playground
        </button>
      )}
      {draft && (
        <CopyButton text={asCommand} what="the call as curl">
          Copy as curl
        </CopyButton>
      )}
      {isLive && !ENDED.includes(call.state) && (
        <AskButton
          label="Stop…"
          title={`Stop ${call.func_name || call.output}?`}
          question="What it has generated is kept. Calls that need its output will not run."
          confirm="Stop the call"
          keep="Let it run"
          disabled={!isFollowed}
          onConfirm={() => post(`sessions/${id}/cancel/${call.request_id}`)}
        />
      )}
    </div>
  );
}

const Withheld = ({ row, tenant }) => (
  <section>
    <p class="notice">
      <Icon name="lock" />
      <span>
        {count(row.chars)} characters. The texts of this run belong to tenant <b>{tenant}</b>. You
        see times and tokens. With one of its API keys you also see prompts and values.
      </span>
    </p>
  </section>
);

const Python = ({ source }) => (
  <section>
    <div class="row">
      <h2>Python function</h2>
      <span class="end">
        <CopyButton text={source} what="the function" />
      </span>
    </div>
    <div class="val">
      <pre role="region" tabindex="0" aria-label="Source">
        {source}
      </pre>
    </div>
  </section>
);
