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
  const feed = useFeed(`sessions/${run.session.session_id}`);
  const [finished, setFinished] = useState(() => new Set());
  const isOver = finished.size === run.outputs.length;
  useEffect(() => {
    if (isOver) post(`sessions/${run.session.session_id}/end`).catch(() => {}); // It may have expired.
  }, [isOver]);
  const calls = new Map(rowsOf(feed.rows, "call").map((call) => [call.output, call]));
  const open = new Set(run.outputs.filter((name) => !finished.has(name)).slice(0, MAX_STREAMS));
  const { session_id } = run.session;
  const stop = () => post(`sessions/${session_id}/end`).catch((failure) => say(failure.message));
  return (
    <>
      <p class="acts results-acts">
        <a class="btn small" href={`#/run/${session_id}`}>
          Open as a run
        </a>
        {!isOver && (
          <button class="btn small danger" type="button" onClick={stop}>
            Stop
          </button>
        )}
      </p>
      {run.outputs.map((name) => (
        <Output
          key={name}
          name={name}
          call={calls.get(name)}
          url={open.has(name) || finished.has(name) ? streamOf(run, name) : null}
          onDone={() => setFinished((old) => new Set([...old, name]))}
        />
      ))}
    </>
  );
}

function streamOf({ session: { session_id, session_auth }, variables }, name) {
  return `../v1/semantic_var/${variables[name]}/stream?session_id=${session_id}&session_auth=${encodeURIComponent(session_auth)}`;
}

/** The text of a variable as it is generated. */
function useStream(url, onDone) {
  const [state, setState] = useState({ text: "", isDone: false, error: null });
  useEffect(() => {
    if (!url) return undefined;
    let text = "";
    const source = new EventSource(url);
    const end = (content, error) => {
      source.close();
      setState({ text: content, isDone: true, error });
      onDone();
    };
    source.addEventListener("delta", (event) => {
      text += JSON.parse(event.data).text;
      setState({ text, isDone: false, error: null });
    });
    source.addEventListener("done", (event) => end(JSON.parse(event.data).content, null));
    source.addEventListener("error", (event) =>
      end(text, event.data ? JSON.parse(event.data).error.message : "The connection broke."),
    );
    return () => source.close();
  }, [url]);
  return state;
}

function Output({ name, call, url, onDone }) {
  const { text, isDone, error } = useStream(url, onDone);
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
    !call.reused && call.decode_s > 0 && call.output_tokens > 1
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
