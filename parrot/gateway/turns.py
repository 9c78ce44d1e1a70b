"""Turns: complete prompts, as chat APIs send them, and the programs that send them.

    request 1     system, user                              completion 1
    request 2     system, user, assistant, tool             completion 2, which continues 1
                  '-- completion 1 and its answer --'

A chat API has no sessions: a program sends its whole history with every turn. A turn continues an
earlier one if its prompt starts with exactly that turn's prompt and answer. Then both are nodes of
the same graph and share KV. Any other turn starts a session, or joins that of a named program.

    turn 1    "Summarize ..."            answer: variable a        has no reader yet
    turn 2    "Join: {{first}}"          first = a, which has no value yet

Chained turns have session variables in their prompts, and their answers are variables. So a program
can submit its whole graph through a chat API before any value exists."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import thread_time
from typing import Any

from pydantic import SecretStr

from parrot.gateway.answers import AnswerParser, FirstCallParser, PlainParser, with_reasoning
from parrot.gateway.programs import (
    Ending,
    Endings,
    PrefixBreak,
    PrefixDoctor,
    ProgramSessions,
    PromptPlace,
    ShownPrompt,
)
from parrot.gateway.prompt_tokens import (
    TokenPrompt,
    prompt_of_tokens,
    prompt_tokens,
    text_of_tokens,
)
from parrot.gateway.tool_calls import (
    answer_parser,
    are_described,
    constrained_calls,
    no_tools,
    served_parser,
)
from parrot.gateway.transcript import (
    MarkedPrompt,
    Transcript,
    hashed_media,
    mark_placeholders,
    needs_thread,
    put_variables,
    require_fits,
    served_body,
    served_transcript,
    transcript_of,
)
from parrot.gateway.turn_request import Prepared, PromptSource, Rendered, TurnChain, TurnRequest
from parrot.protocol.errors import InvalidRequest, NotFound, ValidationFailed
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import (
    ReadLimits,
    VarGetResponse,
)
from parrot.protocol.sampling import (
    MAX_GEN_LENGTH,
    NEUTRAL_SAMPLING,
    DefaultSampling,
    Logprobs,
    SamplingConfig,
)
from parrot.serve.core import ServeCore
from parrot.serve.events import PromptAdded
from parrot.serve.graph.build import Prompt
from parrot.serve.graph.nodes import (
    CallOptions,
    Completion,
    CompletionState,
    Piece,
    PieceKind,
    Reader,
    SemanticVariable,
    TextPiece,
    TokenizedText,
)
from parrot.serve.prompts.encode import ModelTokenizer
from parrot.serve.readers import Reads, value_view
from parrot.serve.sessions import AddPrompt, Session
from parrot.serve.tenants.limits import num_bytes

FOREIGN_TOKENIZER = "foreign"  # The tokenizer of a foreign server, which Parrot does not have.

_SLOW_S = 0.01  # CPU seconds of a rendering after which the next one runs in a thread.
# Characters per token, to estimate a prompt's tokens. A larger value leaves more for calls.
_CHARS_PER_TOKEN = 2
_TOKEN_BYTES = 40  # Bytes that one token of a token prompt counts for the quota.


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A submitted turn. Its answers are generated while they are read. Cancelling a read or closing
    a stream withdraws that answer."""

    session: Session
    request_id: int
    completions: Sequence[Completion]
    place: PromptPlace | None  # None: no turn can continue this one
    reads: Reads
    criteria: PerformanceCriteria
    make_parser: Callable[[], AnswerParser]  # called once for each answer
    prefix: str  # how much the prompt shares with the previous one, for a header
    deadline: float | None = None
    is_kept: bool = False  # unfinished answers stay in the session when the request ends
    is_patient: bool = False  # streams wait for an engine without a limit
    is_served: bool = False  # a server renders the conversation itself

    def parser(self, *, may_call_many: bool = True) -> AnswerParser:
        """A parser for one answer. Unless it `may_call_many`, calls after the first are dropped."""
        parser = self.make_parser()
        return parser if may_call_many else FirstCallParser(parser)

    async def read(self, choice: int) -> VarGetResponse:
        """Wait for an answer. Raises the answer's error."""
        output = self.completions[choice].output
        await self.reads.value(self.session, output, self._options, is_kept=self.is_kept)
        return value_view(output)

    def stream(self, choice: int) -> AsyncGenerator[str]:
        """The answer's text in deltas. Raises as `read` does."""
        output = self.completions[choice].output
        return self.reads.stream(
            self.session,
            output,
            self._options,
            is_kept=self.is_kept,
            is_patient=self.is_patient,
        )

    def ended(self, choice: int) -> VarGetResponse:
        """An answer whose stream has ended."""
        return value_view(self.completions[choice].output)

    @property
    def _options(self) -> ReadLimits:
        return ReadLimits(
            session_id=self.session.id, criteria=self.criteria, deadline=self.deadline
        )

    def is_scored(self, choice: int) -> bool:
        """Whether log probabilities of the answer are requested."""
        return self.completions[choice].sampling.logprobs is not None

    def logprobs(self, choice: int) -> Logprobs | None:
        """Log probabilities of the answer's tokens so far; None if they are not requested."""
        return self.completions[choice].stats.logprobs

    def extra(self, choice: int) -> Mapping[str, Any]:
        """The fields of a finished answer of a foreign server that Parrot does not know: those of
        `answer`, `choice` and `usage`, and of `message` in a list."""
        return self.completions[choice].stats.extra or {}

    def cancel(self) -> None:
        """Cancel the unfinished answers, unless they are kept. Does nothing if the session has
        ended."""
        if not self.is_kept and self.request_id in self.session.graph.calls:
            self.session.graph.cancel_call(self.request_id)


@dataclass(frozen=True, slots=True)
class _Target:
    """The place of a turn in a session's graph."""

    session: Session
    fill: tuple[Piece, ...]
    usage: Mapping[str, int]
    output: SemanticVariable | None = None  # the variable that the answer sets; None: a new one
    is_kept: bool = False
    place: PromptPlace | None = None  # as in `Turn`
    prefix: str = "new"  # as in `Turn`
    shown: ShownPrompt | None = None  # the prompt of a conversation
    left: PrefixBreak | None = None  # where the prompt differs from the session's last one
    marks: Mapping[str, SemanticVariable] | None = None  # variables by their marks in the messages


class Turns:
    """Submits turns to the core, in sessions that it creates for programs without one."""

    def __init__(self, core: ServeCore) -> None:
        self._core = core
        self._sessions = ProgramSessions(core)
        self._doctor = PrefixDoctor(core.events)
        self._compares = core.config.prefix_repair == "report"
        self._aliases = core.config.model_aliases
        self._endings = Endings()
        core.attach(self)

    def check_integrity(self) -> None:
        self._sessions.check_integrity()

    async def prepare(self, request: TurnRequest) -> Prepared:
        """Render the prompt. A long conversation is rendered in a thread, and so is each one with a
        slow chat template: it may take 50 ms of CPU time, and 0.4 ms per message. Raises as
        `render` does."""
        resolved, marked, render = self._rendering(request)
        is_long = needs_thread(request.prompt, self._core.fleet.tokenizer(resolved.model))
        began = thread_time()
        rendered = await asyncio.to_thread(render) if is_long else render()
        if is_long or thread_time() - began > _SLOW_S:
            prompt = _shown(resolved, rendered)
            place = None if marked is not None else self._place(resolved, prompt)
            await asyncio.to_thread(rendered.shown.pieces, *_known_part(place))
        return Prepared(resolved, rendered, marked)

    def render(self, request: TurnRequest) -> Prepared:
        """Render a prompt without messages. Raises `NotFound` for the model, `InvalidRequest`, and
        `QueueFull`."""
        resolved, marked, render = self._rendering(request)
        return Prepared(resolved, render(), marked)

    def submit(self, prepared: Prepared) -> Turn:
        """Raises `NotFound` for the model, `InvalidRequest`, and `QuotaExceeded`. A chained turn
        also raises `AuthenticationFailed`, `SessionGone` and `QueueFull`, and `AlreadySet`,
        `Conflict` and `CyclicGraph` for its output variable."""
        request, rendered, marked = prepared
        if request.chain is not None and marked is not None:
            target = self._chained(request, request.chain, rendered, marked)
        else:
            target = self._conversation(request, rendered)
        return self._submit(request, rendered, target)

    def _rendering(
        self, request: TurnRequest
    ) -> tuple[TurnRequest, MarkedPrompt | None, Callable[[], Rendered]]:
        """The request with the model's own name, the marked prompt of a chained turn, and a
        function that renders the prompt in any thread."""
        if request.model in self._aliases:
            request = replace(request, model=self._aliases[request.model])
        if (chain := request.chain) is None:
            if not request.is_resumed:
                self._core.tasks.require_room(request.tenant)
            return request, None, self._renderer(request)
        if chain.output is not None and len(request.samplings) > 1:
            text = f"`parrot.output` needs one answer, but `n` is {len(request.samplings)}"
            raise InvalidRequest(text, param="parrot.output")
        marked = mark_placeholders(request.prompt, list(chain.inputs))
        return request, marked, self._renderer(replace(request, prompt=marked.prompt))

    def _conversation(self, request: TurnRequest, rendered: Rendered) -> "_Target":
        """The turn that the prompt continues, or its program's session. The prompt's length is
        checked before a session is created."""
        shown, text = rendered.shown, rendered.shown.text
        limit = self._longest(request.model)
        require_fits(text, self._core.fleet.tokenizer(request.model), limit)
        prompt = _shown(request, rendered)
        place = self._place(request, prompt)
        ending = None if place is None else place.ending
        fill = shown.pieces(*_known_part(place))
        if request.tokens is not None and rendered.conversation is None:
            fill = [TextPiece(text, PieceKind.TOKENS, request.tokens)]
        usage = _usage_of(fill, len(request.samplings), request.prediction)
        if ending is None:
            quoted = self._doctor.program_of(request.tenant, prompt)
            session = self._sessions.with_room(
                request.tenant, request.program, usage, quoted, request.client
            )
        else:
            session = self._sessions.use(ending.session_id)
        left = None
        if self._compares and ending is None:
            left = self._doctor.compare(session.id, prompt)
        return _Target(
            session,
            tuple(fill),
            usage,
            place=place,
            prefix=_prefix_header(ending, left, len(text)),
            shown=prompt,
            left=left,
        )

    def _place(self, request: TurnRequest, prompt: ShownPrompt) -> PromptPlace | None:
        """The place of the prompt in its conversation. No turn continues a plain text."""
        if isinstance(request.prompt, str):
            return None
        return self._endings.find(prompt, _scope(request), self._sessions.is_live)

    def _chained(
        self, request: TurnRequest, chain: TurnChain, rendered: Rendered, marked: MarkedPrompt
    ) -> "_Target":
        """The prompt with the session's variables, and its output variable."""
        session = self._session_of(request, chain)
        self._core.tasks.require_room(session.tenant)
        inputs = {
            name: _known(session, var_id, f"parrot.inputs.{name}")
            for name, var_id in chain.inputs.items()
        }
        fill = tuple(put_variables(rendered.shown.pieces(), marked, inputs))
        output = None
        if chain.output is not None:
            output = _known(session, chain.output, "parrot.output")
        usage = _usage_of(fill, 0 if output else len(request.samplings), request.prediction)
        is_own = self._sessions.is_live(session.id)
        is_kept = not is_own or output is not None or chain.is_deferred
        marks = None
        if rendered.conversation is not None:
            marks = {mark: inputs[name] for mark, name in marked.names.items()}
        return _Target(session, fill, usage, output, is_kept, prefix="chained", marks=marks)

    def _submit(self, request: TurnRequest, rendered: Rendered, target: "_Target") -> Turn:
        """Add the completions to the graph of the target's session."""
        session, place, chain = target.session, target.place, request.chain
        ending = None if place is None else place.ending
        options = CallOptions(
            func_name=request.func_name,
            models=(request.model,),
            cache_prefix=not isinstance(request.prompt, str),
            tenant=session.tenant,
            cache_salt=session.graph.cache_salt,
            remark="" if target.left is None else f"prefix: {target.left}",
            prediction=request.prediction,
            traceparent=request.traceparent,
            request_id=request.request_id,
            client_key=revealed(request.client_key),
        )
        prompt = Prompt(
            target.fill,
            rendered.samplings,
            options,
            previous=None if ending is None else ending.completion,
            output=target.output,
            allows_background=chain is not None and chain.is_deferred,
            conversation=rendered.conversation,
            conversation_inputs=target.marks,
        )
        request_id, completions = session.apply(AddPrompt(prompt, target.usage, target.is_kept))
        if self._compares and target.shown is not None:
            self._doctor.submitted(session.id, target.shown, target.left)
        is_bound = target.output is not None
        self._core.events.emit(PromptAdded, session, completions, is_bound=is_bound)
        if chain is not None and chain.is_deferred:
            self._begin_deferred(session, completions, chain)
        return Turn(
            session,
            request_id,
            completions,
            place,
            self._core.reads,
            request.criteria,
            rendered.make_parser,
            target.prefix,
            request.deadline,
            is_kept=target.is_kept,
            is_served=rendered.conversation is not None,
        )

    def _session_of(self, request: TurnRequest, chain: TurnChain) -> Session:
        if chain.session_id is not None:
            try:
                return self._core.sessions.authenticate(chain.session_id, chain.session_auth)
            except NotFound as error:
                raise InvalidRequest(error.message, param="parrot.session_id") from None
        if request.program is None:
            raise InvalidRequest(
                "set `parrot.session_id`, or name the program in `prompt_cache_key`",
                param="parrot.session_id",
            )
        return self._sessions.with_room(request.tenant, request.program, {}, client=request.client)

    def _begin_deferred(
        self, session: Session, completions: Sequence[Completion], chain: TurnChain
    ) -> None:
        """Start a deferred turn: together with its program's other calls, or now for `criteria`."""
        self._core.wake_soon(session)
        if chain.criteria is None:
            return
        deadline = None if chain.deadline is None else self._core.clock.now() + chain.deadline
        for completion in completions:
            if not completion.output.is_settled:
                session.graph.activation.add_reader(
                    Reader(completion.output, chain.criteria, deadline, has_client=False)
                )

    def default_sampling(self, model: str) -> DefaultSampling:
        """The model's values for sampling fields that a request leaves None. They come from one of
        its engines; if no engine reports any, they are neutral."""
        name = self._aliases.get(model, model)
        reported = [e.info.default_sampling for e in self._core.fleet if e.info.model == name]
        return next(filter(None, reported), NEUTRAL_SAMPLING)

    def _longest(self, model: str) -> int | None:
        """The longest sequence, in tokens, of the model's engines; None: there is no engine."""
        fleet = self._core.fleet
        return max([e.max_len for e in fleet if e.info.model == model], default=None)

    def _features(self, model: str) -> list[frozenset[str] | None]:
        """The features of each engine of the model; None: unknown."""
        return [e.info.capabilities.features for e in self._core.fleet if e.info.model == model]

    def _require_calls(self, model: str, tokenizer: ModelTokenizer) -> None:
        """Raise `UnsupportedField` for tools if the model needs a grammar to call them, and no
        engine of the model supports grammars."""
        if not are_described(tokenizer):
            return
        known = self._features(model)
        if not any(features is None or "grammar" in features for features in known):
            reason = "its chat template has no tool format, and its engines have no grammars"
            raise no_tools(model, reason)

    def _renderer(self, request: TurnRequest) -> Callable[[], Rendered]:
        """A function that renders the prompt. It may run in any thread."""
        tokenizer = self._core.fleet.tokenizer(request.model)
        is_served = is_forwarded = False  # A server renders the messages, or gets all fields.
        if tokenizer is None:
            features = self._features(request.model)
            is_text = isinstance(request.prompt, str)
            is_served = not is_text and any("messages" in (one or ()) for one in features)
            is_forwarded = (is_text or is_served) and _are_foreign(features)
        request = _with_extra(request) if is_forwarded else _without_extra(request)
        if is_served:
            return partial(served_turn, request)
        longest = None
        if request.calls is not None and tokenizer is not None:
            self._require_calls(request.model, tokenizer)
            longest = self._longest(request.model)
        if tokenizer is None and request.tokens is not None:
            return partial(token_turn, request.samplings, request.tokens)
        return partial(rendered_turn, request, tokenizer, longest)

    async def count_tokens(
        self, model: str, prompt: PromptSource, options: Mapping[str, Any]
    ) -> int:
        """The number of tokens of a prompt. Raises as `tokens` does."""
        return len(await self.tokens(model, prompt, options))

    async def tokens(
        self, model: str, prompt: PromptSource, options: Mapping[str, Any]
    ) -> list[int]:
        """The token ids of a prompt. Raises as `submit` does, and `UnsupportedField` if the model's
        engines take text."""
        model = self._aliases.get(model, model)
        return await prompt_tokens(prompt, options, model, self._core.fleet.tokenizer(model))

    async def prompt_of(self, model: str, ids: Sequence[int]) -> TokenPrompt:
        """The `prompt` and `tokens` of a `TurnRequest` for a prompt of these token ids. The text is
        empty if only a foreign server knows it. Raises as `tokens` does, and `InvalidRequest`."""
        model = self._aliases.get(model, model)
        if self._core.fleet.tokenizer(model) is None and _are_foreign(self._features(model)):
            return "", TokenizedText(FOREIGN_TOKENIZER, tuple(ids))
        return await prompt_of_tokens(ids, model, self._core.fleet.tokenizer(model))

    async def text(self, model: str, ids: Sequence[int]) -> str:
        """The text of the token ids. Raises as `tokens` does."""
        model = self._aliases.get(model, model)
        return await text_of_tokens(ids, model, self._core.fleet.tokenizer(model))

    def remember(self, turn: Turn, choice: int, message: Mapping[str, Any]) -> None:
        """Remember an answer, so that a later prompt can continue it. The program will send it as
        `message`, perhaps without the reasoning."""
        completion = turn.completions[choice]
        if turn.place is None or completion.state is not CompletionState.DONE:
            return
        bare = {name: field for name, field in message.items() if name != "reasoning_content"}
        for shown in (message, bare) if len(bare) < len(message) else (message,):
            self._endings.put(turn.place, turn.session, completion, shown)
            self._doctor.remember_answer(completion.options.tenant, turn.session.id, shown)

    def restore_ending(self, session_id: str, fields: Mapping[str, Any]) -> None:
        """Restore the ending in a session's journal record."""
        session = self._core.sessions.find(int(session_id))
        assert session is not None, session_id
        self._endings.restore(session, fields)

    def restored(self) -> None:
        """All sessions were restored after a restart: register those of programs."""
        for session in self._core.sessions:
            if session.is_program:
                self._sessions.restore(session)

    def forget(self, session: Session) -> None:
        """A session has ended."""
        self._doctor.forget(session.id)
        self._endings.forget(session.id)
        self._sessions.forget(session)

    def make_room(self, tenant: str, *, only_own: bool) -> bool:
        """See `Attached`."""
        return self._sessions.make_room(tenant, only_own=only_own)


def _shown(request: TurnRequest, rendered: Rendered) -> ShownPrompt:
    return ShownPrompt(rendered.messages, request.options, rendered.shown.text)


def _known_part(place: PromptPlace | None) -> tuple[int, int]:
    """The characters and the messages that the conversation's last turn has already split."""
    if place is None or place.ending is None:
        return 0, 0
    return place.ending.length, place.num_known


def _are_foreign(features: Sequence[frozenset[str] | None]) -> bool:
    """Whether all engines of a model forward further fields to a server."""
    return all("extra" in (one or ()) for one in features)


def _with_extra(request: TurnRequest) -> TurnRequest:
    """The request with the fields for the servers behind the model's engines."""
    extra = {**request.ignored(), **request.unknown}
    if not extra:
        return request
    samplings = [one.model_copy(update={"extra": extra}) for one in request.samplings]
    return replace(request, samplings=samplings)


def _without_extra(request: TurnRequest) -> TurnRequest:
    """The request for engines that forward no further fields. Raises `ValidationFailed` for an
    unknown field, and the first error of `refused`."""
    for name in request.unknown:
        raise unknown_field(name)
    for error in request.refused:
        raise error
    return request


def _scope(request: TurnRequest) -> Mapping[str, Any]:
    """Values besides the messages that are equal in all turns of a conversation."""
    return {"tenant": request.tenant, "model": request.model, "options": request.options}


def _prefix_header(ending: Ending | None, left: PrefixBreak | None, length: int) -> str:
    """For a header: how much of the prompt was in the program's last one. `length`: characters."""
    if ending is not None:
        return f"continued; reused={ending.length}; of={length}"
    if left is None:
        return "new"
    return left.summary if left.is_large else f"continued; reused={left.at}; of={length}"


def _usage_of(fill: Sequence[Piece], num_new: int, prediction: str) -> dict[str, int]:
    """The quota usage of a call with this prompt and `num_new` new variables."""
    texts, num_tokens = [prediction], 0
    for piece in fill:
        if isinstance(piece, TextPiece):
            texts.append(piece.text)
            num_tokens += 0 if piece.tokenized is None else len(piece.tokenized.ids)
    size = num_bytes(texts) + _TOKEN_BYTES * num_tokens
    return {"calls": 1, "variables": num_new, "text_bytes": size}


def revealed(client_key: SecretStr | None) -> str:
    """The key for a request to an engine. Empty: none."""
    return "" if client_key is None else client_key.get_secret_value()


def is_foreign(tokens: TokenizedText | None) -> bool:
    """Whether only a foreign server knows the text of the tokens."""
    return tokens is not None and tokens.tokenizer_id == FOREIGN_TOKENIZER


def unknown_field(name: str) -> ValidationFailed:
    """The error for a field of a request that Parrot does not know."""
    return ValidationFailed(f"`{name}`: Extra inputs are not permitted", param=name)


def _known(session: Session, var_id: str, param: str) -> SemanticVariable:
    variable = session.graph.variables.get(var_id)
    if variable is None:
        raise InvalidRequest(f"the session has no variable `{var_id:.80}`", param=param)
    return variable


def _may_reason(request: TurnRequest) -> bool:
    """Whether answers may start with reasoning: no constraint applies to their first token."""
    is_constrained = any(sampling.constraint is not None for sampling in request.samplings)
    must_call = request.calls is not None and request.calls.must_call
    return not (isinstance(request.prompt, str) or is_constrained or must_call)


def _room(prompt: str, longest: int | None) -> int:
    """An estimate of the tokens that fit after a prompt, if sequences have up to `longest`."""
    if longest is None:
        return MAX_GEN_LENGTH
    return max(longest - len(prompt) // _CHARS_PER_TOKEN, longest // 4)


def rendered_turn(
    request: TurnRequest, tokenizer: ModelTokenizer | None, longest: int | None
) -> Rendered:
    """The prompt rendered by ServeCore. `longest`: tokens of the longest sequence; None: unknown.
    Raises `UnsupportedField` and `InvalidRequest`."""
    prompt, options, model = request.prompt, request.options, request.model
    make_parser: Callable[[], AnswerParser] = PlainParser
    if tools := options.get("tools"):
        make_parser = answer_parser(tools, model, tokenizer)
    shown = transcript_of(prompt, options, model, tokenizer)
    samplings = request.samplings
    if request.calls is not None:
        room = _room(shown.text, longest)
        samplings = constrained_calls(samplings, request.calls, model, tokenizer, room)
    if _may_reason(request) and tokenizer is not None and tokenizer.chat is not None:
        make_parser = with_reasoning(make_parser, tokenizer.chat.source, shown.text)
    messages = () if isinstance(prompt, str) else prompt
    return Rendered(messages, shown, samplings, make_parser)


def token_turn(samplings: Sequence[SamplingConfig], tokens: TokenizedText) -> Rendered:
    """A prompt of token ids for a server that knows their text. A piece of another kind than that
    of a text prompt represents the prompt, so both never have equal keys."""
    text = " ".join(map(str, tokens.ids))
    shown = Transcript(text, lambda *_: [(len(text), PieceKind.VALUE)])
    return Rendered((), shown, samplings, PlainParser, {"prompt": list(tokens.ids)})


def served_turn(request: TurnRequest) -> Rendered:
    """The messages for a server that renders them itself."""
    assert not isinstance(request.prompt, str), request
    body = served_body(request.prompt, request.options, request.calls)
    make_parser = served_parser(request.calls, may_reason=_may_reason(request))
    messages = hashed_media(request.prompt)
    shown = served_transcript(messages, body)
    return Rendered(messages, shown, request.samplings, make_parser, body)
