"""Steps with drafts in the engine core: number of steps, memory and ends of outputs."""

from typing import Any

import pytest

from parrot.engine.core.output import Detokenizer
from parrot.engine.core.steps import LaunchedStep, StepPlan
from parrot.protocol.engine_api import DraftSources, FinishReason
from parrot.protocol.errors import Cancelled, InvalidRequest
from tests.engine.core.test_overlap import Overlapping
from tests.support.core_harness import Harness, piece

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
SIZES = (2, 4, 8, 16, 32)
NOWHERE = DraftSources(in_context=False)


def text(of: str, *, in_context: bool = True) -> DraftSources:
    return DraftSources(texts=(list(of.encode()),), in_context=in_context)


def harness(kind: type[Harness] = Harness, **options: Any) -> Harness:
    return kind(**{"num_blocks": 60, "max_seq_len": 200, "draft_sizes": SIZES} | options)


def run(engine: Harness) -> int:
    """Run steps like a driver. Returns the number of plans."""
    for _ in range(200):
        engine.core.wait_until_due()
        if not engine.step():
            return len(engine.runner.plans)
    raise AssertionError("the requests did not finish")


@pytest.mark.parametrize("kind", [Harness, Overlapping])
def test_repeated_text_takes_few_steps(kind: type[Harness]) -> None:
    engine = harness(kind)
    answer = engine.generate(piece(1, ALPHABET + "abc"), length=20)
    assert run(engine) <= 5
    assert answer.text == ALPHABET[3:23]
    usage = answer.response.usage
    assert usage.accepted_tokens == usage.drafted_tokens > 14


def test_text_is_rendered_after_the_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU waits for the launch after drafts. Streams get the same chunks."""
    engine = harness(Overlapping, scheduler={"max_draft_tokens": 5})
    events: list[str] = []
    launch, render = engine.runner.launch, Detokenizer.push

    def launched(plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep | None:
        events.append("launch")
        return launch(plan, previous)

    def rendered(detokenizer: Detokenizer, token_id: int) -> str:
        events.append("text")
        return render(detokenizer, token_id)

    monkeypatch.setattr(engine.runner, "launch", launched)
    monkeypatch.setattr(Detokenizer, "push", rendered)
    answer = engine.generate(piece(1, ALPHABET + "abc"), length=20, stream=True)
    run(engine)
    assert "".join(chunk.text for chunk in answer.chunks) == answer.text == ALPHABET[3:23]
    assert answer.response.usage.accepted_tokens > 10
    assert [len(plan.sequences[0].token_ids) for plan in engine.runner.plans] == [29, 1, 7, 7, 4]
    made = "".join(event[0] for event in events).split("l")
    # The text of the third step's 7 tokens is rendered after the launch of the fourth step.
    assert [len(texts) for texts in made] == [0, 0, 1, 1, 7, 7 + 4]


@pytest.mark.parametrize(
    ("fields", "reason", "ids"),
    [
        ({"stop_str": "fg"}, FinishReason.STOP, "defg"),
        ({"stop_token_ids": [ord("h")]}, FinishReason.STOP, "defgh"),
        ({"length": 6}, FinishReason.LENGTH, "defghi"),
    ],
)
@pytest.mark.parametrize("kind", [Harness, Overlapping])
def test_an_output_ends_inside_a_draft_at_the_same_token(
    kind: type[Harness], fields: dict[str, Any], reason: FinishReason, ids: str
) -> None:
    engine = harness(kind)
    answer = engine.generate(piece(1, ALPHABET + "abc"), **{"length": 20} | fields)
    run(engine)
    assert bytes(answer.response.generated_ids).decode() == ids
    assert answer.response.finish_reason is reason
    context = engine.context(1)
    assert context is not None
    assert context.num_missing == 1
    # The context is complete, so later tokens are computed from its end.
    more = engine.generate(piece(1), length=2)
    run(engine)
    assert more.response.generated_ids == [ord(c) for c in ALPHABET][ALPHABET.index(ids[-1]) :][1:3]


def test_wrong_drafts_do_not_change_the_output() -> None:
    engine = harness()
    answer = engine.generate(piece(1, "xabc"), length=12, drafts=text("abcdeXXXghiYYYjk" * 2))
    run(engine)
    assert answer.text == ALPHABET[3:15]
    usage = answer.response.usage
    assert 0 < usage.accepted_tokens < usage.drafted_tokens


def test_a_request_can_turn_drafts_off() -> None:
    engine = harness()
    answer = engine.generate(piece(1, ALPHABET + "abc"), length=9, drafts=NOWHERE)
    assert run(engine) == 9
    assert answer.response.usage.drafted_tokens == 0


def test_outputs_with_log_probabilities_are_not_drafted() -> None:
    engine = harness()
    engine.generate(piece(1, ALPHABET + "abc"), length=9, logprobs=1)
    assert run(engine) == 9


def test_batches_without_drafts_are_launched_ahead() -> None:
    counts = []
    for sizes in ((), SIZES):
        engine = Overlapping(num_blocks=60, max_seq_len=200, draft_sizes=sizes)
        for number in (1, 2):
            engine.generate(piece(number, "ab"), length=12, drafts=NOWHERE)
        run(engine)
        counts.append((engine.launching.num_ahead, len(engine.runner.plans)))
    assert counts[0] == counts[1]


def test_a_draft_uses_free_blocks_only() -> None:
    """Eight blocks: seven for the prompt, and one for the output."""
    engine = harness(num_blocks=8, max_seq_len=32)
    answer = engine.generate(piece(1, ALPHABET + "abc"), length=3)
    run(engine)
    assert answer.text == "def"
    engine.free(1)
    engine.core.check_integrity()
    assert engine.num_free == 8


def test_an_abort_while_drafts_are_verified_and_a_fork_of_the_rest() -> None:
    engine = harness(Overlapping)
    answer = engine.generate(piece(1, ALPHABET + "abc"), length=30)
    for _ in range(20):
        engine.core.wait_until_due()
        engine.step()
        flight = engine.core._in_flight
        if flight is not None and flight.step.num_drafts:
            break
    else:
        raise AssertionError("nothing was drafted")
    engine.core.requests.abort(1)
    engine.deliver()
    assert isinstance(answer.error, Cancelled)
    fork = engine.generate(piece(2, "xyz", parent=1), length=4)
    run(engine)
    assert fork.text == "abcd"


def test_a_draft_has_tokens_of_the_vocabulary_only() -> None:
    engine = harness()
    drafts = DraftSources(texts=([1, 2], [10**6]))
    answer = engine.generate(piece(1, "abc"), length=2, drafts=drafts)
    assert isinstance(answer.error, InvalidRequest)
    assert answer.error.param == "drafts"
    with pytest.raises(ValueError, match="more than 131072 tokens"):
        DraftSources(texts=([1] * 100_000, [2] * 100_000))
