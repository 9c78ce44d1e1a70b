// Why a call failed or did not run.
import { errorText } from "./blame.jsx";
import { parentsOf } from "./graph.js";
import { Glyph } from "./icons.jsx";
import { CopyButton } from "./parts.jsx";
import { causeOf } from "./why.js";

/** What led to a failure: told once, at the cause. */
export function Errors({ errors, producer, run }) {
  const cause = producer === undefined ? undefined : causeOf(run.graph, producer);
  if (cause !== producer && run.graph.calls.has(cause)) {
    return <Chain cause={cause} producer={producer} root={errorText(errors)} run={run} />;
  }
  return <Own errors={errors} isStopped={run.graph.calls.get(producer)?.state === "cancelled"} />;
}

/** The call that failed, what it had read, and the call that did not run because of it. */
function Chain({ cause, producer, root, run: { graph, rows, open } }) {
  const call = graph.calls.get(cause);
  const inputs = parentsOf(graph, cause).filter((id) => graph.calls.get(id).state === "done");
  return (
    <section>
      <div class="row">
        <h2>What led to it</h2>
      </div>
      <ol class="chain">
        {inputs.slice(0, 2).map((id) => (
          <li key={id}>
            <Glyph state="done" />
            <div>
              <b>{graph.calls.get(id).func_name}</b> made <code>{graph.calls.get(id).output}</code>
              <p class="dim">{rows.get(`var:${id}`)?.head}</p>
            </div>
          </li>
        ))}
        <li>
          <Glyph state={call.state === "failed" ? "failed" : "stopped"} />
          <div>
            <button class="as-name" type="button" data-call={cause} onClick={() => open(cause)}>
              {call.func_name || call.output}
            </button>{" "}
            <span class="dim">{call.state === "failed" ? "failed" : "was cancelled"}</span>
            <p class="err">{root}</p>
          </div>
        </li>
        <li>
          <Glyph state="skipped" />
          <div>
            <b>{graph.calls.get(producer).func_name}</b> <span class="dim">did not run</span>
          </div>
        </li>
      </ol>
    </section>
  );
}

function Own({ errors, isStopped }) {
  const messages = errors.map((error) => error.message || error.type.replaceAll("_", " "));
  return (
    <section>
      <div class="row">
        <h2>{isStopped ? "Why" : "Error"}</h2>
        <span class="end">
          <CopyButton text={messages.join("\n")} what="the error" />
        </span>
      </div>
      <div class="chain">
        <p class="err">{errorText(errors)}</p>
        {messages.length > 1 && (
          <details>
            <summary>How it was reported</summary>
            {messages.slice(0, -1).map((line) => (
              <p class="err" key={line}>
                {line}
              </p>
            ))}
          </details>
        )}
      </div>
    </section>
  );
}
