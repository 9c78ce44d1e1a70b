// Write a call, or several that read each other's outputs, run them, and copy them as code.
import { useEffect, useRef, useState } from "preact/hooks";
import { post, postTo, readOnce, rowsOf } from "./api.js";
import { samplingWords } from "./call_facts.jsx";
import { Code } from "./code.jsx";
import { EXAMPLES, SETTINGS, keepDraft, readDraft } from "./draft.js";
import { plural } from "./format.js";
import { Icon } from "./icons.jsx";
import { graphRequest, problem, readProgram } from "./program.js";
import { Choice, useRead } from "./parts.jsx";
import { Results } from "./results.jsx";
import { useTitle } from "./route.js";

const [FIRST] = Object.keys(EXAMPLES);
const draftOf = (example) => ({
  calls: EXAMPLES[example].calls,
  values: EXAMPLES[example].values,
  settings: SETTINGS,
  example,
});

export function Playground() {
  useTitle("Playground");
  const [draft, setDraft] = useState(() => readDraft() ?? draftOf(FIRST));
  const models = useRead(readModels, [], []);
  const results = useRef(null);
  const { calls, values, settings } = draft;
  const program = readProgram(calls, settings);
  const wrong = problem(program);
  const reveal = () => results.current?.scrollIntoView({ behavior: "smooth", block: "nearest" });
  const { run, error, isStarting, start, forget } = useStart(program, values, wrong, reveal);
  const change = (fields) => {
    if (fields.example) forget();
    const changed = { ...draft, ...fields };
    setDraft(changed);
    keepDraft(changed);
  };
  const setCall = (i, fields) =>
    change({ calls: calls.map((call, j) => (i === j ? { ...call, ...fields } : call)) });
  return (
    <div class="screen">
      <div class="head">
        <h1>Playground</h1>
        <Examples draft={draft} choose={(name) => change(draftOf(name))} />
        {draft.origin && <a href={`#/run/${draft.origin}`}>The run it is from</a>}
      </div>
      <Settings
        settings={settings}
        models={models}
        change={(fields) => change({ settings: { ...settings, ...fields } })}
      >
        <button
          class="btn main"
          type="button"
          disabled={Boolean(wrong) || isStarting}
          onClick={start}
        >
          <Icon name="play" />
          Run <kbd class="only-wide">Ctrl ↵</kbd>
        </button>
      </Settings>
      <p class="st failed wrong" role="alert">
        {wrong ?? error}
      </p>
      <div class="play">
        <div>
          {program.inputs.length > 0 && (
            <Inputs
              names={program.inputs}
              values={values}
              change={(name, text) => change({ values: { ...values, [name]: text } })}
            />
          )}
          {calls.map((call, i) => (
            <CallEditor
              key={i}
              number={i + 1}
              call={call}
              takes={program.calls.find((other) => other.name === call.name)?.takes ?? []}
              isChat={settings.chat}
              change={(fields) => setCall(i, fields)}
              remove={
                calls.length > 1
                  ? () => change({ calls: calls.filter((_, j) => j !== i), example: undefined })
                  : null
              }
            />
          ))}
          <button
            class="btn small"
            type="button"
            onClick={() =>
              change({
                calls: [...calls, { name: freeName(calls), system: "", prompt: "" }],
                example: undefined,
              })
            }
          >
            Add a call
          </button>
          <p class="faint note">
            A name in double braces is the output of the call with this name, or an input.
          </p>
        </div>
        <div ref={results}>
          <Results
            key={run?.session.session_id}
            run={run}
            outputs={program.calls.map((call) => call.name)}
          />
          {!wrong && <Code program={program} values={values} models={models} />}
        </div>
      </div>
    </div>
  );
}

/** Runs a program: by `start`, or with Ctrl and Enter. */
function useStart(program, values, wrong, reveal) {
  const [run, setRun] = useState(null);
  const [error, setError] = useState(null);
  const [isStarting, setStarting] = useState(false);
  const start = async () => {
    if (wrong || isStarting) return;
    setStarting(true);
    setError(null);
    try {
      const session = await post("sessions");
      const request = { ...session, ...graphRequest(program, values) };
      const { variables } = await postTo("../v1/semantic_graph", request);
      setRun({ session, variables, outputs: program.calls.map((call) => call.name) });
      reveal();
    } catch (failure) {
      setError(failure.message);
    }
    setStarting(false);
  };
  const latest = useRef(start);
  latest.current = start;
  useEffect(() => {
    const press = (event) =>
      event.key === "Enter" && (event.ctrlKey || event.metaKey) && latest.current();
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
  return { run, error, isStarting, start, forget: () => setRun(null) };
}

const Examples = ({ draft, choose }) => (
  <Choice
    label="Example"
    all={draft.example ? null : (draft.title ?? "Your own program")}
    options={Object.keys(EXAMPLES).map((name) => [name, `Example: ${name}`])}
    value={draft.example ?? ""}
    onChoose={(name) => name && choose(name)}
  />
);

const Inputs = ({ names, values, change }) => (
  <section class="card call" aria-label="Inputs">
    <header>
      <h2>Inputs</h2>
    </header>
    {names.map((name) => (
      <label class="msg" key={name}>
        <b>
          <span class="ph">{name}</span>
        </b>
        <textarea
          rows="1"
          value={values[name] ?? ""}
          onInput={(event) => change(name, event.target.value)}
        />
      </label>
    ))}
  </section>
);

/** The models that the service has. */
async function readModels() {
  const rows = await readOnce("overview");
  const served = rowsOf(rows, "engine").map((engine) => engine.model);
  return [...new Set([...(rows.get("service")?.models ?? []), ...served])];
}

function freeName(calls) {
  const taken = new Set(calls.map((call) => call.name));
  let number = calls.length + 1;
  while (taken.has(`output_${number}`)) number += 1;
  return `output_${number}`;
}

function Settings({ settings, models, change, children }) {
  const number = (name, fallback) => (event) =>
    change({
      [name]: Number.isNaN(event.target.valueAsNumber) ? fallback : event.target.valueAsNumber,
    });
  return (
    <form class="card set" aria-label="Settings" onSubmit={(event) => event.preventDefault()}>
      <label class="wide">
        Model
        <select
          class="field"
          value={settings.model}
          onChange={(event) => change({ model: event.target.value })}
        >
          <option value="">{models.length === 1 ? `Any (${models[0]})` : "Any model"}</option>
          {models.map((name) => (
            <option key={name}>{name}</option>
          ))}
          {settings.model && !models.includes(settings.model) && <option>{settings.model}</option>}
        </select>
      </label>
      <label>
        Temperature
        <input
          class="field num"
          type="number"
          step="0.1"
          min="0"
          value={settings.temperature}
          onInput={number("temperature", 0)}
        />
      </label>
      <label>
        Max tokens
        <input
          class="field num"
          type="number"
          min="1"
          value={settings.maxTokens}
          onInput={number("maxTokens", 64)}
        />
      </label>
      <label>
        Seed
        <input
          class="field num"
          inputmode="numeric"
          placeholder="any"
          value={settings.seed}
          onInput={(event) =>
            change({ seed: event.target.value.replaceAll(/\D/g, "").slice(0, 18) })
          }
        />
      </label>
      <label class="switch">
        <input
          type="checkbox"
          role="switch"
          checked={settings.chat}
          onChange={(event) => change({ chat: event.target.checked })}
        />{" "}
        Chat
      </label>
      <span class="end">{children}</span>
    </form>
  );
}

function CallEditor({ number, call, takes, isChat, change, remove }) {
  return (
    <section class="card call" aria-label={`Call ${number}`}>
      <header>
        <h2>{number} ·</h2>
        <input
          class="name"
          aria-label={`Name of output ${number}`}
          value={call.name}
          spellcheck={false}
          onInput={(event) => change({ name: event.target.value.trim() })}
        />
        <span class="end">
          {remove && (
            <button class="btn ghost small" type="button" onClick={remove}>
              Remove
            </button>
          )}
        </span>
      </header>
      {isChat && (
        <label class="msg">
          <b>system</b>
          <textarea
            rows="1"
            aria-label={`System message of call ${number}`}
            placeholder="that of the model, if it has one"
            value={call.system}
            onInput={(event) => change({ system: event.target.value })}
          />
        </label>
      )}
      <label class="msg">
        <b>{isChat ? "user" : "prompt"}</b>
        <textarea
          rows="2"
          aria-label={`Prompt of call ${number}`}
          value={call.prompt}
          onInput={(event) => change({ prompt: event.target.value })}
        />
      </label>
      <footer>
        {takes.length > 0 && "reads "}
        {takes.map((name) => (
          <span key={name} class="ph">
            {name}
          </span>
        ))}
        writes <span class="ph out">{call.name}</span>
        {samplingWords(call.sampling)}
        {call.sampling?.choices && ` as one of ${plural(call.sampling.choices.length, "text")}`}
      </footer>
    </section>
  );
}
