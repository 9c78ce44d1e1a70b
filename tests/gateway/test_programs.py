"""A prompt continues the turn whose text is its prefix, even if that prompt was not kept."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.gateway import programs as endings
from parrot.gateway.programs import Endings, ShownPrompt

SCOPE = {"tenant": "t", "model": "m", "options": {}}
Json = dict[str, Any]


def rendered(messages: list[Json], note: str = "") -> ShownPrompt:
    text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
    return ShownPrompt(messages, {}, f"{note}{text}<assistant>")


def said(role: str, text: str) -> Json:
    return {"role": role, "content": text}


class Conversations:
    """Programs with finished turns, some of whose prompts are still kept."""

    def __init__(self) -> None:
        self.endings = Endings()
        self.kept: list[ShownPrompt] = []
        self.num_turns = 0

    def turn(self, messages: list[Json], answer: str, *, is_kept: bool) -> int | None:
        """Add a turn, and return the number of the turn that it continues, if any."""
        prompt = rendered(messages)
        if is_kept:
            self.kept.append(prompt)
        place = self.endings.find(prompt, SCOPE, lambda _: True)
        completion: Any = SimpleNamespace(output=SimpleNamespace(text=answer))
        session: Any = SimpleNamespace(id=self.num_turns, log=None)
        self.endings.put(place, session, completion, said("assistant", answer))
        self.num_turns += 1
        if place.ending is None:
            assert not place.num_known
            return None
        assert place.num_known % 2 == 0
        return place.ending.session_id


TURNS = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from("ab"), st.sampled_from("xyé"), st.booleans()),
    max_size=25,
)


@given(TURNS)
def test_the_longest_known_prefix_is_found(turns: list[tuple[int, str, str, bool]]) -> None:
    """Each turn continues an earlier one, or starts a conversation."""
    here = Conversations()
    histories: list[list[Json]] = [[]]
    ended: dict[str, int] = {}
    for before, question, answer, is_kept in turns:
        history = histories[before % len(histories)]
        messages = [*history, said("user", question)]
        expected = ended.get(str(history)) if history else None
        assert here.turn(messages, answer, is_kept=is_kept) == expected
        histories.append([*messages, said("assistant", answer)])
        ended[str(histories[-1])] = here.num_turns - 1


@given(st.booleans())
def test_a_text_that_is_rendered_differently_is_not_continued(is_kept: bool) -> None:
    """Equal keys are not enough, because a template may render the same messages differently."""
    here = Conversations()
    first = [said("user", "a")]
    here.turn(first, "x", is_kept=is_kept)
    more = [*first, said("assistant", "x"), said("user", "b")]
    place = here.endings.find(rendered(more, "Today is Monday. "), SCOPE, lambda _: True)
    assert place.ending is None
    shorter = ShownPrompt(more, {}, "<user>a<assistant>")  # without the answer
    assert here.endings.find(shorter, SCOPE, lambda _: True).ending is None
    found = here.endings.find(rendered(more), SCOPE, lambda _: True)
    assert (found.ending is not None, found.num_known) == (True, 2)


def test_a_session_that_has_ended_and_another_scope_are_not_found() -> None:
    here = Conversations()
    messages = [said("user", "a")]
    for answer in ("x", "y"):
        here.turn(messages, answer, is_kept=False)
        messages = [*messages, said("assistant", answer), said("user", "b")]
    prompt = rendered(messages)
    first = here.endings.find(prompt, SCOPE, lambda session_id: session_id == 0)
    assert first.ending is not None
    assert (first.ending.session_id, first.num_known) == (0, 2)
    other = SCOPE | {"tenant": "u"}
    assert here.endings.find(prompt, other, lambda _: True).ending is None


def test_nothing_is_kept_of_an_ended_session() -> None:
    """Long conversations have megabytes, and sessions end often."""
    here = Conversations()
    messages = [said("user", "a")]
    for answer in ("x", "y", "x"):
        here.turn(messages, answer, is_kept=False)
    for session_id in range(here.num_turns):
        here.endings.forget(session_id)
        here.endings.forget(session_id)
    assert not here.endings._endings
    assert not here.endings._of_sessions


def test_the_most_recently_used_endings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "_MAX_ENDINGS", 2)
    here = Conversations()
    for text in "abc":
        here.turn([said("user", text)], "x", is_kept=False)
    assert len(here.endings._endings) == 2
    assert here.endings._of_sessions.keys() == {1, 2}
