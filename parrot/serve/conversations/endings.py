"""Which turn a prompt continues: the one with whose text, answer included, it begins."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from parrot.serve.conversations.turn import Turn, TurnRequest
from parrot.serve.graph.nodes import Completion
from parrot.serve.prompts.transcript import Message
from parrot.utils.heaps import LruDict

_MAX_ENDINGS = 65_536  # turns that can be continued


class Ending(NamedTuple):
    """Where a turn ended: the digest of all its `length` characters, answer included."""

    session_id: int
    completion: Completion
    length: int
    digest: bytes


class Endings:
    """Turns are looked up by the messages that their programs sent, and told by their texts: chat
    templates do not show all that a message says."""

    def __init__(self) -> None:
        self._endings: LruDict[bytes, Ending] = LruDict(_MAX_ENDINGS)

    def put(self, turn: Turn, completion: Completion, message: Message) -> None:
        """One answer of the turn is done, for which its program will send `message`."""
        assert turn.history is not None, turn
        text = turn.text + completion.output.text
        ending = Ending(turn.session.id, completion, len(text), _digest(text))
        self._endings.put(_extend(turn.history, message), ending)

    def find(
        self, keys: Sequence[bytes], text: str, is_live: Callable[[int], bool]
    ) -> tuple[Ending, int] | None:
        """Where the longest known beginning of `text` ended, if its session is live, and after how
        many messages; `keys` are its history keys."""
        for num_messages in range(len(keys) - 1, -1, -1):
            ending = self._endings.get(keys[num_messages])
            if ending is None or not is_live(ending.session_id):
                continue
            if _digest(text[: ending.length]) == ending.digest:
                return ending, num_messages
        return None


def history_keys(request: TurnRequest) -> list[bytes]:
    """A key for the prompt up to each of its messages, and before the first."""
    assert not isinstance(request.prompt, str), "a plain prompt has no messages"
    begin = {"tenant": request.tenant, "model": request.model, "options": request.options}
    key = _extend(b"", begin)
    return [key, *[key := _extend(key, message) for message in request.prompt]]


def _extend(key: bytes, message: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(key + orjson.dumps(message, option=orjson.OPT_SORT_KEYS)).digest()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
