"""Chat templates: the constant markup around the turns of a conversation.

A model's template is rendered once per number of turns, with unguessable sentinels in the place of
the messages, and split at them. Real messages never pass through the template, so no text in them
can act as template code or as markup."""

import json
import re
import secrets
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from parrot.protocol.errors import InvalidRequest

_MAX_TURNS_CACHED = 256
# Marks for training that some templates have; they print nothing.
_GENERATION_MARK = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


class ChatTemplate:
    """`bos` and `eos`: the text of these tokens, "" if the model has none."""

    def __init__(self, template: str, bos: str = "", eos: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(_GENERATION_MARK.sub("", template))
        except TemplateError as error:
            raise InvalidRequest(f"the model's chat template is broken: {error}") from None
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._markups: dict[int, tuple[str, ...]] = {}

    def markup(self, num_turns: int) -> tuple[str, ...]:
        """The 2 * `num_turns` texts between which the messages stand:

            m[0] user_0 m[1] assistant_0 m[2] user_1 m[3] ... user_last m[-1]

        Generation follows the last. Raises `InvalidRequest` if the template does not simply put the
        messages one after the other."""
        known = self._markups.get(num_turns)
        if known is None:
            known = self._render(num_turns)
            if len(self._markups) < _MAX_TURNS_CACHED:
                self._markups[num_turns] = known
        return known

    def _render(self, num_turns: int) -> tuple[str, ...]:
        sentinels = [f"m{secrets.token_hex(16)}m" for _ in range(2 * num_turns - 1)]
        messages = [
            {"role": "assistant" if i % 2 else "user", "content": sentinel}
            for i, sentinel in enumerate(sentinels)
        ]
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=True, **self._tokens
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the model's chat template failed: {error}", param="chat") from (
                None
            )
        return tuple(_split(text, sentinels))


def _split(text: str, sentinels: list[str]) -> list[str]:
    parts: list[str] = []
    for sentinel in sentinels:
        before, found, text = text.partition(sentinel)
        if not found or sentinel in text:
            raise InvalidRequest(
                "the model's chat template does not show every message once", param="chat"
            )
        parts.append(before)
    return [*parts, text]


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
