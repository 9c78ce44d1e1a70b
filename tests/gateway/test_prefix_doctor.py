"""Where and why a prompt of a program differs from its previous prompt."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.gateway.programs import ShownPrompt, diagnose


def prompt(*texts: str, system: str = "You are a parrot.", **options: Any) -> ShownPrompt:
    roles = ["user", "assistant"] * len(texts)
    spoken = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    messages = [{"role": "system", "content": system}, *spoken]
    shown = "".join(f"<{m['role']}>{m['content']}" for m in messages)
    return ShownPrompt(messages, options, f"{options.get('tools', '')}{shown}")


LOOK = {"function": {"name": "look"}}
FLY = {"function": {"name": "fly"}}


@pytest.mark.parametrize(
    ("earlier", "later", "reason", "message"),
    [
        (
            prompt("Hi", system="Now: 2026-11-22 10:00."),
            prompt("Hi", "Yes", "So", system="Now: 2026-11-22 10:01."),
            "date",
            0,
        ),
        (
            prompt("Hi", system="Today is Friday."),
            prompt("Hi", system="Today is Saturday."),
            "date",
            0,
        ),
        (
            prompt("Hi", system="Session 7f3a9c21-88aa. Be brief."),
            prompt("Hi", system="Session 0b1c2d3e-77bb. Be brief."),
            "nonce",
            0,
        ),
        (prompt("Hi", system="Be brief."), prompt("Hi", system="Be rude."), "system_changed", 0),
        (
            prompt("Hi", tools=[LOOK, FLY]),
            prompt("Hi", "Yes", "So", tools=[FLY, LOOK]),
            "tools_reordered",
            None,
        ),
        (prompt("Hi", tools=[LOOK]), prompt("Hi", tools=[FLY]), "tools_changed", None),
        (
            prompt("Read the file.", "I did.", "And?"),
            prompt("Read the summary.", "I did.", "And?"),
            "history_changed",
            1,
        ),
        (prompt("Hi", "Yes", "So"), prompt("Summary: hi"), "history_changed", 1),
        (
            ShownPrompt(prompt("Hi").messages, {}, "[1 Jul] Hi"),
            ShownPrompt(prompt("Hi").messages, {}, "[2 Jul] Hi"),
            "date",
            None,
        ),
        (
            ShownPrompt(prompt("Hi").messages, {}, "a Hi"),
            ShownPrompt(prompt("Hi").messages, {}, "b Hi"),
            "template",
            None,
        ),
    ],
)
def test_reasons(
    earlier: ShownPrompt, later: ShownPrompt, reason: str, message: int | None
) -> None:
    found = diagnose(earlier, later)
    assert (found.reason, found.message) == (reason, message)
    assert reason in str(found)


@given(st.text(max_size=50), st.text(max_size=50), st.sampled_from([1, 65_530, 131_080]))
def test_the_place_is_the_first_difference(one: str, other: str, repeat: int) -> None:
    common = "x" * repeat
    found = diagnose(
        ShownPrompt([], {}, common + "a" + one), ShownPrompt([], {}, common + "b" + other)
    )
    assert found.at == repeat
    assert found.before.startswith("x" * min(repeat, 24) + "a")
