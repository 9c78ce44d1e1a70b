"""Wrapping a text at words while it is written, for a terminal that would cut them."""

from rich.cells import cell_len

_TAB = "    "


class WordWrap:
    """Breaks lines of at most `width` columns. It holds back the last word until that is whole."""

    def __init__(self, width: int) -> None:
        self._width = max(1, width)
        self._column = 0
        self._spaces = ""
        self._word = ""

    def feed(self, text: str) -> str:
        """The text that can be written now."""
        return "".join(map(self._next, text.replace("\t", _TAB)))

    def end(self) -> str:
        """The text that was held back."""
        return self._take_word()

    def _next(self, char: str) -> str:
        if char == "\n":
            written = self._take_word() + "\n"
            self._column, self._spaces = 0, ""
            return written
        if char == " ":
            written = self._take_word()
            self._spaces += char
            return written
        self._word += char
        # A longer word is broken by the terminal. Chinese and Japanese may break anywhere.
        is_open = cell_len(char) < 2 and cell_len(self._word) < self._width
        return "" if is_open else self._take_word()

    def _take_word(self) -> str:
        """The word with the spaces before it, or on the next line where they do not fit."""
        if not self._word:
            return ""
        spaces, word = self._spaces, self._word
        self._spaces = self._word = ""
        if self._column and spaces and self._column + cell_len(spaces + word) > self._width:
            self._column, spaces = 0, "\n"
        columns = cell_len(word) + (0 if spaces == "\n" else len(spaces))
        self._column = (self._column + columns - 1) % self._width + 1
        return spaces + word
