"""Programs that use a vendor's API, which has no sessions: finds each program's session, and the
turn that its prompt continues.

A prompt continues a turn if it starts with the turn's prompt and answer.

    messages   |-- hashed at once: all up to the last answer --|-- the rest --|
    text       |-- the previous turn's prompt and answer --|-- the rest --|

Turns are found by a hash of their messages, and then compared by text, because chat templates omit
parts of messages. The text's hash extends the previous turn's hash. So in a long conversation only
the new messages are hashed as text.

The prefix doctor reports where a program's prompt differs from the previous one, and the likely
reason. A prompt shares KV only up to the first different character. A program that resends its
history with a new date in the system prompt shares nothing."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import ref

import orjson

from parrot.gateway.transcript import Message
from parrot.protocol.errors import QuotaExceeded, SessionGone
from parrot.serve.core import ServeCore
from parrot.serve.events import Events, PrefixBroken
from parrot.serve.graph.nodes import Completion, TextPiece
from parrot.serve.sessions import Session
from parrot.utils.heaps import LruDict

if TYPE_CHECKING:
    from hashlib import _Hash

Reason = Literal[
    "tools_reordered",
    "tools_changed",
    "date",
    "nonce",
    "system_changed",
    "history_changed",
    "template",
]
_MAX_TEXT = 2**26  # Characters of prompts that the doctor keeps. More programs can be compared.
_MAX_ANSWERS = 65_536  # Answers by which the doctor recognizes a program.
_MAX_QUOTED = 8  # Last answers of a prompt that are looked up.
_MIN_ANSWER = 16  # Characters. A shorter answer is ignored, because many programs receive it.
_EXCERPT = 24  # Characters that are reported on each side of a difference.
_CHUNK = 65_536  # Characters that are compared at once.
_MAX_LOSS = 0.1  # Share of the earlier prompt; a larger loss is reported as a broken prefix.
_DATE = re.compile(
    r"\d{4}-\d\d-\d\d|\d{1,2}:\d\d|\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]* \d"
    r"|\d (?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)|\b(?:mon|tues|wednes|thurs|fri|satur"
    r"|sun)day",
    re.IGNORECASE,
)
_NONCE = re.compile(r"(?=[^\d]*\d)[\w-]{6,}")
ENDING = "ending"
"""The kind of a journal record that contains where a turn of a session ended."""
_MAX_ENDINGS = 65_536  # Turns that can be continued. The least recently used are forgotten.
Program = tuple[str, str | None]
"""A tenant, and the name of one of its programs; None if the program has no name."""


class ProgramSessions:
    """Owns the sessions that are created for programs. If the quota allows no new session, idle
    ones are ended, the least recently used first."""

    def __init__(self, core: ServeCore) -> None:
        """When the core ends a session, it must call `forget`."""
        self._core = core
        self._programs: LruDict[int, Program] = LruDict()  # by session id
        self._by_name: dict[Program, int] = {}

    def is_live(self, session_id: int) -> bool:
        return session_id in self._programs

    def use(self, session_id: int) -> Session:
        """A live session; marks it as active now."""
        session = self._core.sessions.find(session_id)
        assert session is not None, session_id
        self._programs.touch(session_id)
        session.last_active = self._core.clock.now()
        return session

    def with_room(
        self,
        tenant: str,
        name: str | None,
        usage: Mapping[str, int],
        known: int | None = None,
        client: str = "",
    ) -> Session:
        """The session of the program with this name, or the session `known`. A new session of
        `client` if neither exists, or if it is full and idle. `usage` is as in `Quota`. Raises
        `QuotaExceeded`."""
        if name is not None:
            known = self._by_name.get((tenant, name))
        if known is not None and self.is_live(known):
            session = self.use(known)
            try:
                session.account.require(**usage)
            except QuotaExceeded:
                if not _is_idle(session):
                    raise
                text = f"session {session.id} has used up its quota"
                self._core.end(session, SessionGone(text))
            else:
                return session
        apps = () if name is None else (name,)
        session = self._core.begin_with_room(
            tenant, apps, usage, on_demand=True, is_program=True, client=client
        )
        self.restore(session)
        return session

    def forget(self, session: Session) -> None:
        """A session has ended; it need not be a program's."""
        program = self._programs.pop(session.id)
        if program is not None and self._by_name.get(program) == session.id:
            del self._by_name[program]

    def check_integrity(self) -> None:
        for session_id in self._programs:
            assert self._core.sessions.find(session_id) is not None, session_id
        for program, session_id in self._by_name.items():
            assert self._programs.peek(session_id) == program, program

    def restore(self, session: Session) -> None:
        """Register the session as a program's."""
        name = session.apps[0] if session.apps else None
        self._programs.put(session.id, (session.tenant, name))
        if name is not None:
            self._by_name[session.tenant, name] = session.id

    def make_room(self, tenant: str, *, only_own: bool) -> bool:
        """See `Attached`. The least recently used session ends."""
        sessions = (self._core.sessions.find(session_id) for session_id in self._programs)
        oldest: Session | None = None
        for session in sessions:
            if session is None or not _is_idle(session):
                continue
            if session.tenant == tenant:
                oldest = session
                break
            if not only_own:
                oldest = oldest or session
        if oldest is None:
            return False
        self._core.end(oldest, SessionGone(f"session {oldest.id} was ended for a newer one"))
        return not (only_own and self._core.sessions.find_owner(oldest.id))


def _is_idle(session: Session) -> bool:
    return not session.graph.activation.num_started


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ShownPrompt:
    """A prompt as the program sent it, and `text`, as the model receives it."""

    messages: Sequence[Message]
    options: Mapping[str, Any]
    text: str


class Ending(NamedTuple):
    """The end of a turn."""

    session_id: int
    completion: Completion
    length: int  # characters of the turn's prompt and answer
    text_hash: "_Hash"  # the hash of these characters
    prompt: Callable[[], ShownPrompt | None]  # the turn's prompt while it is in memory

    def begins(self, text: str) -> bool:
        """Whether the text starts with the turn's prompt and answer."""
        prompt = self.prompt()
        if prompt is not None:
            answer = self.completion.output.text
            return text.startswith(prompt.text) and text.startswith(answer, len(prompt.text))
        return _text_hash(text[: self.length]).digest() == self.text_hash.digest()


class PromptPlace:
    """The place of a prompt in its conversation. `messages` is the hash of all its messages. If the
    prompt continues a turn, `ending` is that turn's end, after the first `num_known` messages."""

    def __init__(
        self, prompt: ShownPrompt, messages: "_Hash", ending: Ending | None, num_known: int
    ) -> None:
        self.prompt = prompt
        self.messages = messages
        self.ending = ending
        self.num_known = num_known

    def text_hash(self) -> "_Hash":
        """The hash of the prompt's text."""
        if self.ending is None:
            return _text_hash(self.prompt.text)
        text_hash = self.ending.text_hash.copy()
        text_hash.update(_encoded(self.prompt.text[self.ending.length :]))
        return text_hash


class Endings:
    """The ends of turns in live sessions, up to `_MAX_ENDINGS`."""

    def __init__(self) -> None:
        self._endings: LruDict[bytes, Ending] = LruDict()
        self._of_sessions: dict[int, set[bytes]] = {}

    def put(
        self, place: PromptPlace, session: Session, completion: Completion, message: Message
    ) -> None:
        """An answer of the turn at `place` is finished. Its program will send it as `message`."""
        text_hash, answer = place.text_hash(), completion.output.text
        text_hash.update(_encoded(answer))
        length = len(place.prompt.text) + len(answer)
        messages = place.messages.copy()
        _extend(messages, [message])
        key = messages.digest()
        self._keep(key, Ending(session.id, completion, length, text_hash, ref(place.prompt)))
        if session.log is not None:
            ids = {"request": completion.request_id, "task": completion.id}
            session.log.note(ENDING, {"key": key.hex(), **ids})

    def restore(self, session: Session, fields: Mapping[str, Any]) -> None:
        """Restore the ending in a session's journal record."""
        completion = session.graph.completion(fields["request"], fields["task"])
        text = _text_of(completion)
        ending = Ending(session.id, completion, len(text), _text_hash(text), lambda: None)
        self._keep(bytes.fromhex(fields["key"]), ending)

    def forget(self, session_id: int) -> None:
        """The session has ended: its endings are removed."""
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
        self, prompt: ShownPrompt, scope: Mapping[str, Any], is_live: Callable[[int], bool]
    ) -> PromptPlace:
        """The place of the prompt after its longest known beginning in a live session. `scope`:
        further values that must be equal in both prompts."""
        history = _History(prompt.messages, scope)
        for num_messages, key in history.beginnings():
            ending = self._endings.get(key)
            if ending is None or not is_live(ending.session_id):
                continue
            if ending.begins(prompt.text):
                return PromptPlace(prompt, history.whole(), ending, num_messages)
        return PromptPlace(prompt, history.whole(), None, 0)


class _History:
    """Hashes of a prompt's messages: of all messages from the first up to an answer."""

    def __init__(self, messages: Sequence[Message], scope: Mapping[str, Any]) -> None:
        self._messages = messages
        self._scope = hashlib.sha256(orjson.dumps(scope, option=orjson.OPT_SORT_KEYS))
        self._num_hashed = 0
        for i in range(len(messages), 0, -1):
            if _is_answer(messages[i - 1]):
                self._num_hashed = i
                break
        self._hash = self._scope.copy()  # of the first `_num_hashed` messages
        _extend(self._hash, messages[: self._num_hashed])

    def whole(self) -> "_Hash":
        whole = self._hash.copy()
        _extend(whole, self._messages[self._num_hashed :])
        return whole

    def beginnings(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number of messages up to each answer, and their hash, the last answer first.
        More than one is needed only if the conversation was cut or has forked."""
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
    """Hash the messages. Hashing them together or one by one gives the same result."""
    if messages:
        written = orjson.dumps(messages, option=orjson.OPT_SORT_KEYS)  # a list: [...]
        key.update(b",")
        key.update(memoryview(written)[1:-1])


def _text_of(completion: Completion) -> str:
    """The text of a turn, answer included."""
    parts: list[str] = []
    turn: Completion | None = completion
    while turn is not None:
        parts.append(turn.output.text)
        parts += [piece.text for piece in reversed(turn.fill) if isinstance(piece, TextPiece)]
        turn = turn.previous
    return "".join(reversed(parts))


def _text_hash(text: str) -> "_Hash":
    return hashlib.sha256(_encoded(text))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """The first difference between two prompts of a program."""

    reason: Reason
    at: int  # number of equal characters
    earlier_length: int  # characters of the earlier prompt
    message: int | None  # index of the first different message; None: all are equal
    before: str  # text around the difference in the earlier prompt
    after: str  # text around the difference in the later prompt

    @property
    def is_large(self) -> bool:
        """Whether more of the earlier prompt was lost than chat templates change between turns."""
        return self.earlier_length - self.at > _MAX_LOSS * self.earlier_length

    @property
    def summary(self) -> str:
        """One line for a header, without the prompts' texts."""
        message = "" if self.message is None else f"; message={self.message}"
        return f"broken; reason={self.reason}{message}; at={self.at}"

    def __str__(self) -> str:
        """One line for people, with excerpts of the prompts."""
        where = "" if self.message is None else f" in message {self.message}"
        change = f"{self.before!r} became {self.after!r}"
        return f"{self.reason}{where}, after {self.at} characters: {change}"


class PrefixDoctor:
    """Keeps the last prompt of each program, the most recently used ones up to a bound. Recognizes
    unnamed programs by the answers that they received."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._prompts: LruDict[int, ShownPrompt] = LruDict(_MAX_TEXT, weigh=lambda p: len(p.text))
        self._answers: LruDict[bytes, int] = LruDict(_MAX_ANSWERS)

    def program_of(self, tenant: str, prompt: ShownPrompt) -> int | None:
        """The session that gave one of the prompt's last answers; None if no answer is known."""
        answers = [m for m in prompt.messages if m.get("role") == "assistant"]
        keys = [_answer_key(tenant, answer) for answer in answers[: -_MAX_QUOTED - 1 : -1]]
        return next((found for key in keys if (found := self._answers.get(key)) is not None), None)

    def compare(self, session_id: int, prompt: ShownPrompt) -> PrefixBreak | None:
        """Where a prompt that continues no turn differs from its session's last prompt."""
        earlier = self._prompts.get(session_id)
        return None if earlier is None else diagnose(earlier, prompt)

    def submitted(self, session_id: int, prompt: ShownPrompt, left: PrefixBreak | None) -> None:
        """Keep the prompt as its session's last one, and report a break."""
        self._prompts.put(session_id, prompt)
        if left is not None:
            self._events.emit(PrefixBroken, left.reason)

    def remember_answer(self, tenant: str, session_id: int, answer: Message) -> None:
        """Remember which session gave the answer. Short answers are not remembered, because many
        programs receive the same."""
        if answer.get("tool_calls") or len(answer["content"]) >= _MIN_ANSWER:
            self._answers.put(_answer_key(tenant, answer), session_id)

    def forget(self, session_id: int) -> None:
        """The session has ended."""
        self._prompts.pop(session_id)


def diagnose(earlier: ShownPrompt, later: ShownPrompt) -> PrefixBreak:
    """Why `later` does not start with `earlier`."""
    at = _common_length(earlier.text, later.text)
    message = _first_difference(earlier.messages, later.messages)
    before, after = _around(earlier.text, at), _around(later.text, at)
    reason = _reason(earlier, later, message, before, after)
    return PrefixBreak(reason, at, len(earlier.text), message, before, after)


def _answer_key(tenant: str, answer: Message) -> bytes:
    text = orjson.dumps([tenant, answer], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(text).digest()


def _reason(
    earlier: ShownPrompt, later: ShownPrompt, message: int | None, before: str, after: str
) -> Reason:
    tools, tools_now = earlier.options.get("tools", ()), later.options.get("tools", ())
    if tools != tools_now:
        is_same = sorted(map(repr, tools)) == sorted(map(repr, tools_now))
        return "tools_reordered" if is_same else "tools_changed"
    if message is not None and earlier.messages[message].get("role") != "system":
        return "history_changed"
    if _DATE.search(before) and _DATE.search(after):
        return "date"
    if message is None:
        return "template"
    if _NONCE.search(before) and _NONCE.search(after):
        return "nonce"
    return "system_changed"


def _first_difference(earlier: Sequence[Message], later: Sequence[Message]) -> int | None:
    for i, message in enumerate(earlier):
        if i >= len(later) or later[i] != message:
            return i
    return None


def _common_length(one: str, other: str) -> int:
    limit, at = min(len(one), len(other)), 0
    while at < limit and one[at : at + _CHUNK] == other[at : at + _CHUNK]:
        at += _CHUNK
    end = min(limit, at + _CHUNK)
    return next((i for i in range(at, end) if one[i] != other[i]), limit)


def _around(text: str, at: int) -> str:
    return text[max(0, at - _EXCERPT) : at + _EXCERPT]
