// What a call has read and written: inputs beside outputs.
import { plural, seconds } from "./format.js";
import { Value } from "./value.jsx";

export function Texts({ variable, call, row, text, texts, source, run }) {
  const { graph, now } = run;
  const isGrowing = row.state === "empty" && call?.state === "running";
  const own = (
    <Value
      key={variable}
      isMain
      name={row.name}
      note={call ? outputNote(call, now) : "from your program"}
      text={text}
      chars={row.chars}
      isGrowing={isGrowing}
      isLeftOut={row.is_left_out}
      nothing={nothing(row, graph)}
    />
  );
  if (!call) {
    return (
      <section>
        {own}
        <Readers variable={variable} run={run} />
      </section>
    );
  }
  return (
    <section>
      <div class="io">
        <div>
          <h3>In</h3>
          <Inputs call={call} texts={texts} run={run} />
        </div>
        <div>
          <h3>Out</h3>
          {call.outputs.map((id) =>
            id === variable ? own : <Link key={id} variable={id} run={run} />,
          )}
          {isGrowing && source?.comes_whole && (
            <p class="hint">The value comes at the end: {source.comes_whole}.</p>
          )}
        </div>
      </div>
    </section>
  );
}

/** The words for a value that does not exist. */
const nothing = (row, graph) =>
  row.state === "failed" || graph.hasEnded
    ? "no value"
    : row.state === "ready"
      ? "an empty text"
      : "nothing yet";

function outputNote(call, now) {
  if (call.reused) return "reused";
  if (!call.output_tokens) return "";
  const start =
    call.first_token_s ?? (call.decode_s == null ? null : call.finished_s - call.decode_s);
  const took = start == null ? 0 : (call.finished_s ?? now) - start;
  const speed =
    took > 0.05 ? `, ${Math.round(call.output_tokens / took)}/s` : "";
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
        const from = producer
          ? `from ${producer.func_name || producer.output}`
          : row.set_s > 0.5
            ? `from your program at ${seconds(row.set_s)}`
            : "from your program";
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
