"""A tool: a Python function with its description for a model."""

import asyncio
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from functools import update_wrapper
from math import inf
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import ArgsKwargs, to_json

logger = logging.getLogger("parrot.frontend.pfunc")

Given = ParamSpec("Given")
Result = TypeVar("Result", covariant=True)

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}")
_NAMED_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_MAX_CHARS = 20_000
_TIMEOUT = 600.0
# Google's docstring style ("Args:" with lines "name: text" or "name (type): text"), and Sphinx's.
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_GOOGLE = re.compile(r"^(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_SPHINX = re.compile(r"^\s*:(param|return|returns|raises|rtype|type)\b[^:]*?(\w*)\s*:\s*(.*)$")


class Tool(Generic[Given, Result]):
    """A function that a model may call. The program can call it too, like the function."""

    def __init__(
        self,
        pyfunc: Callable[Given, Result],
        *,
        name: str | None = None,
        description: str | None = None,
        max_chars: int = _MAX_CHARS,
        timeout: float = _TIMEOUT,
    ) -> None:
        """See `P.tool`."""
        update_wrapper(self, pyfunc)
        self.pyfunc = pyfunc
        self.name = name or str(getattr(pyfunc, "__name__", ""))
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"`{self.name}` cannot be the name of a tool: set `name=`")
        if max_chars < 1:
            raise ValueError(f"tool `{self.name}`: max_chars must be at least 1")
        if not 0 < timeout < inf:
            raise ValueError(f"tool `{self.name}`: timeout must be a positive number of seconds")
        self.max_chars = max_chars
        self.timeout = timeout
        about, of_parameters = _read_docstring(inspect.getdoc(pyfunc) or "")
        self.description = about if description is None else description
        self.is_async = inspect.iscoroutinefunction(pyfunc)
        self._adapter, self.parameters = _schema_of(self.name, pyfunc)
        for key, text in of_parameters.items():
            if key in self.parameters["properties"]:
                self.parameters["properties"][key].setdefault("description", text)
        self._warn_of_gaps()

    def _warn_of_gaps(self) -> None:
        """Warn if the tool has no description, or parameters without types."""
        if not self.description:
            logger.warning("tool `%s` has no docstring: the model sees its name only", self.name)
        annotations = inspect.get_annotations(self.pyfunc)
        if untyped := [name for name in self.parameters["properties"] if name not in annotations]:
            names = ", ".join(f"`{name}`" for name in untyped)
            logger.warning(
                "tool `%s`: %s without a type, so the model may pass any type", self.name, names
            )

    def __repr__(self) -> str:
        return f"<Tool {self.name}>"

    def __call__(self, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return self.pyfunc(*args, **kwargs)

    @property
    def json_schema(self) -> dict[str, Any]:
        """The description that the model receives, in the format of OpenAI's API."""
        about = {"name": self.name, "description": self.description}
        return {"type": "function", "function": about | {"parameters": self.parameters}}

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Check the arguments, call the function and return its result as text. Raises pydantic's
        `ValidationError` for wrong arguments, and the errors of the function."""
        if self.is_async:
            raise TypeError(
                f"tool `{self.name}` is async: use `arun`, `async for`, or a plain `def`"
            )
        return self._text_of(self._call(arguments))

    async def arun(self, arguments: Mapping[str, Any]) -> str:
        """`run` for async code. A plain function runs in a thread. Raises `TimeoutError` after
        `timeout` seconds. An async function is then cancelled. A plain function continues, and its
        result is dropped."""
        called = self._call(arguments) if self.is_async else None
        try:
            async with asyncio.timeout(self.timeout) as limit:
                found = await (called or asyncio.to_thread(self._call, arguments))
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"no result in {self.timeout:g} s") from None
            raise
        return self._text_of(found)

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        return self._adapter.validate_python(ArgsKwargs((), dict(arguments)))

    def _text_of(self, value: Any) -> str:
        text = value if isinstance(value, str) else to_json(value, fallback=str).decode()
        return shortened(text, self.max_chars)


def shortened(text: str, max_chars: int) -> str:
    """The text, or its first `max_chars` characters and the number of omitted characters."""
    more = len(text) - max_chars
    return text if more <= 0 else f"{text[:max_chars]}... ({more} more characters)"


@overload
def tool(pyfunc: Callable[Given, Result], /) -> Tool[Given, Result]: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    max_chars: int = _MAX_CHARS,
    timeout: float = _TIMEOUT,
) -> Callable[[Callable[Given, Result]], Tool[Given, Result]]: ...
def tool(
    pyfunc: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    max_chars: int = _MAX_CHARS,
    timeout: float = _TIMEOUT,
) -> Any:
    """Make a tool from a function, with `@P.tool` or `@P.tool(name=...)`. The model sees the name,
    the parameters with their types and defaults, and the docstring. Descriptions of parameters can
    be in an `Args:` section or in `:param x:` lines. The function may be async.

    `max_chars`: number of characters of a result that the model sees. `timeout`: in async code,
    seconds after which the model is told that there is no result. Raises `ValueError` for a
    function that a model cannot call, and `TypeError` for a parameter without a JSON type."""

    def decorate(function: Callable[..., Any]) -> Tool[..., Any]:
        return Tool(
            function, name=name, description=description, max_chars=max_chars, timeout=timeout
        )

    return decorate if pyfunc is None else decorate(pyfunc)


def _schema_of(name: str, pyfunc: Callable[..., Any]) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    """An adapter that validates arguments and calls the function, and their JSON schema."""
    for param in inspect.signature(pyfunc).parameters.values():
        if param.kind not in _NAMED_KINDS:
            raise ValueError(f"tool `{name}`: parameter `{param}` cannot be passed by name")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(cast("Any", pyfunc))
        schema = adapter.json_schema()
    except (PydanticUserError, NameError) as error:
        problem = str(error).partition("\n")[0]
        text = f"a parameter of tool `{name}` cannot be described by a JSON schema: {problem}"
        raise TypeError(text) from None
    schema.setdefault("properties", {})
    for part in schema["properties"].values():
        part.pop("title", None)  # The title repeats the name.
    return adapter, schema


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """The description of the function, and the description of each parameter."""
    about: list[str] = []
    parameters: dict[str, list[str]] = {}
    section: str | None = None
    last: list[str] | None = None
    for line in doc.splitlines():
        if found := _SECTION.match(line):
            section, last = found[1], None
        elif found := _SPHINX.match(line):
            section, last = "Args", None
            if found[1] == "param":
                last = parameters.setdefault(found[2], [found[3]])
        elif section is None:
            about.append(line)
        elif line and not line[0].isspace() and section not in ("Args", "Arguments", "Parameters"):
            section, last = None, None
            about.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            if found := _GOOGLE.match(line):
                last = parameters.setdefault(found[2], [found[3]])
            elif last is not None and line.strip():
                last.append(line.strip())
    return "\n".join(about).strip(), {name: " ".join(said) for name, said in parameters.items()}
