"""Which turn a prompt continues: the one with whose text, answer included, it begins.

    messages   |-- hashed at once: all up to the last answer --|-- the rest --|
    text       |-- what the turn before it had, answer included --|-- the rest --|

Turns are looked up by the messages that their programs sent, and told by their texts: chat
templates do not show all that a message says. A hash goes on where that of the turn before ended,
so of a long conversation only the new messages are hashed as text."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import orjson

from parrot.gateway.conversations.doctor import Prompt
from parrot.gateway.prompts.transcript import Message
from parrot.serve.graph.nodes import Completion, TextPiece
from parrot.serve.sessions import Session
from parrot.utils.heaps import LruDict

if TYPE_CHECKING:
    from hashlib import _Hash

ENDING = "ending"
"""The kind of a record that tells where a turn of a session can be continued."""

_MAX_ENDINGS = 65_536  # turns that can be continued


class Ending(NamedTuple):
    """Where a turn ended, after `length` characters: `told` is the hash of them, answer included.
    `prompt` gives the turn's, as long as it is kept."""

    session_id: int
    completion: Completion
    length: int
    told: "_Hash"
    prompt: Callable[[], Prompt | None]

    def begins(self, text: str) -> bool:
        """Whether the text begins with all of the turn's."""
        prompt = self.prompt()
        if prompt is not None:
            answer = self.completion.output.text
            return text.startswith(prompt.text) and text.startswith(answer, len(prompt.text))
        return _told(text[: self.length]).digest() == self.told.digest()


class Place:
    """Where a prompt ends in its conversation: behind all of its `messages`, of which the first
    `num_known` are a turn that ended in `ending`, if it continues one."""

    def __init__(
        self, prompt: Prompt, messages: "_Hash", ending: Ending | None, num_known: int
    ) -> None:
        self.prompt = prompt
        self.messages = messages
        self.ending = ending
        self.num_known = num_known

    def told(self) -> "_Hash":
        """The hash of the prompt's text."""
        if self.ending is None:
            return _told(self.prompt.text)
        told = self.ending.told.copy()
        told.update(_encoded(self.prompt.text[self.ending.length :]))
        return told


class Endings:
    """The endings of turns of live sessions, the most recently used ones up to a bound."""

    def __init__(self) -> None:
        self._endings: LruDict[bytes, Ending] = LruDict()
        self._of_sessions: dict[int, set[bytes]] = {}

    def put(self, place: Place, session: Session, completion: Completion, message: Message) -> None:
        """One answer of the turn at `place` is done, for which its program will send `message`."""
        told, answer = place.told(), completion.output.text
        told.update(_encoded(answer))
        length = len(place.prompt.text) + len(answer)
        messages = place.messages.copy()
        _extend(messages, [message])
        key = messages.digest()
        self._keep(key, Ending(session.id, completion, length, told, ref(place.prompt)))
        if session.log is not None:
            ids = {"request": completion.request_id, "task": completion.id}
            session.log.note(ENDING, {"key": key.hex(), **ids})

    def restore(self, session: Session, fields: Mapping[str, Any]) -> None:
        """Remember what a record of the session tells."""
        completion = session.graph.completion(fields["request"], fields["task"])
        text = _text_of(completion)
        ending = Ending(session.id, completion, len(text), _told(text), lambda: None)
        self._keep(bytes.fromhex(fields["key"]), ending)

    def forget(self, session_id: int) -> None:
        """The session has ended: nothing of its texts is kept."""
        for key in self._of_sessions.pop(session_id, ()):
            self._endings.pop(key)

    def _keep(self, key: bytes, ending: Ending) -> None:
        self._drop(key)
        self._endings.put(key, ending)
        self._of_sessions.setdefault(ending.session_id, set()).add(key)
        if len(self._endings) > _MAX_ENDINGS and (oldest := self._endings.oldest()) is not None:
            self._drop(oldest[0])

    def _drop(self, key: bytes) -> None:
        if (ending := self._endings.pop(key)) is not None:
            keys = self._of_sessions[ending.session_id]
            keys.remove(key)
            if not keys:
                del self._of_sessions[ending.session_id]

    def find(
        self, prompt: Prompt, scope: Mapping[str, Any], is_live: Callable[[int], bool]
    ) -> Place:
        """Where the prompt ends, behind the longest known beginning of it whose session is live.
        `scope`: what else has to be equal for two prompts to be."""
        history = _History(prompt.messages, scope)
        for num_messages, key in history.beginnings():
            ending = self._endings.get(key)
            if ending is None or not is_live(ending.session_id):
                continue
            if ending.begins(prompt.text):
                return Place(prompt, history.whole(), ending, num_messages)
        return Place(prompt, history.whole(), None, 0)


class _History:
    """The keys of a prompt's messages: hashes of all from the first to some answer."""

    def __init__(self, messages: Sequence[Message], scope: Mapping[str, Any]) -> None:
        self._messages = messages
        self._scope = hashlib.sha256(orjson.dumps(scope, option=orjson.OPT_SORT_KEYS))
        self._num_hashed = 0
        for i in range(len(messages), 0, -1):
            if _is_answer(messages[i - 1]):
                self._num_hashed = i
                break
        self._hash = self._scope.copy()  # of so many
        _extend(self._hash, messages[: self._num_hashed])

    def whole(self) -> "_Hash":
        whole = self._hash.copy()
        _extend(whole, self._messages[self._num_hashed :])
        return whole

    def beginnings(self) -> Iterator[tuple[int, bytes]]:
        """How many messages there are up to each answer, and their key, the last answer first.
        Conversations that were cut or have forked look at more than one."""
        if not self._num_hashed:
            return
        yield self._num_hashed, self._hash.digest()
        key, keys = self._scope.copy(), []
        for i, message in enumerate(self._messages[: self._num_hashed - 1]):
            _extend(key, [message])
            if _is_answer(message):
                keys.append((i + 1, key.digest()))
        yield from reversed(keys)


def _is_answer(message: Message) -> bool:
    return message.get("role") == "assistant"


def _extend(key: "_Hash", messages: Sequence[Message]) -> None:
    """The same for all of them at once as for one after the other."""
    if messages:
        written = orjson.dumps(messages, option=orjson.OPT_SORT_KEYS)  # [...]
        key.update(b",")
        key.update(memoryview(written)[1:-1])


def _text_of(completion: Completion) -> str:
    """All of a turn, answer included."""
    parts: list[str] = []
    turn: Completion | None = completion
    while turn is not None:
        parts.append(turn.output.text)
        parts += [piece.text for piece in reversed(turn.fill) if isinstance(piece, TextPiece)]
        turn = turn.previous
    return "".join(reversed(parts))


def _told(text: str) -> "_Hash":
    return hashlib.sha256(_encoded(text))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
