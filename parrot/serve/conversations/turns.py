"""Turns: prompts that come whole, as chat APIs send them, and the programs that they belong to.

    request 1     system, user                              completion 1
    request 2     system, user, assistant, tool             completion 2, which continues 1
                  '-- how completion 1 ended --'

A chat API has no sessions: a program sends its history again with every turn. A turn whose prompt
begins with exactly the text of an earlier one, its answer included, continues it as a node of the
same graph, on the same KV. Any other turn begins a program, or belongs to one that it names."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import orjson

from parrot.protocol.errors import SessionGone
from parrot.protocol.public import ReadOptions
from parrot.serve.conversations.sessions import ProgramSessions
from parrot.serve.conversations.turn import Turn, TurnRequest
from parrot.serve.graph.build import Prompt
from parrot.serve.graph.nodes import CallOptions, Completion, CompletionState, TextPiece
from parrot.serve.prompts.conversation import answer_parser, count_tokens, prompt_pieces
from parrot.serve.prompts.tokenizers import ModelTokenizer
from parrot.serve.prompts.transcript import Message
from parrot.serve.quotas import num_bytes
from parrot.serve.readers import Reads
from parrot.serve.sessions import Session, SessionRegistry
from parrot.utils.clock import Clock
from parrot.utils.heaps import LruDict
from parrot.utils.timers import TimerQueue

_MAX_ENDINGS = 65_536  # turns that can be continued


class _Ending(NamedTuple):
    """Where a turn ended: the digest of all its `length` characters, answer included."""

    session_id: int
    completion: Completion
    length: int
    digest: bytes


class Turns:
    def __init__(
        self,
        sessions: SessionRegistry,
        end_session: Callable[[Session, SessionGone], None],
        timers: TimerQueue,
        clock: Clock,
        find_tokenizer: Callable[[str], ModelTokenizer | None],
        require_room: Callable[[str], None],
    ) -> None:
        """`end_session` includes `forget`. `find_tokenizer` raises `NotFound` for a model that no
        engine serves, and gives None for one whose engines take text. `require_room` raises
        `QueueFull` for a tenant."""
        self._sessions = ProgramSessions(sessions, clock, end_session)
        self._reads = Reads(timers, clock)
        self.forget = self._sessions.forget
        self.check_integrity = self._sessions.check_integrity
        self._find_tokenizer = find_tokenizer
        self._require_room = require_room
        self._endings: LruDict[bytes, _Ending] = LruDict(_MAX_ENDINGS)

    def submit(self, request: TurnRequest) -> Turn:
        """Raises `NotFound` for the model, `InvalidRequest`, `QuotaExceeded` and `QueueFull`."""
        self._require_room(request.tenant)
        tokenizer = self._find_tokenizer(request.model)
        make_parser = answer_parser(request.options, request.model, tokenizer)
        pieces = prompt_pieces(request.prompt, request.options, request.model, tokenizer)
        text = "".join([piece.text for piece in pieces])
        keys = _history_keys(request)
        ending = self._continued(keys, text)
        fill = pieces if ending is None else _behind(pieces, ending.length)
        usage = {
            "calls": 1,
            "variables": len(request.samplings),
            "text_bytes": num_bytes([piece.text for piece in fill]),
        }
        if ending is None:
            session = self._sessions.with_room(request.tenant, request.program, usage)
        else:
            session = self._sessions.use(ending.session_id)
            session.account.require(**usage)
        options = CallOptions(
            func_name=request.func_name,
            models=(request.model,),
            cache_prefix=not isinstance(request.prompt, str),
            tenant=request.tenant,
        )
        previous = None if ending is None else ending.completion
        request_id, completions = session.graph.submit_prompt(
            Prompt(tuple(fill), request.samplings, options, previous)
        )
        session.account.add(**usage)
        read = ReadOptions(session_id=session.id, criteria=request.criteria)
        return Turn(
            session, request_id, completions, text, keys[-1], self._reads, read, make_parser
        )

    async def count_tokens(
        self, model: str, prompt: Sequence[Message] | str, options: Mapping[str, Any]
    ) -> int:
        """Tokens of a prompt. Raises as `submit` does, and `UnsupportedField` if the engines of the
        model take text."""
        tokenizer = self._find_tokenizer(model)
        return await count_tokens(prompt, options, model, tokenizer)

    def remember(self, turn: Turn, choice: int, message: Message) -> None:
        """The program will send `message` for this answer if it goes on."""
        completion = turn.completions[choice]
        if completion.state is CompletionState.DONE:
            text = turn.text + completion.output.text
            ending = _Ending(turn.session.id, completion, len(text), _digest(text))
            self._endings.put(_extend(turn.history, message), ending)

    def _continued(self, keys: Sequence[bytes], text: str) -> _Ending | None:
        """Where the longest known beginning of the prompt ended, if that can be continued."""
        for key in reversed(keys):
            ending = self._endings.get(key)
            if ending is None or not self._sessions.is_live(ending.session_id):
                continue
            if _digest(text[: ending.length]) == ending.digest:
                return ending
        return None


def _behind(pieces: Sequence[TextPiece], length: int) -> list[TextPiece]:
    """The pieces without the first `length` characters."""
    ends = accumulate([len(piece.text) for piece in pieces])
    return [
        TextPiece(piece.text[-(end - length) :], piece.kind)
        for piece, end in zip(pieces, ends, strict=True)
        if end > length
    ]


def _history_keys(request: TurnRequest) -> list[bytes]:
    """A key for the prompt up to each of its messages, and before the first."""
    prompt = request.prompt
    messages = [{"text": prompt}] if isinstance(prompt, str) else prompt
    begin = {"tenant": request.tenant, "model": request.model, "options": request.options}
    key = _extend(b"", begin)
    return [key, *[key := _extend(key, message) for message in messages]]


def _extend(key: bytes, message: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(key + orjson.dumps(message, option=orjson.OPT_SORT_KEYS)).digest()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
