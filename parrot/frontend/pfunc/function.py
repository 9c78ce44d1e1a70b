"""Functions of the front end: prompts (`SemanticFunction`) and code (`PyNativeFunction`)."""

import ast
import builtins
import inspect
import symtable
import textwrap
from collections.abc import Callable, Coroutine, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, cast

from typing_extensions import ParamSpec, TypeVar

from parrot.frontend.pfunc.attempts import Attempts
from parrot.frontend.pfunc.call import BasicCall, PyNativeCall, SemanticCall
from parrot.frontend.pfunc.function_body import (
    Constant,
    FuncBodyPiece,
    Parameter,
    ParameterLoc,
    ParamType,
    check_body,
    parse_body,
    without_pure_fill,
)
from parrot.frontend.pfunc.metadata import (
    NativeFuncMetadata,
    SemanticFuncMetadata,
    parse_metadata,
)
from parrot.frontend.pfunc.semantic_variable import batch_of
from parrot.frontend.pfunc.template_errors import parameter_line, template_line
from parrot.protocol.errors import InvalidRequest
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.template import placeholder

if TYPE_CHECKING:
    from parrot.frontend.pfunc.batch import Batch
    from parrot.frontend.pfunc.session import Session

Given = ParamSpec("Given", default=...)
"""The parameters of a call, as type checkers know them."""
Result = TypeVar("Result", covariant=True, default=Any)
"""The result of a call: a variable, or a tuple of them."""

__all__ = [
    "BasicCall",
    "BasicFunction",
    "Constant",
    "FuncBodyPiece",
    "ParamType",
    "Parameter",
    "ParameterLoc",
    "PyNativeCall",
    "PyNativeFunction",
    "SemanticCall",
    "SemanticFunction",
]


class BasicFunction(Generic[Given, Result]):
    """Calling it submits a call to the current session and returns its output variables, without
    waiting for their values. Outside a session the call itself is returned.

    Positional arguments are the inputs in order; keywords may also give variables to outputs."""

    call_type: ClassVar[type[BasicCall]]

    def __init__(self, name: str, params: Sequence[Parameter]) -> None:
        self.name = name
        self.params = list(params)
        self.params_map = {param.name: param for param in self.params}
        if len(self.params_map) < len(self.params):
            raise ValueError(f"function `{name}` has two parameters of the same name")
        self.inputs = [param for param in self.params if not param.is_output]
        self.outputs = [param for param in self.params if param.is_output]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.display_signature()}>"

    def __call__(self, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return self.invoke(*args, **kwargs)

    def invoke(self, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Submit a call; waits for ServeCore to accept it, not for it to run."""
        call = self.call_type(self, args, kwargs)
        session = call.session
        if session is None:
            return cast("Result", call)
        return session.loop.run(self._submit(session, call, batch_of(session)))

    async def ainvoke(self, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Submit a call without holding up the event loop: many may be on their way at once."""
        call = self.call_type(self, args, kwargs)
        session = call.session
        if session is None:
            return cast("Result", call)
        return await session.loop.arun(self._submit(session, call, batch_of(session)))

    def display_signature(self) -> str:
        return f"{self.name}({', '.join(f'{p.name}: {p.typ.name}' for p in self.params)})"

    def line_of(self, param: Parameter) -> str:
        """Where its code names the parameter, behind a line break; "" if that is not known."""
        return ""

    async def _submit(self, session: "Session", call: BasicCall, batch: "Batch | None") -> Result:
        if batch is None:
            await session.submit(call, {})
        else:
            await batch.add(call)
        return cast("Result", call.returned)


class SemanticFunction(BasicFunction[Given, Result]):
    """A prompt template with inputs and outputs."""

    call_type = SemanticCall

    def __init__(
        self,
        name: str,
        params: Sequence[Parameter],
        func_body_str: str,
        try_register: bool = True,
        **metadata: Any,
    ) -> None:
        """`try_register` has no effect: functions need no registration. Raises `ValueError` for a
        template that cannot work and `TypeError` for unknown metadata."""
        super().__init__(name, params)
        self.metadata = parse_metadata(SemanticFuncMetadata, metadata)
        body = parse_body(func_body_str, self.params_map)
        check_body(body, self.params)
        self.body = without_pure_fill(body) if self.metadata.remove_pure_fill else body
        self.attempts = Attempts()
        self.pyfunc: Callable[..., Any] | None = None
        """The function that it was made of, if any: where errors find its template's lines."""

    def line_of(self, param: Parameter) -> str:
        template = self.to_template_str()
        if self.pyfunc is not None:
            template = self.pyfunc.__doc__ or ""
        start = template.find(mark := placeholder(param.name))
        if start < 0:
            return parameter_line(self.pyfunc, param.name)
        return template_line(self.pyfunc, template, start, start + len(mark))

    @property
    def locations(self) -> list[Parameter]:
        """The parameters in the order of their places in the template."""
        return [piece.param for piece in self.body if isinstance(piece, ParameterLoc)]

    def to_template_str(self) -> str:
        return "".join(piece.text for piece in self.body)

    def with_template(self, template: str) -> Self:
        """A copy with other constants. Raises `ValueError` if the placeholders are not the same as
        before."""
        new = copy(self)
        new.body = parse_body(template, self.params_map)
        if new.locations != self.locations:
            raise ValueError(f"a transform of `{self.name}` changes more than its constants")
        return new

    def with_metadata(self, **changes: Any) -> Self:
        new = copy(self)
        new.metadata = self.metadata.model_copy(update=changes)
        return new

    def with_options(
        self,
        *,
        retries: int | None = None,
        feed_back: bool | None = None,
        fallback: BasicFunction[..., Any] | None = None,
        attempt_timeout: float | None = None,
        **metadata: Any,
    ) -> Self:
        """A copy with other options of `@P.semantic_function`; None leaves one as it is. To call a
        function once with other options: `f.with_options(retries=2)(...)`."""
        if "remove_pure_fill" in metadata:
            raise TypeError("`remove_pure_fill` is of a function's definition")
        parsed = parse_metadata(SemanticFuncMetadata, metadata)
        new = self.with_metadata(**{name: getattr(parsed, name) for name in metadata})
        old = self.attempts
        new.attempts = Attempts(
            old.retries if retries is None else retries,
            old.feed_back if feed_back is None else feed_back,
            fallback or old.fallback,
            old.timeout if attempt_timeout is None else attempt_timeout,
        )
        new.attempts.check(new)
        return new

    def invoke_statefully(
        self, /, context_successor: "SemanticFunction", *args: Any, **kwargs: Any
    ) -> Result:
        """Call, and keep the whole context (prompt and outputs): the next call of
        `context_successor` in this session continues it, as if its prompt stood right behind.

        Text after the last output, or of a function without outputs, comes before the successor's.
        Calls of `invoke` and of `invoke_statefully` both continue a context that was kept for their
        function; only the latter keep theirs."""
        session, submitting = self._stateful(SemanticCall(self, args, kwargs), context_successor)
        return session.loop.run(submitting)

    async def ainvoke_statefully(
        self, /, context_successor: "SemanticFunction", *args: Any, **kwargs: Any
    ) -> Result:
        """The same as `invoke_statefully` for async code."""
        session, submitting = self._stateful(SemanticCall(self, args, kwargs), context_successor)
        return await session.loop.arun(submitting)

    def _stateful(
        self, call: SemanticCall, successor: object
    ) -> "tuple[Session, Coroutine[Any, Any, Result]]":
        if not isinstance(successor, SemanticFunction):
            raise TypeError("context_successor must be a semantic function")
        session = call.session
        if session is None:
            raise InvalidRequest("stateful calls need a session: use them in vm.running_scope()")
        return session, self._submit(session, call, batch_of(session), successor)

    async def _submit(
        self,
        session: "Session",
        call: BasicCall,
        batch: "Batch | None",
        successor: "SemanticFunction | None" = None,
    ) -> Result:
        """A context that was kept for this function is used up only if the call is accepted. A call
        that goes on with one, or keeps one, is sent at once, after all that was made before it."""
        if successor is None and not self.outputs:
            raise InvalidRequest(f"`{self.name}` has no output: call it with invoke_statefully")
        if self.attempts.are_many:
            if successor is not None or self in session.contexts:
                raise InvalidRequest(
                    f"`{self.name}` has retries or a fallback: it keeps no context"
                )
            from parrot.frontend.pfunc.trials import submit_trial

            await submit_trial(session, cast("SemanticCall", call), batch)
            return cast("Result", call.returned)
        if successor is None and self not in session.contexts:
            return await super()._submit(session, call, batch)
        predecessor = session.contexts.pop(self, None)
        overrides: dict[str, Any] = {}
        if successor is not None:  # which is to see what follows the last output
            overrides["remove_pure_fill"] = False
        if predecessor is not None:  # the chat has begun with a system message, or without
            overrides |= {"successor_of": predecessor, "system": None}
        try:
            if batch is not None:
                await batch.send()
            request_id = await session.submit(call, overrides)
        except BaseException:
            if predecessor is not None:
                session.contexts.setdefault(self, predecessor)
            raise
        if successor is not None:
            session.contexts[successor] = request_id
        return cast("Result", call.returned)


class PyNativeFunction(BasicFunction):
    """Python code that ServeCore runs in a sandbox. `source` is all that travels."""

    call_type = PyNativeCall

    def __init__(
        self,
        name: str,
        pyfunc: Callable[..., Any],
        params: Sequence[Parameter],
        metadata: NativeFuncMetadata | None = None,
    ) -> None:
        super().__init__(name, [_without_sampling(name, param) for param in params])
        if not self.outputs:
            raise ValueError(f"native function `{name}` has no output")
        self.metadata = metadata or NativeFuncMetadata()
        self.source = _source_of(pyfunc)


def _without_sampling(name: str, param: Parameter) -> Parameter:
    if param.sampling_config not in (None, SamplingConfig()):
        raise ValueError(f"native function `{name}`: nothing is sampled for `{param.name}`")
    return replace(param, sampling_config=None)


def _source_of(pyfunc: Callable[..., Any]) -> str:
    """The source text of a native function, as it travels to ServeCore: the `def` alone, without
    decorators, annotations, defaults or indentation.

    Raises `ValueError` for what cannot travel: a lambda, a coroutine, code without source text,
    anything that uses names from outside itself."""
    name = getattr(pyfunc, "__name__", repr(pyfunc))
    if not inspect.isfunction(pyfunc) or name == "<lambda>":
        raise ValueError(f"native function `{name}` must be made with `def`")
    if inspect.iscoroutinefunction(pyfunc) or inspect.isgeneratorfunction(pyfunc):
        raise ValueError(f"native function `{name}` must be a plain function, not async or `yield`")
    definition = _definition(pyfunc)
    definition.decorator_list = []
    definition.returns = None
    definition.args.defaults = []  # the caller fills in defaults
    definition.args.kw_defaults = [None] * len(definition.args.kwonlyargs)
    for arg in ast.walk(definition.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    source = ast.unparse(ast.Module([definition], []))
    if outside := sorted(set(_free_names(source)) - {name}):
        raise ValueError(
            f"native function `{name}` uses `{outside[0]}` from outside itself: it runs alone in "
            "ServeCore, so import inside it and pass values as inputs"
        )
    return source


def _definition(pyfunc: Callable[..., Any]) -> ast.FunctionDef:
    try:
        source = textwrap.dedent(inspect.getsource(pyfunc))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError) as error:
        raise ValueError(
            f"the source text of native function `{pyfunc.__name__}` cannot be found: {error}"
        ) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == pyfunc.__name__:
            return node
    raise ValueError(f"native function `{pyfunc.__name__}` must be made with `def`")


def _free_names(source: str) -> Iterator[str]:
    """Names that the code takes from neither itself nor the builtins."""
    tables = list(symtable.symtable(source, "<native function>", "exec").get_children())
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() and not hasattr(builtins, symbol.get_name()):
                yield symbol.get_name()
