"""Chained turns: prompts with variables of a session in them, and answers that are variables.

    turn 1    "Summarize ..."            answer: variable a        nobody waits for it
    turn 2    "Join: {{first}}"          first = a, which is not there yet

So a program that speaks a chat API submits its whole graph, and no text goes through it in between.
"""

from collections.abc import Sequence

from parrot.gateway.conversations.observed import ObservedTurns
from parrot.gateway.conversations.rendering import rendered
from parrot.gateway.conversations.sessions import ProgramSessions
from parrot.gateway.conversations.turn import Chain, Turn, TurnRequest
from parrot.gateway.prompts.placeholders import mark_places, put_variables
from parrot.protocol.errors import InvalidRequest, NotFound
from parrot.serve.core import ServeCore
from parrot.serve.graph.build import Prompt
from parrot.serve.graph.nodes import CallOptions, Completion, Piece, Reader, TextPiece
from parrot.serve.graph.variable import SemanticVariable
from parrot.serve.sessions import AddPrompt, Session
from parrot.serve.tenants.quotas import num_bytes

_TOKEN_BYTES = 40  # of a token that a program chose itself


class Chains:
    """Submits chained turns."""

    def __init__(self, core: ServeCore, programs: ProgramSessions, observed: ObservedTurns) -> None:
        self._core = core
        self._programs = programs
        self._observed = observed

    def submit(self, request: TurnRequest, chain: Chain) -> Turn:
        """Raises as `Turns.submit` does, `AuthenticationFailed` and `SessionGone`, and for the
        variable of the output `AlreadySet`, `Conflict` and `CyclicGraph`."""
        if chain.output is not None and len(request.samplings) > 1:
            raise InvalidRequest("there is one output, but many answers", param="parrot.output")
        tokenizer = self._core.fleet.tokenizer(request.model)
        marked = mark_places(request.prompt, list(chain.inputs))
        shown, samplings, make_parser, _ = rendered(request, marked.prompt, tokenizer)
        session = self._session(request, chain)
        self._core.tasks.require_room(session.tenant)
        inputs = {
            name: _known(session, var_id, f"parrot.inputs.{name}")
            for name, var_id in chain.inputs.items()
        }
        fill = tuple(put_variables(shown.pieces(), marked, inputs))
        output = None
        if chain.output is not None:
            output = _known(session, chain.output, "parrot.output")
        usage = usage_of(fill, 0 if output else len(request.samplings), request.prediction)
        session.require_room()
        session.account.require(**usage)
        options = CallOptions(
            func_name=request.func_name,
            models=(request.model,),
            cache_prefix=not isinstance(request.prompt, str),
            tenant=session.tenant,
            cache_salt=session.graph.cache_salt,
            prediction=request.prediction,
            traceparent=request.traceparent,
        )
        is_own = self._programs.is_live(session.id)
        is_kept = not is_own or output is not None or chain.is_deferred
        prompt = Prompt(fill, samplings, options, output=output, is_held=chain.is_deferred)
        request_id, completions = session.apply(AddPrompt(prompt, usage, is_kept))
        self._observed.submitted(session, completions, is_bound=output is not None)
        if chain.is_deferred:
            self._begin(session, completions, chain)
        return Turn(
            session,
            request_id,
            completions,
            None,
            self._core.reads,
            request.criteria,
            make_parser,
            "chained",
            request.deadline,
            is_kept=is_kept,
        )

    def _session(self, request: TurnRequest, chain: Chain) -> Session:
        if chain.session_id is not None:
            try:
                return self._core.sessions.authenticate(chain.session_id, chain.session_auth)
            except NotFound as error:
                raise InvalidRequest(error.message, param="parrot.session_id") from None
        if request.program is None:
            raise InvalidRequest(
                "a chained call names its session, or its program by `prompt_cache_key`",
                param="parrot.session_id",
            )
        return self._programs.with_room(request.tenant, request.program, {})

    def _begin(self, session: Session, completions: Sequence[Completion], chain: Chain) -> None:
        """Nobody reads it yet: it runs when what the program holds does, or at once as wanted."""
        self._core.wake_soon(session)
        if chain.criteria is None:
            return
        deadline = None if chain.deadline is None else self._core.clock.now() + chain.deadline
        for completion in completions:
            if not completion.output.is_settled:
                session.graph.activation.add_reader(
                    Reader(completion.output, chain.criteria, deadline)
                )


def usage_of(fill: Sequence[Piece], num_new: int, prediction: str) -> dict[str, int]:
    """The amounts that a session keeps for a call with this prompt and its new variables."""
    pieces = [piece for piece in fill if isinstance(piece, TextPiece)]
    size = num_bytes([prediction, *(piece.text for piece in pieces)])
    size += sum(_TOKEN_BYTES * len(p.tokenized.ids) for p in pieces if p.tokenized is not None)
    return {"calls": 1, "variables": num_new, "text_bytes": size}


def _known(session: Session, var_id: str, param: str) -> SemanticVariable:
    variable = session.graph.variables.get(var_id)
    if variable is None:
        raise InvalidRequest(f"the session has no variable `{var_id:.80}`", param=param)
    return variable
