// What a visitor can do with a whole run.
import { canRunAgain, draftOfRun } from "./again.js";
import { post } from "./api.js";
import { AskButton } from "./ask.jsx";
import { putDraft } from "./draft.js";
import { plural } from "./format.js";
import { Icon } from "./icons.jsx";
import { say } from "./parts.jsx";
import { kindOf, titleOf } from "./run_list.js";

/** `run`: its row. `after`: called when a finished run was deleted. */
export function RunActions({ run, running, disabled, after }) {
  const name = titleOf(run);
  if (run.state === "active" && (running > 0 || kindOf(run) !== "API")) {
    const stopped = running > 0 ? `${plural(running, "call")} will stop, and calls` : "Calls";
    return (
      <AskButton
        label="End run…"
        title={`End ${name}?`}
        question={`${stopped} that have not started will not run. Its program can no longer read values. Finished outputs stay in the history.`}
        confirm="End run"
        keep="Keep it running"
        disabled={disabled}
        onConfirm={() => post(`sessions/${run.id}/end`)}
      />
    );
  }
  return (
    <AskButton
      label="Delete…"
      title={`Delete ${name}?`}
      question="Its prompts and values cannot be restored."
      confirm="Delete run"
      keep="Keep it"
      disabled={disabled}
      onConfirm={() => post(`runs/${run.id}/delete`).then(after)}
    />
  );
}

const AGAIN = "All calls of the run, to change and run them";
const NOT_AGAIN = "Only runs of up to 12 calls without Python functions open in the playground";

/** All calls of a small run in the playground. */
export function AgainButton({ run, graph, rows }) {
  const canOpen = canRunAgain(graph);
  const act = () =>
    draftOfRun(run.id, titleOf(run), graph, rows).then(putDraft, (failure) => say(failure.message));
  return (
    <button
      class="btn small"
      type="button"
      disabled={!canOpen}
      title={canOpen ? AGAIN : NOT_AGAIN}
      onClick={act}
    >
      <Icon name="play" />
      Open in the playground
    </button>
  );
}
