// Write a call, or a small graph of them, run it, watch it, and take it away as code.
import { useState } from "preact/hooks";
import { post, postTo, useStream } from "./api.js";
import { asCurl, asOpenAI, asPFunc, graphRequest, problem, readProgram } from "./program.js";

const EXAMPLE = [
  { template: "A list of three animals that live in {{place}}: {{animals}}", maxTokens: 40, temperature: 0 },
  { template: "{{animals}}\nThe most surprising of these is {{choice}}", maxTokens: 40, temperature: 0 },
];

const FORMS = { PFunc: asPFunc, curl: asCurl, OpenAI: asOpenAI };

export function Playground() {
  const [calls, setCalls] = useState(EXAMPLE);
  const [values, setValues] = useState({ place: "the rain forest" });
  const [run, setRun] = useState(null);
  const [error, setError] = useState(null);
  const program = readProgram(calls);
  const wrong = problem(program);
  const change = (i, fields) => setCalls(calls.map((call, j) => (i === j ? { ...call, ...fields } : call)));
  const start = async () => {
    setError(null);
    setRun(null);
    try {
      const session = await post("sessions");
      const answer = await postTo("../v1/semantic_graph", { ...session, ...graphRequest(program, values) });
      setRun({ session, variables: answer.variables, outputs: program.calls.map((call) => call.output) });
    } catch (failure) {
      setError(failure.message);
    }
  };
  return (
    <>
      <h1>Playground</h1>
      <p class="hint">
        The model generates the last {"{{name}}"} of a prompt. Use that name in a later prompt to pass the
        result on.
      </p>
      <div class="split">
        <div class="views">
          {program.calls.map((call, i) => (
            <CallEditor key={i} {...{ call, i, change }} remove={calls.length > 1 && (() => setCalls(calls.filter((_, j) => j !== i)))} />
          ))}
          <button onClick={() => setCalls([...calls, { template: "", maxTokens: 40, temperature: 0 }])}>
            Add a call
          </button>
          <section>
            <h2>Inputs</h2>
            {program.inputs.map((name) => (
              <label key={name}>
                {name}
                <textarea
                  rows="2"
                  value={values[name] ?? ""}
                  onInput={(event) => setValues({ ...values, [name]: event.target.value })}
                />
              </label>
            ))}
          </section>
          <button class="main" disabled={Boolean(wrong)} onClick={start}>
            Run
          </button>
          <p role="alert">{wrong ?? error}</p>
        </div>
        <aside aria-label="Results">
          {run && <Results run={run} />}
          {!wrong && <Code program={program} values={values} />}
        </aside>
      </div>
    </>
  );
}

function CallEditor({ call, i, change, remove }) {
  return (
    <section>
      <h2>
        Call {i + 1}
        {call.output && <small> → {call.output}</small>}
        {remove && (
          <button class="quiet" onClick={remove}>
            Remove
          </button>
        )}
      </h2>
      <label>
        Prompt
        <textarea rows="4" value={call.template} onInput={(event) => change(i, { template: event.target.value })} />
      </label>
      <div class="fields">
        <label>
          Max tokens
          <input
            type="number"
            min="1"
            value={call.maxTokens}
            onInput={(event) => change(i, { maxTokens: event.target.valueAsNumber || 1 })}
          />
        </label>
        <label>
          Temperature
          <input
            type="number"
            min="0"
            step="0.1"
            value={call.temperature}
            onInput={(event) => change(i, { temperature: event.target.valueAsNumber || 0 })}
          />
        </label>
      </div>
    </section>
  );
}

function Results({ run }) {
  const { session_id, session_auth } = run.session;
  return (
    <section>
      <h2>
        Results <a href={`#/run/${session_id}`}>as a graph</a>
      </h2>
      {run.outputs.map((name) => (
        <Output
          key={`${session_id} ${name}`}
          name={name}
          url={`../v1/semantic_var/${run.variables[name]}/stream?session_id=${session_id}&session_auth=${encodeURIComponent(session_auth)}`}
        />
      ))}
    </section>
  );
}

function Output({ name, url }) {
  const { text, isDone, error } = useStream(url);
  return (
    <>
      <h3>{name}</h3>
      <pre class="value" aria-busy={!isDone} role="region" tabindex="0" aria-label={`Value of ${name}`}>
        {text}
      </pre>
      <p role="alert">{error}</p>
    </>
  );
}

function Code({ program, values }) {
  const [form, setForm] = useState("PFunc");
  const [copied, setCopied] = useState(false);
  const code = FORMS[form](program, values, location.origin);
  const choose = (name) => {
    setForm(name);
    setCopied(false);
  };
  return (
    <section>
      <h2>Code</h2>
      <div class="tabs" role="group" aria-label="Form">
        {Object.keys(FORMS).map((name) => (
          <button key={name} aria-pressed={name === form} onClick={() => choose(name)}>
            {name}
          </button>
        ))}
        <button class="quiet" onClick={() => navigator.clipboard.writeText(code).then(() => setCopied(true))}>
          {copied ? "Copied" : "Copy"}
        </button>
      </div>
      <pre class="code" role="region" tabindex="0" aria-label="Code">
        {code}
      </pre>
    </section>
  );
}
