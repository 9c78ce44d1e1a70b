// Times, attempts and details of a call.
import { readOnce } from "./api.js";
import { count, plural, seconds, share } from "./format.js";
import { CopyButton, Table, useRead } from "./parts.jsx";
import { looks } from "./states.js";

const since = (from, to) => (from == null || to == null ? 0 : Math.max(0, to - from));

/** The phases of a call that took time: `[class, seconds, word]`. */
function phasesOf(call, now) {
  const isOver = call.finished_s != null;
  const isNative = call.kind === "native";
  const end = call.finished_s ?? now;
  const open = isOver ? null : now; // the end of a phase that still lasts
  const first = call.first_token_s ?? (call.decode_s == null ? null : end - call.decode_s);
  const hasPrefill = !isNative && first != null;
  const done = call.state === "failed" ? " failed" : isOver ? " done" : "";
  const word = isNative ? "ran" : call.reused ? "reused" : first == null ? "running" : isOver ? "generated" : "generating";
  return [
    [
      "w",
      since(call.activated_s, call.ready_s ?? open),
      call.ready_s == null ? "waiting" : "waited",
    ],
    ["q", since(call.ready_s, call.started_s ?? open), "queued"],
    ["pre", hasPrefill ? since(call.started_s, first) : 0, "prefill"],
    [
      `dec${done}`,
      call.started_s == null ? 0 : since(hasPrefill ? first : call.started_s, end),
      word,
    ],
  ].filter(([, time]) => time > 0.0005);
}

/** The times of a call as a bar: waited, queued, prefill, generating. */
export function Phases({ call, now }) {
  const parts = phasesOf(call, now);
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

export function Attempts({ attempts, call }) {
  if (!(attempts?.length > 1)) return null;
  return (
    <section>
      <div class="row">
        <h2>Attempts</h2>
      </div>
      <Table
        label="Attempts"
        heads={[["Engine"], ["Queued", true], ["Ran", true], ["What came of it"]]}
      >
        <tbody>
          {attempts.map((attempt, i) => (
            <tr key={i}>
              <td>{attempt.engine}</td>
              <td class="n">{seconds(attempt.queued_s)}</td>
              <td class="n">{seconds(attempt.ran_s)}</td>
              <td class="dim">
                {attempt.why_left ?? (i === attempts.length - 1 ? looks(call).word : "")}
              </td>
            </tr>
          ))}
        </tbody>
      </Table>
    </section>
  );
}

const SAMPLING_NAMES = {
  max_gen_length: "max tokens",
  top_p: "top p",
  top_k: "top k",
  min_p: "min p",
  repetition_penalty: "repetition penalty",
};

/** The seconds that the scheduler predicted for each engine, if the decision is a recent one. */
function usePrediction(call, run) {
  const wasPlaced = call.started_s != null && call.engine !== null;
  const read = async () => {
    const rows = await readOnce("placement");
    const start = `decision:${run.id}:${call.request_id}:`;
    return rows.get([...rows.keys()].find((name) => name.startsWith(start)))?.compared ?? [];
  };
  const compared = useRead(() => wasPlaced && read(), [], [run.id, call.request_id, wasPlaced]);
  return compared
    .map((one) => `${one.seconds === null ? "no room" : seconds(one.seconds)} on ${one.engine}`)
    .join(", ");
}

/** Sampling in words. */
export const samplingWords = (sampling) =>
  Object.entries(sampling ?? {})
    .filter(([, value]) => value !== null && typeof value !== "object")
    .map(([name, value]) => `${SAMPLING_NAMES[name] ?? name} ${value}`)
    .join(", ");

/** `[name, value]` of what is known of a call. */
function factsOf(call, source, predicted, variable, run) {
  const prompt = call.cached_tokens + call.computed_tokens;
  const cached = call.reused
    ? "not computed again"
    : `${share(call.cached_tokens, prompt)} from the KV cache`;
  const ends = { length: ", cut at the maximum", stop: ", ended by itself" };
  const output = `${plural(call.output_tokens, "token")}${ends[call.finish_reason] ?? ""}`;
  return [
    ["Model", call.model && `${call.model}${call.engine ? ` on ${call.engine}` : ""}`],
    ["Prompt", prompt > 0 && `${count(prompt)} tokens, ${cached}`],
    ["Output", call.output_tokens > 0 && output],
    ["Sampling", samplingWords(source?.sampling)],
    ["Predicted", predicted],
    ["Attempts", call.attempts > 1 && call.attempts],
    ["Goal", call.criteria],
    ["Request", `${run.id}/${call.request_id}`],
    ["Variable", variable],
  ].filter(([, value]) => value);
}

export function Facts({ call, source, row, variable, run }) {
  const predicted = usePrediction(call, run);
  return (
    <section>
      <div class="row">
        <h2>Details</h2>
        <span class="end">
          <CopyButton
            text={() => JSON.stringify({ ...call, variable: row }, null, 2)}
            what="the details as JSON"
          />
        </span>
      </div>
      <dl class="facts2">
        {factsOf(call, source, predicted, variable, run).map(([name, value]) => (
          <Fragment key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </Fragment>
        ))}
      </dl>
    </section>
  );
}
