"""Turns: prompts that come whole, as chat APIs send them, and the programs that they belong to.

    request 1     system, user                              completion 1
    request 2     system, user, assistant, tool             completion 2, which continues 1
                  '-- how completion 1 ended --'

A chat API has no sessions: a program sends its history again with every turn. A turn whose prompt
begins with exactly the text of an earlier one, its answer included, continues it as a node of the
same graph, on the same KV. Any other turn begins a program, or belongs to one that it names."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from parrot.gateway.conversations.chains import Chains, usage_of
from parrot.gateway.conversations.doctor import (
    PrefixDoctor,
    Prompt,
)
from parrot.gateway.conversations.endings import Endings
from parrot.gateway.conversations.observed import ObservedTurns
from parrot.gateway.conversations.rendering import Rendered, rendered, served
from parrot.gateway.conversations.sessions import ProgramSessions
from parrot.gateway.conversations.turn import PromptSource, Turn, TurnRequest
from parrot.gateway.prompts.conversation import (
    TokenPrompt,
    prompt_of_tokens,
    prompt_tokens,
    require_fits,
    text_of_tokens,
)
from parrot.serve.core import ServeCore
from parrot.serve.graph.build import Prompt as CallPrompt
from parrot.serve.graph.nodes import CallOptions, CompletionState, PieceKind, TextPiece
from parrot.serve.sessions import AddPrompt, Session


class Turns:
    """Stands on a core, whose sessions it begins for programs that begin none themselves."""

    def __init__(self, core: ServeCore) -> None:
        self._core = core
        self._observed = ObservedTurns(core)
        self._sessions = ProgramSessions(core, self._observed.began)
        self._doctor = PrefixDoctor(core.config.prefix_repair, core.prefix_broken)
        self._aliases = core.config.model_aliases
        self._chains = Chains(core, self._sessions, self._observed)
        self._endings = Endings()
        core.attach(self)

    def check_integrity(self) -> None:
        self._sessions.check_integrity()

    def submit(self, request: TurnRequest) -> Turn:
        """Raises `NotFound` for the model, `InvalidRequest`, `QuotaExceeded` and `QueueFull`, and
        if it is chained what `Chains.submit` raises."""
        if request.model in self._aliases:
            request = replace(request, model=self._aliases[request.model])
        if request.chain is not None:
            return self._chains.submit(request, request.chain)
        if not request.is_resumed:
            self._core.tasks.require_room(request.tenant)
        request = replace(request, prompt=self._doctor.repaired(request.prompt))
        shown, samplings, make_parser, conversation = self._rendered(request)
        text = shown.text
        limit = self._longest(request.model)
        require_fits(text, self._core.fleet.tokenizer(request.model), limit)  # before it is kept
        prompt = _prompt(request, text)
        place = None
        if not isinstance(request.prompt, str):  # which nothing continues
            place = self._endings.find(prompt, _scope(request), self._sessions.is_live)
        ending, num_known = (None, 0) if place is None else (place.ending, place.num_known)
        fill = shown.pieces(0 if ending is None else ending.length, num_known)
        if request.tokens is not None:
            fill = [TextPiece(text, PieceKind.TOKENS, request.tokens)]
        usage = usage_of(fill, len(request.samplings), request.prediction)
        if ending is None:
            quoted = self._doctor.program_of(request.tenant, prompt)
            session = self._sessions.with_room(request.tenant, request.program, usage, quoted)
        else:
            session = self._sessions.use(ending.session_id)
            session.account.require(**usage)
        session.require_room()
        left = self._doctor.examine(session.id, prompt, is_continued=ending is not None)
        options = CallOptions(
            func_name=request.func_name,
            models=(request.model,),
            cache_prefix=not isinstance(request.prompt, str),
            tenant=request.tenant,
            cache_salt=session.graph.cache_salt,
            remark="" if left is None else f"prefix: {left}",
            prediction=request.prediction,
            traceparent=request.traceparent,
        )
        previous = None if ending is None else ending.completion
        asked = CallPrompt(tuple(fill), samplings, options, previous, conversation=conversation)
        request_id, completions = session.apply(AddPrompt(asked, usage, is_kept=False))
        self._observed.submitted(session, completions)
        prefix = "new" if ending is None else "continued"
        return Turn(
            session,
            request_id,
            completions,
            place,
            self._core.reads,
            request.criteria,
            make_parser,
            prefix if left is None else left.summary,
            request.deadline,
        )

    def _longest(self, model: str) -> int | None:
        """Tokens of the longest sequence that an engine of the model takes; None: there is none."""
        fleet = self._core.fleet
        return max([e.max_len for e in fleet if e.info.model == model], default=None)

    def _takes_messages(self, model: str) -> bool:
        """Whether a server behind an engine of the model renders conversations."""
        fleet = self._core.fleet
        able = [e.info.capabilities.features for e in fleet if e.info.model == model]
        return any("messages" in (features or ()) for features in able)

    def _rendered(self, request: TurnRequest) -> Rendered:
        tokenizer = self._core.fleet.tokenizer(request.model)
        is_text = tokenizer is None and not isinstance(request.prompt, str)
        if is_text and self._takes_messages(request.model):
            return served(request)
        return rendered(request, request.prompt, tokenizer)

    async def count_tokens(
        self, model: str, prompt: PromptSource, options: Mapping[str, Any]
    ) -> int:
        """Raises as `tokens` does."""
        return len(await self.tokens(model, prompt, options))

    async def tokens(
        self, model: str, prompt: PromptSource, options: Mapping[str, Any]
    ) -> list[int]:
        """The ids of a prompt. Raises as `submit` does, and `UnsupportedField` if the engines of
        the model take text."""
        model = self._aliases.get(model, model)
        return await prompt_tokens(prompt, options, model, self._core.fleet.tokenizer(model))

    async def prompt_of(self, model: str, ids: Sequence[int]) -> TokenPrompt:
        """The `prompt` and `tokens` of a `TurnRequest` for a prompt of these tokens. Raises as
        `tokens` does, and `InvalidRequest`."""
        model = self._aliases.get(model, model)
        return await prompt_of_tokens(ids, model, self._core.fleet.tokenizer(model))

    async def text(self, model: str, ids: Sequence[int]) -> str:
        """The text that the ids stand for. Raises as `tokens` does."""
        model = self._aliases.get(model, model)
        return await text_of_tokens(ids, model, self._core.fleet.tokenizer(model))

    def remember(self, turn: Turn, choice: int, message: Mapping[str, Any]) -> None:
        """The program will send `message` for this answer if it goes on, perhaps without the
        reasoning."""
        completion = turn.completions[choice]
        if turn.place is None or completion.state is not CompletionState.DONE:
            return
        bare = {name: field for name, field in message.items() if name != "reasoning_content"}
        for shown in (message, bare) if len(bare) < len(message) else (message,):
            self._endings.put(turn.place, turn.session, completion, shown)
            self._doctor.remember_answer(completion.options.tenant, turn.session.id, shown)

    def restore_ending(self, session_id: str, fields: Mapping[str, Any]) -> None:
        """Remember what a record of the journal tells of a session."""
        session = self._core.sessions.find(int(session_id))
        assert session is not None, session_id
        self._endings.restore(session, fields)

    def restored(self) -> None:
        """The sessions are as they were before a restart."""
        for session in self._core.sessions:
            if session.is_program:
                self._sessions.restore(session)

    def forget(self, session: Session) -> None:
        """A session has ended."""
        self._doctor.forget(session.id)
        self._endings.forget(session.id)
        self._sessions.forget(session)


def _prompt(request: TurnRequest, text: str) -> Prompt:
    messages = () if isinstance(request.prompt, str) else request.prompt
    return Prompt(messages, request.options, text)


def _scope(request: TurnRequest) -> Mapping[str, Any]:
    """The other things that are equal in conversations that go on."""
    return {"tenant": request.tenant, "model": request.model, "options": request.options}
