"""Definitions: the prompt of a semantic function, and the source of a native function."""

import ast
import builtins
import inspect
import symtable
import textwrap
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Self

from parrot.frontend.pfunc.attempts import Attempts
from parrot.frontend.pfunc.function_body import (
    Parameter,
    ParameterLoc,
    Signature,
    check_body,
    parse_body,
    without_pure_fill,
)
from parrot.frontend.pfunc.metadata import NativeFuncMetadata, SemanticFuncMetadata
from parrot.frontend.pfunc.sampling import SamplingConfig
from parrot.frontend.pfunc.template_errors import parameter_line, template_line
from parrot.protocol.template import placeholder


class SemanticDefinition(Signature):
    """A prompt template with inputs and outputs, and the attempts of its calls."""

    def __init__(
        self,
        name: str,
        params: Sequence[Parameter],
        func_body_str: str,
        metadata: SemanticFuncMetadata,
    ) -> None:
        """Raises `ValueError` for a template that cannot work."""
        super().__init__(name, params)
        self.metadata = metadata
        body = parse_body(func_body_str, self.params_map)
        check_body(body, self.params)
        self.body = without_pure_fill(body) if self.metadata.remove_pure_fill else body
        self.attempts = Attempts()
        self.pyfunc: Callable[..., Any] | None = None
        """The decorated function, if any. Errors show lines of its source."""

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
        """The parameters in the order of their placeholders in the template."""
        return [piece.param for piece in self.body if isinstance(piece, ParameterLoc)]

    def to_template_str(self) -> str:
        return "".join(piece.text for piece in self.body)

    def with_template(self, template: str) -> Self:
        """A copy with other constants. Raises `ValueError` if the placeholders differ."""
        new = copy(self)
        new.body = parse_body(template, self.params_map)
        if new.locations != self.locations:
            raise ValueError(
                f"a transform of `{self.name}` may change only constants of the template"
            )
        return new

    def with_metadata(self, **changes: Any) -> Self:
        new = copy(self)
        new.metadata = self.metadata.model_copy(update=changes)
        return new


class NativeDefinition(Signature):
    """Python code that ServeCore runs in a sandbox. Only `source` is sent."""

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
        raise ValueError(
            f"native function `{name}`: output `{param.name}` cannot have a sampling_config"
        )
    return replace(param, sampling_config=None)


def _source_of(pyfunc: Callable[..., Any]) -> str:
    """The source text of a native function for ServeCore: the `def` without decorators,
    annotations, defaults and indentation.

    Raises `ValueError` for code that cannot run there: a lambda, a coroutine, code without source
    text, or code that uses names from outside the function."""
    name = getattr(pyfunc, "__name__", repr(pyfunc))
    if not inspect.isfunction(pyfunc) or name == "<lambda>":
        raise ValueError(f"native function `{name}` must be made with `def`")
    if inspect.iscoroutinefunction(pyfunc) or inspect.isgeneratorfunction(pyfunc):
        raise ValueError(f"native function `{name}` must be a plain function, not async or `yield`")
    definition = _definition(pyfunc)
    definition.decorator_list = []
    definition.returns = None
    definition.args.defaults = []  # The front end fills in defaults.
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
    """Names that the code uses but neither defines nor finds in the builtins."""
    tables = list(symtable.symtable(source, "<native function>", "exec").get_children())
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() and not hasattr(builtins, symbol.get_name()):
                yield symbol.get_name()
