"""Wraps a text at words while it is written to a terminal, which would break inside words."""

from rich.cells import cell_len

_TAB = "    "


class WordWrap:
    """Breaks lines at `width` columns. It holds back the last word until the word is complete."""

    def __init__(self, width: int) -> None:
        self._width = max(1, width)
        self._column = 0
        self._spaces = ""
        self._word = ""

    def feed(self, text: str) -> str:
        """Add a chunk. Returns the text that can be written now."""
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
        # The terminal breaks longer words. Chinese and Japanese text may break anywhere.
        is_open = cell_len(char) < 2 and cell_len(self._word) < self._width
        return "" if is_open else self._take_word()

    def _take_word(self) -> str:
        """The word with the spaces before it. If they do not fit, the word on a new line."""
        if not self._word:
            return ""
        spaces, word = self._spaces, self._word
        self._spaces = self._word = ""
        if self._column and spaces and self._column + cell_len(spaces + word) > self._width:
            self._column, spaces = 0, "\n"
        columns = cell_len(word) + (0 if spaces == "\n" else len(spaces))
        self._column = (self._column + columns - 1) % self._width + 1
        return spaces + word
