// The state of a call as the page shows it: a class that draws it, and a word.

const WORDS = {
  waiting: "waiting",
  queued: "queued",
  done: "finished",
  failed: "failed",
  cancelled: "cancelled",
};
const CLASSES = { cancelled: "stopped" };

/** A running call reads its prompt until its first token. */
function phaseOf(call) {
  if (call.first_token_s != null || call.output_tokens > 0) return "generating";
  return call.kind !== "native" && "first_token_s" in call ? "prefill" : "running";
}

/** The engine of a call, or what gave its result instead. */
export const placeOf = (call) =>
  call.engine ?? (call.reused ? "reused" : call.kind === "native" ? "sandbox" : "");

/** `hasEnded`: the run of the call has ended. */
export function looks(call, hasEnded = false) {
  const { state } = call;
  if (state === "running") {
    return { state: "running", word: phaseOf(call) };
  }
  if (state === "idle")
    return hasEnded
      ? { state: "skipped", word: "not run" }
      : { state: "waiting", word: "not started" };
  if ((state === "failed" || state === "cancelled") && call.ready_s == null)
    return { state: "skipped", word: "not run" };
  return { state: CLASSES[state] ?? state, word: WORDS[state] ?? state };
}
