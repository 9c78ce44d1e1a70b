// The panel of one call, a group of equal calls, or a variable that the program set.
import { useEffect, useRef } from "preact/hooks";
import { post, useFeed } from "./api.js";
import { AskButton } from "./ask.jsx";
import { Sentence, errorText } from "./blame.jsx";
import { draftOfCall, putDraft } from "./draft.js";
import { count, plural, seconds, share } from "./format.js";
import { parentsOf } from "./graph.js";
import { stateOfAll } from "./graph_view.jsx";
import { Glyph, Icon, Mark, Pill } from "./icons.jsx";
import { CopyButton, Notice } from "./parts.jsx";
import { Prompt, useSeen } from "./prompt.jsx";
import { looks } from "./states.js";
import { variableState } from "./tables.jsx";
import { textOf, useTexts } from "./texts.js";
import { Value } from "./value.jsx";
import { causeOf, why } from "./why.js";
import { asCurl, readProgram } from "./program.js";

/** `target`: `{variable}` or `{node}`. `run`: what all parts of the run's view share. */
export function Panel({ target, run, isWide, setWide, close }) {
  const panel = useRef(null);
  const name = target.node ? `node ${target.node.id}` : target.variable;
  useEffect(() => {
    panel.current.scrollTop = 0;
    if (run.isOver && run.wasOpened.current) panel.current.focus({ preventScroll: true });
    run.wasOpened.current = false;
  }, [name]);
  const { graph, rows } = run;
  const producer = target.node ? target.node.members[0] : graph.producerOf.get(target.variable);
  const call = graph.calls.get(producer);
  const row = rows.get(`var:${target.variable}`);
  const title = call ? call.func_name || call.output : row?.name ?? target.variable;
  const number = target.node?.members.length;
  const look = target.node
    ? groupLook(target.node, graph)
    : call
      ? looks(call, graph.hasEnded)
      : row && variableState(row, null, graph.hasEnded);
  return (
    <>
      {run.isOver && <div class="scrim" onClick={close} />}
      <aside class="panel" tabindex="-1" ref={panel} aria-label={call ? `Call ${title}` : `Variable ${title}`}>
        <header>
          <span class="grab" />
          <h2 class="cut">{number > 1 ? `${title} ×${number}` : title}</h2>
          {look && <Pill {...look} />}
          <span class="end">
            <button class="btn ghost icon only-wide" type="button" aria-label="Wider" aria-pressed={isWide} title="Wider" onClick={() => setWide(!isWide)}>
              <Icon name="wide" />
            </button>
            <button class="btn ghost icon" type="button" aria-label="Close (Esc)" title="Close (Esc)" onClick={close}>
              <Icon name="close" />
            </button>
          </span>
        </header>
        {target.node ? (
          <Group node={target.node} run={run} />
        ) : (
          <Detail key={target.variable} variable={target.variable} producer={producer} run={run} />
        )}
      </aside>
    </>
  );
}

function groupLook(node, graph) {
  const calls = node.members.map((id) => graph.calls.get(id));
  const state = stateOfAll(calls, graph.hasEnded);
  const word = calls.map((call) => looks(call, graph.hasEnded)).find((look) => look.state === state).word;
  return { state, word: `${calls.filter((call) => looks(call, graph.hasEnded).state === state).length} ${word}` };
}

/** Equal calls: the slowest is named, and each can be opened. */
function Group({ node, run }) {
  const { graph, rows, now, wall, open } = run;
  const members = node.members.map((id) => [id, graph.calls.get(id)]);
  const took = (call) => (call.started_s == null ? null : (call.finished_s ?? now) - call.started_s);
  const slowest = members.reduce((a, b) => ((took(b[1]) ?? -1) > (took(a[1]) ?? -1) ? b : a));
  const failed = members.filter(([, call]) => call.state === "failed");
  const engines = [...new Set(members.map(([, call]) => call.engine).filter(Boolean))];
  const critical = members.find(([id]) => wall.path.has(id));
  return (
    <>
      <section>
        <p class="why">
          {plural(members.length, "call")} of one function{engines.length > 0 && `, on ${plural(engines.length, "engine")}`}.{" "}
          {took(slowest[1]) !== null && (
            <>
              The slowest ran for {seconds(took(slowest[1]))}
              {critical && (critical[0] === slowest[0] ? " and is on the critical path" : `; the one that ended last is on the critical path`)}.
            </>
          )}{" "}
          {failed.length > 0 && `${plural(failed.length, "call")} failed.`}
        </p>
      </section>
      <section>
        <div class="row">
          <h2>Calls</h2>
        </div>
        <table class="group">
          <thead>
            <tr>
              <th scope="col">First words</th>
              <th scope="col">Engine</th>
              <th scope="col" class="n">
                Ran
              </th>
            </tr>
          </thead>
          <tbody>
            {members.map(([id, call], i) => (
              <tr key={id} class="row" data-call={id} onClick={() => open(id)}>
                <td>
                  <span class="cell">
                    <Mark {...looks(call, graph.hasEnded)} />
                    <button class="as-link cut" type="button" onClick={(event) => (event.stopPropagation(), open(id))}>
                      {i + 1} {headOf(call, rows)}
                    </button>
                  </span>
                </td>
                <td class="dim">{call.engine}</td>
                <td class="n">{id === slowest[0] ? <b>{seconds(took(call))}</b> : seconds(took(call))}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </section>
    </>
  );
}

/** The first words of a call's own input, or of its output. */
function headOf(call, rows) {
  const heads = [...call.inputs, ...call.outputs].map((id) => rows.get(`var:${id}`)?.head);
  return heads.find(Boolean) ?? call.output;
}

function Detail({ variable, producer, run }) {
  const { graph, rows, id, isLive, open, now } = run;
  const feed = useFeed(`sessions/${id}/vars/${variable}`);
  const call = graph.calls.get(producer);
  const row = feed.rows.get("var") ?? rows.get(`var:${variable}`);
  const source = feed.rows.get("call");
  const texts = useTexts(id, (call?.inputs ?? []).map((input) => [input, rows.get(`var:${input}`)]));
  const text = textOf(feed.rows);
  if (!row) return feed.error ? <Notice feed={feed} /> : <p class="hint">Loading…</p>;
  const isHidden = !run.seesValues || (row.chars > 0 && !text && feed.rows.size > 0 && !row.is_left_out);
  const isGrowing = row.state === "empty" && call?.state === "running";
  const isOpen = isLive && call && !["done", "failed", "cancelled"].includes(call.state);
  const seen = useSeen(run, source?.prompt && !isHidden ? call : null);
  const draft = source?.prompt && !isHidden ? draftOfCall({ call, row, source, rows, texts, seen }) : null;
  return (
    <>
      <section>
        {feed.error && <Notice feed={feed} />}
        {call ? (
          <>
            <p class="why">
              <Sentence parts={why(graph, producer, rows, now)} graph={graph} onOpen={open} />
            </p>
            <Phases call={call} now={now} />
          </>
        ) : (
          <p class="why">
            {row.state === "empty" ? (graph.hasEnded ? "Your program never set it." : "Your program has not set it yet.") : "Your program set it"}
            {row.state !== "empty" && (row.set_s != null ? `, ${seconds(row.set_s)} after the run began.` : ".")}
          </p>
        )}
        {call?.remark && (
          <p class="notice">
            <Glyph state="queued" />
            <span>{call.remark}</span>
          </p>
        )}
        {call && (
          <div class="acts">
            {draft && (
              <button class="btn small" type="button" onClick={() => putDraft(draft)}>
                <Icon name="play" />
                Run again in the playground
              </button>
            )}
            {draft && (
              <CopyButton text={() => asCurl(readProgram(draft.calls, draft.settings), draft.values, location.origin)} what="the call as curl">
                Copy as curl
              </CopyButton>
            )}
            {isOpen && (
              <AskButton
                label="Stop…"
                title={`Stop ${call.func_name || call.output}?`}
                question="What it has generated is kept. Calls that need its output will not run."
                confirm="Stop the call"
                keep="Let it run"
                disabled={!feed.isLive}
                onConfirm={() => post(`sessions/${id}/cancel/${call.request_id}`)}
              />
            )}
          </div>
        )}
      </section>
      {row.errors && <Errors errors={row.errors} producer={producer} run={run} />}
      {run.seesValues && !isHidden ? (
        <section>
          <div class={call ? "io" : undefined}>
            {call && (
              <div>
                <h3>In</h3>
                <Inputs call={call} texts={texts} run={run} />
              </div>
            )}
            <div>
              {call && <h3>Out</h3>}
              {(call?.outputs ?? [variable]).map((output) =>
                output === variable ? (
                  <Value
                    key={output}
                    isMain
                    name={row.name}
                    note={call ? outputNote(call, now) : "from your program"}
                    text={text}
                    chars={row.chars}
                    isGrowing={isGrowing}
                    isLeftOut={row.is_left_out}
                    nothing={nothing(row, graph)}
                  />
                ) : (
                  <Link key={output} variable={output} run={run} />
                ),
              )}
              {isGrowing && source?.comes_whole && <p class="hint">The value comes at the end: {source.comes_whole}.</p>}
              {!call && <Readers variable={variable} run={run} />}
            </div>
          </div>
        </section>
      ) : (
        <section>
          <p class="notice">
            <Icon name="lock" />
            <span>
              {count(row.chars)} characters. The texts of this run belong to tenant <b>{run.tenant}</b>. You see times and tokens. With one of its API keys you
              also see prompts and values.
            </span>
          </p>
        </section>
      )}
      {source?.prompt && !isHidden && <Prompt call={call} pieces={source.prompt} texts={texts} seen={seen} output={{ name: row.name, text }} run={run} />}
      {source?.source && (
        <section>
          <div class="row">
            <h2>Python function</h2>
            <span class="end">
              <CopyButton text={source.source} what="the function" />
            </span>
          </div>
          <div class="val">
            <pre class="prompt-source" role="region" tabindex="0" aria-label="Source">
              {source.source}
            </pre>
          </div>
        </section>
      )}
      {call && <Attempts attempts={source?.attempts} call={call} />}
      {call && <Facts call={call} source={source} row={row} variable={variable} run={run} />}
    </>
  );
}

/** The words for a value that does not exist. */
const nothing = (row, graph) => (row.state === "failed" || graph.hasEnded ? "no value" : row.state === "ready" ? "an empty text" : "nothing yet");

function outputNote(call, now) {
  if (!call.output_tokens) return "";
  const start = call.first_token_s ?? (call.decode_s == null ? null : call.finished_s - call.decode_s);
  const took = start == null ? 0 : (call.finished_s ?? now) - start;
  const speed = took > 0.05 && !call.reused ? `, ${Math.round(call.output_tokens / took)} a second` : "";
  const end = call.finish_reason === "length" ? ", cut at the maximum" : "";
  return `${plural(call.output_tokens, "token")}${speed}${end}`;
}

const MAX_INPUTS = 8; // More inputs are links.

function Inputs({ call, texts, run }) {
  const { graph, rows, open } = run;
  const inputs = [...new Set(call.inputs)];
  if (!inputs.length) return <p class="dim">none: the prompt is complete as it is</p>;
  return (
    <>
      {inputs.slice(0, MAX_INPUTS).map((id) => {
        const row = rows.get(`var:${id}`);
        if (!row) return null;
        const producer = graph.calls.get(row.producer);
        const from = producer ? `from ${producer.func_name || producer.output}` : row.set_s > 0.5 ? `from your program at ${seconds(row.set_s)}` : "from your program";
        const known = texts.get(id);
        return (
          <Value
            key={id}
            name={row.name}
            note={from}
            text={known?.text ?? row.head ?? ""}
            chars={known ? row.chars : (row.head ?? "").length}
            isHidden={known?.isHidden}
            isLeftOut={known?.isLeftOut}
            nothing={nothing(row, graph)}
            onOpen={() => open(id)}
          />
        );
      })}
      {inputs.slice(MAX_INPUTS).map((id) => (
        <Link key={id} variable={id} run={run} />
      ))}
    </>
  );
}

function Link({ variable, run: { rows, open } }) {
  const row = rows.get(`var:${variable}`);
  return (
    <div class="val">
      <div class="top">
        <button class="as-link mono" type="button" onClick={() => open(variable)}>
          {row?.name ?? variable}
        </button>
        <span class="faint cut">{row?.head}</span>
      </div>
    </div>
  );
}

function Readers({ variable, run: { graph, open } }) {
  const readers = [...graph.calls].filter(([, call]) => call.inputs.includes(variable));
  if (!readers.length) return null;
  return (
    <p class="dim">
      Read by{" "}
      {readers.slice(0, 12).map(([id, call], i) => (
        <span key={id}>
          {i > 0 && ", "}
          <button class="as-name" type="button" data-call={id} onClick={() => open(id)}>
            {call.func_name || call.output}
          </button>
        </span>
      ))}
      {readers.length > 12 && ` and ${readers.length - 12} more`}.
    </p>
  );
}

/** What led to a failure: told once, at the cause. */
function Errors({ errors, producer, run }) {
  const { graph, rows, open } = run;
  const cause = producer === undefined ? undefined : causeOf(graph, producer);
  const isOwn = cause === producer;
  const message = errors.map((error) => error.message || error.type.replaceAll("_", " "));
  const root = errorText(errors);
  if (!isOwn && graph.calls.has(cause)) {
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
  return (
    <section>
      <div class="row">
        <h2>{graph.calls.get(producer)?.state === "cancelled" ? "Why" : "Error"}</h2>
        <span class="end">
          <CopyButton text={message.join("\n")} what="the error" />
        </span>
      </div>
      <div class="chain">
        <p class="err">{root}</p>
        {message.length > 1 && (
          <details>
            <summary>How it was reported</summary>
            {message.slice(0, -1).map((line) => (
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

/** The times of a call as a bar: waited, queued, prefill, generating. */
function Phases({ call, now }) {
  const end = call.finished_s ?? now;
  const first = call.first_token_s ?? (call.decode_s == null ? null : end - call.decode_s);
  const since = (from, to) => (from == null || to == null ? 0 : Math.max(0, to - from));
  const isFailed = call.state === "failed";
  const isOver = call.finished_s != null;
  const parts = [
    ["w", since(call.activated_s, call.ready_s ?? (isOver ? null : now)), call.ready_s == null ? "waiting" : "waited"],
    ["q", since(call.ready_s, call.started_s ?? (isOver ? null : now)), "queued"],
    ["pre", call.kind === "native" || first == null ? 0 : since(call.started_s, first), "prefill"],
    [`dec${isFailed ? " failed" : isOver ? " done" : ""}`, since(first == null || call.kind === "native" ? call.started_s : first, call.started_s == null ? null : end), call.kind === "native" ? "ran" : first == null ? "running" : isOver ? "generated" : "generating"],
  ].filter(([, time]) => time > 0.0005);
  if (!parts.length) return null;
  const total = parts.reduce((sum, [, time]) => sum + time, 0);
  return (
    <>
      <div class="phases" aria-hidden="true">
        {parts.map(([name, time]) => (
          <i key={name} class={name} style={{ flexGrow: 100 * Math.max(time / total, 0.02) }} />
        ))}
      </div>
      <p class="legend">
        {parts.map(([name, time, word]) => (
          <span key={name}>
            <i class={`p-${name.replace(" ", "-")}`} />
            {word} <b>{seconds(time)}</b>
          </span>
        ))}
      </p>
    </>
  );
}

function Attempts({ attempts, call }) {
  if (!(attempts?.length > 1)) return null;
  return (
    <section>
      <div class="row">
        <h2>Attempts</h2>
      </div>
      <table>
        <thead>
          <tr>
            <th scope="col">Engine</th>
            <th scope="col" class="n">
              Queued
            </th>
            <th scope="col" class="n">
              Ran
            </th>
            <th scope="col">What came of it</th>
          </tr>
        </thead>
        <tbody>
          {attempts.map((attempt, i) => (
            <tr key={i}>
              <td>{attempt.engine}</td>
              <td class="n">{seconds(attempt.queued_s)}</td>
              <td class="n">{seconds(attempt.ran_s)}</td>
              <td class="dim">{attempt.why_left ?? (i === attempts.length - 1 ? looks(call).word : "")}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

const SAMPLING_NAMES = { max_gen_length: "max tokens", top_p: "top p", top_k: "top k", min_p: "min p", repetition_penalty: "repetition penalty" };

function Facts({ call, source, row, variable, run }) {
  const prompt = call.cached_tokens + call.computed_tokens;
  const sampling = Object.entries(source?.sampling ?? {}).filter(([, value]) => value !== null && typeof value !== "object");
  const facts = [
    ["Model", call.model && `${call.model}${call.engine ? ` on ${call.engine}` : ""}`],
    ["Prompt", prompt > 0 && `${count(prompt)} tokens, ${share(call.cached_tokens, prompt)} from the KV cache`],
    ["Output", call.output_tokens > 0 && `${plural(call.output_tokens, "token")}${call.finish_reason ? `, ended by ${call.finish_reason === "length" ? "the maximum" : "itself"}` : ""}`],
    ["Sampling", sampling.length > 0 && sampling.map(([name, value]) => `${SAMPLING_NAMES[name] ?? name} ${value}`).join(", ")],
    ["Attempts", call.attempts > 1 && call.attempts],
    ["Goal", call.criteria],
    ["Request", `${run.id}/${call.request_id}`],
    ["Variable", variable],
  ].filter(([, value]) => value);
  return (
    <section>
      <div class="row">
        <h2>Details</h2>
        <span class="end">
          <CopyButton text={() => JSON.stringify({ ...call, variable: row }, null, 2)} what="the details as JSON" />
        </span>
      </div>
      <dl class="facts2">
        {facts.map(([name, value]) => (
          <>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </>
        ))}
      </dl>
    </section>
  );
}
