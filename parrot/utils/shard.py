"""Shards: several ServeCores, each with its own sessions and responses. Ids contain the shard."""

from dataclasses import dataclass

MAX_SHARDS = 64


class ElsewhereError(Exception):
    """Another shard must answer the request.

    `may_stay`: the shards are preferred, in this order, but this shard may also answer."""

    def __init__(self, *shards: int, may_stay: bool = False) -> None:
        super().__init__(f"this belongs to shard {shards[0]}")
        self.shards = shards
        self.may_stay = may_stay


@dataclass(frozen=True, slots=True)
class Shard:
    """This ServeCore's index among `count` shards. Its session ids are congruent to `index` modulo
    `MAX_SHARDS`, and its tokens end with `mark`. A single ServeCore uses all ids and no mark."""

    index: int = 0
    count: int = 1

    @property
    def mark(self) -> str:
        """The suffix of this shard's tokens."""
        return f".{self.index}" if self.count > 1 else ""

    @property
    def step(self) -> int:
        """The difference between two consecutive session ids of this shard."""
        return MAX_SHARDS if self.count > 1 else 1

    def aligned(self, number: int) -> int:
        """The smallest session id of this shard that is at least `number`."""
        return number + (self.index - number) % self.step

    def require_session(self, session_id: int) -> None:
        """Raises `ElsewhereError` if another shard has the session."""
        self._require(session_id % MAX_SHARDS)

    def require_token(self, token: str) -> None:
        """Raises `ElsewhereError` if the token has another shard's mark."""
        mark = token.rpartition(".")[2]
        if mark.isascii() and mark.isdecimal() and len(mark) <= 2:
            self._require(int(mark))

    def _require(self, index: int) -> None:
        if index != self.index and index < self.count:
            raise ElsewhereError(index)


ALONE = Shard()
