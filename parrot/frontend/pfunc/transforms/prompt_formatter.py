"""Formatters clean up the constants of a template and change nothing else."""

import re
from abc import abstractmethod

from parrot.frontend.pfunc.function import SemanticFunction
from parrot.frontend.pfunc.function_body import Constant
from parrot.frontend.pfunc.transforms import FuncMutator, Sequential

_INDENT = re.compile(r"(^|(?<=\n))(?: {4})+")
_SPACES = re.compile(r" {2,}")


class PromptFormatter(FuncMutator):
    """Formats each constant separately. `at_line_start` is True only for a constant at the start of
    the template. All other constants follow a placeholder."""

    @abstractmethod
    def format(self, text: str, at_line_start: bool) -> str: ...

    def transform(self, func: SemanticFunction) -> SemanticFunction:
        texts = (
            self.format(piece.text, piece.idx == 0) if isinstance(piece, Constant) else piece.text
            for piece in func.body
        )
        return func.with_template("".join(texts))


class PyIndentRemover(PromptFormatter):
    """Removes the indentation of a docstring: tabs, and groups of four spaces at line starts."""

    def format(self, text: str, at_line_start: bool) -> str:
        text = text.replace("\t", "")
        if at_line_start:
            return _INDENT.sub("", text)
        first, newline, rest = text.partition("\n")
        return first + newline + _INDENT.sub("", rest) if newline else first


class SquashIntoOneLine(PromptFormatter):
    """Replaces newlines with spaces."""

    def format(self, text: str, at_line_start: bool) -> str:
        return text.replace("\n", " ")


class AlwaysOneSpace(PromptFormatter):
    """Replaces several spaces with one."""

    def format(self, text: str, at_line_start: bool) -> str:
        return _SPACES.sub(" ", text)


standard_formatter = Sequential([PyIndentRemover(), SquashIntoOneLine(), AlwaysOneSpace()])

allowing_newline = Sequential([PyIndentRemover(), AlwaysOneSpace()])
