"""Compute the values of random programs sequentially and without a service.

This is possible because the output of a `sim` engine is a pure function of the prompt."""

import zlib
from array import array
from dataclasses import dataclass
from typing import Any

from parrot.engine.sim import token_after


@dataclass(frozen=True)
class Place:
    """A part of a prompt that is the value of a variable."""

    var_id: str


@dataclass(frozen=True)
class Output:
    """The output of a call: a function of the whole prompt before it, and of its length."""

    prompt: tuple[str | Place, ...]
    length: int


@dataclass(frozen=True)
class Joined:
    first: Place
    second: Place


class Reference:
    """Computes values from the submitted calls and the values that programs have set."""

    def __init__(self) -> None:
        self.rules: dict[str, str | Output | Joined] = {}
        self._values: dict[str, str] = {}

    def value(self, var_id: str) -> str:
        if var_id not in self._values:
            self._values[var_id] = self._compute(self.rules[var_id])
        return self._values[var_id]

    def needs(self, var_id: str) -> set[str]:
        """Return all variables that the variable depends on, including itself."""
        found, stack = {var_id}, [var_id]
        while stack:
            rule = self.rules.get(stack.pop())
            places = rule.prompt if isinstance(rule, Output) else ()
            if isinstance(rule, Joined):
                places = (rule.first, rule.second)
            for place in places:
                if isinstance(place, Place) and place.var_id not in found:
                    found.add(place.var_id)
                    stack.append(place.var_id)
        return found

    def _compute(self, rule: str | Output | Joined) -> str:
        if isinstance(rule, str):
            return rule
        if isinstance(rule, Joined):
            return f"{self._text(rule.first)}+{self._text(rule.second)}".upper()[-30:]
        prompt = "".join(self._text(piece) for piece in rule.prompt)
        checksum = zlib.crc32(array("i", list(prompt.encode())))
        output = bytearray()
        for _ in range(rule.length):
            output.append(token_after(checksum))
            checksum = zlib.crc32(array("i", [output[-1]]), checksum)
        return output.decode()

    def _text(self, piece: str | Place) -> str:
        return piece if isinstance(piece, str) else self.value(piece.var_id)


@dataclass(frozen=True)
class CallPlan:
    """A call without its session and its output variables."""

    pieces: tuple[str | Place, ...]
    lengths: tuple[int, ...]
    sampling: dict[str, Any]
    options: dict[str, Any]

    @property
    def is_constant(self) -> bool:
        """Whether the call has the same result in every session."""
        has_places = any(isinstance(piece, Place) for piece in self.pieces)
        return not has_places and self.options["successor_of"] is None

    def template(self, premade: str | None) -> tuple[str, list[dict[str, Any]]]:
        """Return the template and its parameters. `premade` is the variable of the first output."""
        text, parameters = "", []
        for piece in self.pieces:
            if isinstance(piece, Place):
                name = f"i{len(parameters)}"
                text += f"{{{{{name}}}}}"
                parameters.append({"name": name, "var_id": piece.var_id})
            else:
                text += piece
        for number, length in enumerate(self.lengths):
            text += f" then {{{{o{number}}}}}"
            parameters.append(
                {
                    "name": f"o{number}",
                    "is_output": True,
                    "var_id": None if number else premade,
                    "sampling_config": self.sampling | {"max_gen_length": length},
                }
            )
        return text + " end.", parameters
