"""Chat templates: the constant markup around the turns of a conversation.

A model's template is rendered with unguessable sentinels in the place of the messages, and split at
them. Real messages never pass through the template, so no text in them
can act as template code or as markup."""

import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import islice
from typing import Any, NoReturn

from jinja2 import TemplateError

from parrot.protocol.errors import InvalidRequest
from parrot.serve.prompts.template_sandbox import MAX_CHARS, MAX_TEMPLATE, TemplateSandbox

_PARTS = 64  # of a text that are made between two looks at its length
_NUM_RENDERED = 16  # turns; the markup of later turns is that of the sixteenth
# Marks for training that some templates have; they print nothing.
_GENERATION_MARK = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_SYSTEM_SOMEWHERE = (
    ("system", "system", "user"),
    ("user", "system"),
    ("system", "user", "assistant", "system", "user"),
)


class ChatTemplate:
    """`bos` and `eos`: the text of these tokens, "" if the model has none.

    Each turn has the markup with which its answer is generated, and keeps it when the chat goes on:
    the KV of earlier turns stays valid, whatever the template does to turns that are not the last
    (some move the system message to the last turn)."""

    def __init__(self, template: str, bos: str = "", eos: str = "") -> None:
        if len(template) > MAX_TEMPLATE:
            raise InvalidRequest("the model's chat template is too long")
        environment = TemplateSandbox()
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(_GENERATION_MARK.sub("", template))
        except Exception as error:  # noqa: BLE001 - nested deeply, it fails in Python's own parser
            raise InvalidRequest(f"the model's chat template is broken: {error!s:.500}") from None
        self._budget = environment.budget
        self.source = template
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._openings: dict[bool, tuple[str, ...]] = {}  # by whether there is a system message
        self._later: list[tuple[str, str]] = []  # around the second user's message, the third's, ..

    def markup(self, num_turns: int, *, has_system: bool = False) -> tuple[str, ...]:
        """The texts between which the messages stand; generation follows the last:

            m[0] system m[1] user_0 m[2] assistant_0 m[3] user_1 m[4] ... user_last m[-1]

        or without `m[0] system`. Raises `InvalidRequest` if the template does not simply put the
        messages one after the other, or has no system message."""
        if has_system not in self._openings:
            self._openings[has_system] = self._render(1, has_system)
        while len(self._later) < min(num_turns, _NUM_RENDERED) - 1:
            before, after = self._render(len(self._later) + 2)[-2:]
            self._later.append((before, after))
        parts = list(self._openings[has_system])
        for turn in range(num_turns - 1):
            parts += self._later[min(turn, _NUM_RENDERED - 2)]
        return tuple(parts)

    @cached_property
    def strips(self) -> bool:
        """The template strips white space at the edges of the user's messages."""
        content = f"\v{sentinel()}\v"  # no template has vertical tabs of its own
        return content not in self.render([_message("user", content)])

    @cached_property
    def takes_system_anywhere(self) -> bool:
        """The template shows system messages wherever they stand, as messages of their own."""
        try:
            for roles in _SYSTEM_SOMEWHERE:
                marks = [sentinel() for _ in roles]
                _split(self.render(list(map(_message, roles, marks))), marks)
        except InvalidRequest:
            return False
        return True

    def _render(self, num_turns: int, has_system: bool = False) -> tuple[str, ...]:
        roles = ["system"] * has_system + (["user", "assistant"] * num_turns)[:-1]
        marks = [sentinel() for _ in roles]
        return tuple(_split(self.render(list(map(_message, roles, marks))), marks))

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt behind which the next answer is generated. `options` are the template's
        further variables: `tools`, `enable_thinking` and the like. Raises `InvalidRequest`."""
        self._budget.renew(len(messages))
        parts: list[str] = []
        num_chars = 0
        try:
            made = self._template.generate(
                **options, messages=messages, add_generation_prompt=True, **self._tokens
            )
            while some := list(islice(made, _PARTS)):
                parts += some
                num_chars += sum(map(len, some))
                if num_chars > MAX_CHARS:
                    raise TemplateError("it makes too long a text")
            text = "".join(parts)
            text.encode()  # half a character (`'\ud800'`) is none that an engine could be sent
        except Exception as error:  # noqa: BLE001 - it may divide by zero, call itself, and so on
            raise InvalidRequest(
                f"the model's chat template failed: {str(error) or type(error).__name__:.500}",
                param="chat",
            ) from None
        return text


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def sentinel() -> str:
    """A text that nobody can guess."""
    return f"m{secrets.token_hex(16)}m"


def _split(text: str, sentinels: list[str]) -> list[str]:
    parts: list[str] = []
    for sentinel in sentinels:
        before, found, text = text.partition(sentinel)
        if not found or sentinel in text:
            raise InvalidRequest(
                "the model's chat template does not show every message once, in order", param="chat"
            )
        parts.append(before)
    return [*parts, text]


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


PLAIN_CHAT = ChatTemplate(
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content + '\n\n' }}"
    "{% else %}{{ m.role | capitalize + ': ' + m.content + '\n\n' }}{% endif %}"
    "{% endfor %}Assistant:"
)
"""A conversation as text, for engines that take text and know no roles."""
