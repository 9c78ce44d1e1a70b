"""The decorators that make functions."""

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

from parrot.frontend.pfunc.annotations import (
    Input,
    Output,
    Returned,
    constraint_problem,
    returned_outputs,
    role_of,
)
from parrot.frontend.pfunc.attempts import Attempts
from parrot.frontend.pfunc.function import BasicFunction, PyNativeFunction, SemanticFunction
from parrot.frontend.pfunc.function_body import Parameter, ParamType, output_names
from parrot.frontend.pfunc.metadata import Criteria, NativeFuncMetadata, parse_metadata
from parrot.frontend.pfunc.semantic_variable import SemanticVariable, current_session, register
from parrot.frontend.pfunc.template_errors import TemplateError
from parrot.frontend.pfunc.transforms import FuncMutator
from parrot.frontend.pfunc.transforms.prompt_formatter import standard_formatter

Given = ParamSpec("Given")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")

_NAMED_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_NO_RETURN = "has a return annotation: its outputs must be parameters"
_NO_RETURNS = (inspect.Signature.empty, None, "None")


class Decorator(Protocol):
    """Makes a semantic function of a `def`."""

    @overload
    def __call__(self, pyfunc: Callable[..., None], /) -> SemanticFunction[..., Any]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, pyfunc: Callable[Given, Returned[tuple[A, B]] | None], /
    ) -> SemanticFunction[Given, tuple[SemanticVariable[A], SemanticVariable[B]]]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, pyfunc: Callable[Given, Returned[tuple[A, B, C]] | None], /
    ) -> SemanticFunction[
        Given, tuple[SemanticVariable[A], SemanticVariable[B], SemanticVariable[C]]
    ]: ...
    @overload
    def __call__(
        self, pyfunc: Callable[Given, Returned[T] | None], /
    ) -> SemanticFunction[Given, SemanticVariable[T]]: ...
    def __call__(self, pyfunc: Callable[..., Any], /) -> Any: ...


@overload
def semantic_function(pyfunc: Callable[..., Any], /) -> SemanticFunction[..., Any]: ...
@overload
def semantic_function(
    formatter: FuncMutator | None = standard_formatter,
    conversation_template: FuncMutator | None = None,
    try_register: bool = True,
    retries: int = 0,
    feed_back: bool = False,
    fallback: BasicFunction[..., Any] | None = None,
    attempt_timeout: float | None = None,
    **metadata: Any,
) -> Decorator: ...
def semantic_function(
    formatter: FuncMutator | Callable[..., Any] | None = standard_formatter,
    conversation_template: FuncMutator | None = None,
    try_register: bool = True,
    retries: int = 0,
    feed_back: bool = False,
    fallback: BasicFunction[..., Any] | None = None,
    attempt_timeout: float | None = None,
    **metadata: Any,
) -> Any:
    """Make a semantic function from a `def` whose docstring is a prompt with `{{placeholders}}`.
    Without options, `@P.semantic_function` needs no parentheses. docs/python_api.md explains all
    options in "Function options".

    Raises `ValueError` at decoration if the function has no docstring, or a return type other than
    None and `P.Returns`. The same error is raised for an unknown placeholder, and for an output
    that is the first part of the prompt, follows another output directly, has two places or has no
    place. Raises `TypeError` for an unknown option."""
    if inspect.isfunction(formatter):  # The decorator was used without parentheses.
        return semantic_function()(formatter)
    mutators: list[FuncMutator] = []
    for mutator in (formatter, conversation_template):
        if isinstance(mutator, FuncMutator):
            mutators.append(mutator)
        elif mutator is not None:
            raise TypeError(f"{mutator!r} is not a transform such as P.chat_template")

    def decorate(pyfunc: Callable[..., Any]) -> SemanticFunction:
        name = _name_of(pyfunc)
        if not pyfunc.__doc__:
            raise ValueError(f"`{name}` has no docstring: the docstring is the prompt")
        try:
            params = _semantic_parameters(pyfunc, pyfunc.__doc__)
            func = SemanticFunction(name, params, pyfunc.__doc__, try_register, **metadata)
            func.attempts = Attempts(retries, feed_back, fallback, attempt_timeout)
            func.attempts.check(func)
        except TemplateError as error:
            raise ValueError(f"semantic function `{name}`: {error.shown(pyfunc)}") from None
        except (TypeError, ValueError) as error:
            about = f"semantic function `{name}`: "
            raise type(error)(about + str(error).removeprefix(about)) from None
        func.pyfunc = pyfunc
        update_wrapper(func, pyfunc)  # For `help`, and `?` in notebooks.
        for mutator in mutators:
            func = mutator.transform(func)
        return func

    return cast("Decorator", decorate)


def native_function(
    timeout: float = 1.0,
    output_criteria: Criteria | None = None,
    on_demand: bool | None = None,
) -> Callable[[Callable[..., Any]], PyNativeFunction]:
    """Make a native function from a `def` that takes strings and sets its outputs with
    `out.set(text)`.

    ServeCore runs the function in a sandbox, for at most `timeout` seconds. Raises `ValueError` at
    decoration for code that cannot run there: a lambda, an `async def`, code without source text,
    or names from outside the function."""
    if not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be seconds, not {timeout!r}: write `@P.native_function()`")
    options = {"timeout": timeout, "output_criteria": output_criteria, "on_demand": on_demand}
    metadata = parse_metadata(NativeFuncMetadata, options)

    def decorate(pyfunc: Callable[..., Any]) -> PyNativeFunction:
        if _return_annotation(pyfunc) is not None:
            raise ValueError(f"native function `{_name_of(pyfunc)}` {_NO_RETURN}")
        func = PyNativeFunction(_name_of(pyfunc), pyfunc, _parameters(pyfunc), metadata)
        update_wrapper(func, pyfunc)
        return func

    return decorate


def variable(name: str | None = None, content: str | None = None) -> SemanticVariable:
    """Create a variable. The program sets its value now (`content`) or later, or passes the
    variable to a call as an output. The variable belongs to the current session. Outside a
    session, it belongs to the session that uses it first."""
    var = SemanticVariable(name, None if content is None else str(content))
    if (session := current_session.get()) is not None:
        # Imports asyncio, which a session has already loaded.
        from parrot.frontend.pfunc.batch import batch_of

        batch = batch_of(session)
        session.loop.run(register(session, var) if batch is None else batch.declare(var))
    return var


def _name_of(pyfunc: Callable[..., Any]) -> str:
    return getattr(pyfunc, "__name__", repr(pyfunc))


def _semantic_parameters(pyfunc: Callable[..., Any], template: str) -> list[Parameter]:
    """The parameters of the signature, and the outputs in `P.Returns`."""
    params = _parameters(pyfunc)
    annotation = _return_annotation(pyfunc)
    if annotation is None:
        return params
    outputs = returned_outputs(annotation, pyfunc)
    if outputs is None:
        shown = (
            inspect.formatannotation(annotation) if not isinstance(annotation, str) else annotation
        )
        raise ValueError(f"return type `{shown}`: write `-> P.Returns[{shown}]`")
    if any(param.is_output for param in params):
        raise ValueError("its outputs are parameters or those of P.Returns, not both")
    names = output_names(template, [param.name for param in params], len(outputs))
    return [*params, *map(_output, names, outputs)]


def _return_annotation(pyfunc: Callable[..., Any]) -> Any:
    """The return annotation. None without one."""
    annotation = inspect.signature(pyfunc).return_annotation
    return None if annotation in _NO_RETURNS else annotation


def _parameters(pyfunc: Callable[..., Any]) -> list[Parameter]:
    params = []
    for param in inspect.signature(pyfunc).parameters.values():
        if param.kind not in _NAMED_KINDS:
            raise ValueError(f"`{_name_of(pyfunc)}`: parameter `{param}` cannot be passed by name")
        role = role_of(param.annotation, pyfunc, param.name)
        if isinstance(role, Output):
            params.append(_output(param.name, role, param.default))
        else:
            typ = ParamType.INPUT_LOC if role is Input else ParamType.INPUT_PYOBJ
            params.append(Parameter(param.name, typ, default=param.default))
    return params


def _output(name: str, output: Output, default: Any = inspect.Parameter.empty) -> Parameter:
    if (problem := constraint_problem(output.sampling_config)) is not None:
        raise ValueError(f"output `{name}`: {problem}")
    return Parameter(name, ParamType.OUTPUT_LOC, output.sampling_config, default, output.model)
