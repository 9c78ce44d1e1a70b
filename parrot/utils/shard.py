"""Which of several ServeCores has a session or a response: their ids tell."""

from dataclasses import dataclass

MAX_SHARDS = 64


class ElsewhereError(Exception):
    """Another shard has what is asked for. `may_stay`: one of these had better have it, an earlier
    one rather than a later one, but need not."""

    def __init__(self, *shards: int, may_stay: bool = False) -> None:
        super().__init__(f"shard {shards[0]} has it")
        self.shards = shards
        self.may_stay = may_stay


@dataclass(frozen=True, slots=True)
class Shard:
    """This ServeCore among `count`. Ids of its sessions leave the remainder `index` when divided by
    `MAX_SHARDS`; tokens that it makes end with its mark. One that is alone makes and knows no such
    ids and marks."""

    index: int = 0
    count: int = 1

    @property
    def mark(self) -> str:
        """The end of its tokens."""
        return f".{self.index}" if self.count > 1 else ""

    @property
    def step(self) -> int:
        """Between two of its session ids."""
        return MAX_SHARDS if self.count > 1 else 1

    def aligned(self, number: int) -> int:
        """The first of its session ids that is not below `number`."""
        return number + (self.index - number) % self.step

    def require_session(self, session_id: int) -> None:
        """Raises `ElsewhereError`."""
        self._require(session_id % MAX_SHARDS)

    def require_token(self, token: str) -> None:
        """Raises `ElsewhereError` if it has another's mark."""
        mark = token.rpartition(".")[2]
        if mark.isascii() and mark.isdecimal() and len(mark) <= 2:
            self._require(int(mark))

    def _require(self, index: int) -> None:
        if index != self.index and index < self.count:
            raise ElsewhereError(index)


ALONE = Shard()
