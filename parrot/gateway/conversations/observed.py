"""Turns as observers see them: as semantic calls, and reads of their outputs."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from parrot.protocol.public import (
    CallParameter,
    CallResponse,
    ParameterInfo,
    SemanticCallRequest,
    SessionCreateRequest,
)
from parrot.protocol.template import placeholder
from parrot.serve.core import ServeCore
from parrot.serve.graph.nodes import Completion, Piece, TextPiece
from parrot.serve.sessions import Session


class ObservedTurns:
    """Tells observers of the sessions that are begun for programs, and of what is submitted."""

    def __init__(self, core: ServeCore) -> None:
        self._observers = core.observers

    def began(self, session: Session) -> None:
        """A session that its program knows nothing of."""
        request = SessionCreateRequest(on_demand=True)
        self._observers.tell(lambda one: one.session_created(session, request))

    def submitted(
        self, session: Session, completions: Sequence[Completion], *, is_bound: bool = False
    ) -> None:
        """`is_bound`: the request named the variable of the output."""
        for completion in completions:
            self._submitted(session, completion, is_bound)

    def _submitted(self, session: Session, completion: Completion, is_bound: bool) -> None:
        self._observers.tell(
            lambda one: one.call_submitted(session, *_as_call(session, completion, is_bound))
        )


def _as_call(
    session: Session, completion: Completion, is_bound: bool
) -> tuple[SemanticCallRequest, CallResponse]:
    """The completion as a call that was submitted with its texts as values: a text in a template
    might be taken for a placeholder."""
    parameters: list[CallParameter] = []
    described: list[ParameterInfo] = []

    def add(name: str, var_id: str, parameter: CallParameter) -> None:
        parameters.append(parameter)
        described.append(
            ParameterInfo(
                parameter_name=name,
                is_output=parameter.is_output,
                var_name=name,
                var_id=var_id,
            )
        )

    for i, piece in enumerate(_merged(completion.fill)):
        name = f"piece_{i}"
        if isinstance(piece, TextPiece):
            add(name, "", CallParameter(name=name, value=piece.text))
        else:
            var_id = piece.variable.id
            add(name, var_id, CallParameter(name=name, var_id=var_id))
    output = completion.output
    bound_id = output.id if is_bound else None
    sampling = completion.sampling
    add(
        "answer",
        output.id,
        CallParameter(name="answer", is_output=True, var_id=bound_id, sampling_config=sampling),
    )
    call = SemanticCallRequest(
        session_id=session.id,
        template="".join(placeholder(parameter.name) for parameter in parameters),
        parameters=parameters,
        func_name=completion.options.func_name,
        models=list(completion.options.models),
        cache_prefix=completion.options.cache_prefix,
        on_demand=not completion.is_held,
        successor_of=None if completion.previous is None else completion.previous.request_id,
    )
    return call, CallResponse(request_id=completion.request_id, param_info=described)


def _merged(fill: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces with texts that follow each other as one."""
    for is_text, pieces in groupby(fill, key=lambda piece: isinstance(piece, TextPiece)):
        if is_text:
            yield TextPiece("".join(p.text for p in pieces if isinstance(p, TextPiece)))
        else:
            yield from pieces
