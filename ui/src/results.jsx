// The outputs of a run of the playground, as they are generated.
import { useEffect, useState } from "preact/hooks";
import { post, rowsOf, useFeed } from "./api.js";
import { count, seconds, share } from "./format.js";
import { Pill } from "./icons.jsx";
import { CopyButton, say } from "./parts.jsx";
import { looks } from "./states.js";

// Outputs that are followed at once. A browser has six connections to a server.
const MAX_STREAMS = 3;

export const Results = ({ run, outputs }) =>
  run ? <Outputs run={run} /> : <Nothing outputs={outputs} />;

const Nothing = ({ outputs }) => (
  <section class="card box out" aria-label="Results">
    <header>
      <h2>Results</h2>
    </header>
    <pre class="faint">Run the calls to see {outputs.join(" and ")} here.</pre>
  </section>
);

function Outputs({ run }) {
  const { session_id } = run.session;
  const feed = useFeed(`sessions/${session_id}`);
  const [texts, setTexts] = useState({});
  useEffect(() => readOutputs(run, setTexts), []);
  const calls = new Map(rowsOf(feed.rows, "call").map((call) => [call.output, call]));
  const isOver = run.outputs.every((name) => texts[name]?.isDone);
  const stop = () => post(`sessions/${session_id}/end`).catch((failure) => say(failure.message));
  return (
    <>
      <div class="acts results-acts">
        <h2>Results</h2>
        <a class="btn small" href={`#/run/${session_id}`}>
          Open as a run
        </a>
        {!isOver && (
          <button class="btn small danger" type="button" onClick={stop}>
            Stop
          </button>
        )}
      </div>
      {run.outputs.map((name) => (
        <Output key={name} name={name} call={calls.get(name)} {...texts[name]} />
      ))}
    </>
  );
}

/**
 * Read the outputs as they are generated, also while the page shows another view, and then end the run.
 * `show` gets `{text, isDone, error}` by name.
 */
function readOutputs({ session: { session_id, session_auth }, variables, outputs }, show) {
  const left = [...outputs];
  const texts = {};
  let number = outputs.length;
  const next = () => {
    if (left.length) read(left.shift());
  };
  const read = (name) => {
    const source = new EventSource(
      `../v1/semantic_var/${variables[name]}/stream?session_id=${session_id}&session_auth=${encodeURIComponent(session_auth)}`,
    );
    let text = "";
    const set = (fields) => {
      texts[name] = { text, ...fields };
      show({ ...texts });
    };
    const end = (error) => {
      source.close();
      set({ isDone: true, error });
      next();
      if (--number === 0) post(`sessions/${session_id}/end`).catch(() => {}); // It may have expired.
    };
    source.addEventListener("delta", (event) => {
      text += JSON.parse(event.data).text;
      set({});
    });
    source.addEventListener("done", (event) => {
      text = JSON.parse(event.data).content;
      end();
    });
    source.addEventListener("error", (event) =>
      end(event.data ? JSON.parse(event.data).error.message : "The connection broke."),
    );
  };
  for (let i = 0; i < MAX_STREAMS; i++) next();
}

function Output({ name, call, text = "", isDone, error }) {
  const { state, word } = error
    ? { state: "failed", word: "failed" }
    : isDone
      ? { state: "done", word: "finished" }
      : call
        ? looks(call)
        : { state: "waiting", word: "waiting" };
  return (
    <section class="card box out" aria-label={name}>
      <header>
        <h2>{name}</h2>
        <Pill state={state} word={word} />
        <span class="end">{text && <CopyButton text={text} what={name} />}</span>
      </header>
      <pre
        class="value"
        aria-busy={!isDone}
        role="region"
        tabindex="0"
        aria-label={`Value of ${name}`}
      >
        {text}
        {!isDone && text && <span class="caret" />}
      </pre>
      <p class="st failed" role="alert">
        {error}
      </p>
      {call && <Facts call={call} />}
    </section>
  );
}

function Facts({ call }) {
  const prompt = call.cached_tokens + call.computed_tokens;
  const speed =
    call.decode_s > 0 && call.output_tokens > 1
      ? call.output_tokens / call.decode_s
      : null;
  const facts = [
    call.output_tokens > 0 && `${count(call.output_tokens)} tokens`,
    prompt > 0 && `${count(prompt)} prompt tokens, ${share(call.cached_tokens, prompt)} from cache`,
    call.finished_s != null &&
      call.started_s != null &&
      `in ${seconds(call.finished_s - call.started_s)}`,
    speed && `${Math.round(speed)} tokens/s`,
    call.finish_reason === "length" && "cut at the maximum",
  ].filter(Boolean);
  return (
    <p class="meta">
      {facts.map((fact) => (
        <span key={fact}>{fact}</span>
      ))}
    </p>
  );
}
