"""Chat templates: the constant markup around the turns of a conversation.

A model's template is rendered with random sentinels in place of the messages, and split at them.
Real messages never pass through the template, so their text cannot act as template code or markup.

A template is code from the model's author. What it renders for all conversations is rendered once,
in a thread. A conversation is rendered on ServeCore's event loop, or in a thread if it is long or
the template is slow. A template can only read its inputs and produce text, with limited work and
size. When a template is parsed, operations whose time or memory may exceed the code's length are
replaced by filters that check the budget: loops, sums, products, and list literals."""

import gc
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, partial
from itertools import islice
from time import perf_counter, thread_time
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.nodes import Node
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from parrot.protocol.errors import InvalidRequest

MAX_TEMPLATE = 2**17  # Characters of a template.
# Limits of a rendering, and additions per message: ten times the need of most models' templates.
MAX_STEPS, MESSAGE_STEPS = 2**18, 512  # Steps: loop iterations, calls, kilobytes of text.
MAX_CPU_S, MESSAGE_CPU_S = 0.05, 400e-6  # Seconds of CPU time.
MAX_CHARS = 2**25  # Characters of a text.
_CHECK_S = 0.005  # Seconds between checks of the CPU time.
_NODES_PER_STEP = 16  # Nodes of a template's code that count as one step.
_MAX_ITEMS = 2**16  # Items of a new list, including nested items.
_MAX_BITS = 4096  # Bits of an integer.
_MAX_INDENT = 16  # Spaces.
_DICT_NAMES = frozenset(dir(dict))
_PLAIN = (str, int, float, type(None))
_FILTERS = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first"),
    *("float", "groupby", "int", "items", "last", "length", "lower", "map", "max", "min", "reject"),
    *("rejectattr", "reverse", "round", "safe", "select", "selectattr", "sort", "title", "trim"),
    *("unique", "upper", "wordcount"),
)
# Methods of strings whose results may have any size.
_ENDLESS = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"})
_PRODUCTS = {nodes.Mul: "*", nodes.Pow: "**", nodes.Mod: "%"}
_PARTS = 64  # Parts of a rendered text between two checks of its length.
_SLOW_S = 0.005  # Seconds of CPU time of a rendering after which a template is slow.
_DECAY = 0.9  # Part of a rendering's time that the next one remembers.
_NUM_RENDERED = 16  # Turns that are rendered. Later turns have the markup of the sixteenth.
# Training marks of some templates. They render nothing.
_GENERATION_MARK = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_SYSTEM_SOMEWHERE = (
    ("system", "system", "user"),
    ("user", "system"),
    ("system", "user", "assistant", "system", "user"),
)


class RenderingBudget(threading.local):
    """The remaining work of this thread's rendering. All methods raise `SecurityError`."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._end_s = self._check_s = 0.0

    def renew(self, num_messages: int) -> None:
        """Begin a rendering. Each message adds to the budget."""
        self._num_steps = MAX_STEPS + MESSAGE_STEPS * num_messages
        self._check_s = perf_counter() + _CHECK_S
        self._end_s = thread_time() + MAX_CPU_S + MESSAGE_CPU_S * num_messages

    def spend(self, num_steps: int) -> None:
        """Count steps, and check the CPU time, because a step on a long text may take long."""
        self._num_steps -= num_steps
        is_over = self._num_steps < 0
        if perf_counter() > self._check_s:  # cheaper than `thread_time`
            self._check_s = perf_counter() + _CHECK_S
            is_over |= thread_time() > self._end_s
        if is_over:
            raise SecurityError("it exceeds its budget of steps or CPU time")

    def text(self, num_chars: int) -> None:
        """Count a text of this size before it is created."""
        if num_chars > MAX_CHARS:
            raise SecurityError("its text is too long")
        self.spend(num_chars >> 10)

    def weigh(self, value: Any) -> None:
        """Count all nested items of a value that is stored or shown. Repeated items count again."""
        count, found = 0, [value]
        while found:
            one = found.pop()
            if isinstance(one, Namespace):
                raise SecurityError("it shows a namespace")
            if isinstance(one, Mapping):
                found += one.values()
                count += len(one)
            elif isinstance(one, list | tuple):
                found += one
                count += len(one)
            elif isinstance(one, str):
                count += len(one) >> 10
            if count > _MAX_ITEMS:
                raise SecurityError("its list is too large")
        self.spend(4 + (count >> 1))


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment with limited work. Renew its `budget` before each rendering."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols],
            optimized=False,  # The optimizer would compute products of constants of any size.
            finalize=self._shown,
        )
        self.budget = RenderingBudget()
        known = self.filters
        self.filters = {name: known[name] for name in _FILTERS}
        own: dict[str, Callable[..., Any]] = {
            "list": self._list,
            "join": partial(self._bounded_join, known["join"]),
            "replace": self._replace,
            "string": self._text,
            "tojson": self._to_json,
            "indent": partial(self._bounded_indent, known["indent"]),
            "_loop_values": self._loop_values,
            "_sum": self._sum,
            "_product": self._product,
            "_concat": self._concat,
            "_made": self._made,
            "_metered": self.budget.spend,
        }
        self.filters |= own
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace")}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _guard(tree)
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        # A fast path: the base class would look for an attribute first, and catch an exception.
        if type(obj) is dict and attribute in obj and attribute not in _DICT_NAMES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = self.budget
        budget.spend(4)
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # Jinja wraps `format`
        if isinstance(owner, str):
            name = obj.__name__
            if name in _ENDLESS:
                raise SecurityError(
                    f"`{name}` is not allowed, because its result may have any size"
                )
            if name == "replace":
                return self._replace(owner, *args, **kwargs)
            if name == "join":
                return self._join(owner, *args)
            budget.text(len(owner))
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, dict | list | tuple):
            budget.weigh(result)
        return result

    # Filters

    def _shown(self, value: Any) -> Any:
        if not isinstance(value, _PLAIN):
            self.budget.weigh(value)
        return value

    def _loop_values(self, values: Iterable[Any]) -> Sequence[Any]:
        """The values of a loop."""
        found = values if isinstance(values, list | tuple | range) else list(values)
        self.budget.spend(len(found) + 1)
        return found

    def _list(self, values: Iterable[Any]) -> list[Any]:
        found = list(values)
        self.budget.weigh(found)
        return found

    def _made(self, value: Any) -> Any:
        self.budget.weigh(value)
        return value

    def _sum(self, left: Any, right: Any) -> Any:
        if isinstance(left, str) and isinstance(right, str):
            self.budget.text(len(left) + len(right))
            return left + right
        result = left + right
        if isinstance(result, list | tuple):
            self.budget.weigh(result)
        return self._number(result)

    def _product(self, left: Any, right: Any, sign: str) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if not numbers and not (sign == "*" and isinstance(left, str) and isinstance(right, int)):
            raise SecurityError(f"`{sign}` is only allowed for numbers")
        if sign == "*" and isinstance(left, str):
            self.budget.text(len(left) * max(0, right))
            return left * right
        if sign == "%":
            return left % right
        if sign == "**":
            if abs(right) > 64:
                raise SecurityError("its number is too large")
            return self._number(left**right)
        return self._number(left * right)

    def _number(self, value: Any) -> Any:
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise SecurityError("its number is too large")
        return value

    def _concat(self, values: Sequence[Any]) -> str:
        return "".join([self._text(value) for value in values])

    def _text(self, value: Any) -> str:
        self._shown(value)
        text = str(value)
        self.budget.text(len(text))
        return text

    def _join(self, sign: str, values: Iterable[Any]) -> str:
        texts = [self._text(value) for value in values]
        self.budget.text(len(sign) * len(texts) + sum(map(len, texts)))
        return sign.join(texts)

    def _bounded_join(
        self, join: Any, values: Iterable[Any], d: str = "", attribute: Any = None
    ) -> str:
        if attribute is not None:
            raise SecurityError("`join` does not support `attribute`")
        return self._join(d, values)

    def _replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        text = str(text)
        if new:
            number = text.count(old) if count is None or count < 0 else count
            self.budget.text(len(text) + number * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _bounded_indent(self, indent: Any, text: str, width: Any = 4, *options: Any) -> Any:
        if not isinstance(width, int) or width > _MAX_INDENT:
            raise SecurityError(f"`indent` allows a width of at most {_MAX_INDENT}")
        self.budget.text(len(text) + text.count("\n") * width)
        return indent(text, width, *options)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Like transformers' filter. Jinja's own filter escapes HTML."""
        self.budget.weigh(value)
        if isinstance(indent, str) or (indent or 0) > _MAX_INDENT:
            raise SecurityError(f"`tojson` allows an indent of at most {_MAX_INDENT}")
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )


def _guard(node: Node) -> None:
    """Insert the filters into the code. Raises `SecurityError` for code that they cannot limit."""
    put_in = _shown_sum if isinstance(node, nodes.Output) else _guarded
    for name, child in list(node.iter_fields()):
        if isinstance(child, list):
            child[:] = [put_in(one) if isinstance(one, Node) else one for one in child]
        elif isinstance(child, Node):
            setattr(node, name, put_in(child))


def _shown_sum(node: Node) -> Node:
    """A sum that is rendered at once. Most sums are, and the output's size is counted anyway."""
    if not isinstance(node, nodes.Add):
        return _guarded(node)
    left, right = _shown_sum(node.left), _shown_sum(node.right)
    return nodes.Add(left, right, lineno=node.lineno)


def _guarded(node: Node) -> Node:
    _guard(node)
    if isinstance(node, nodes.For):
        if node.recursive:
            raise SecurityError("recursive loops are not allowed")
        node.iter = _filter_call(node.iter, "_loop_values")
        _metered(node.body)
    elif isinstance(node, nodes.Macro | nodes.CallBlock):
        _metered(node.body)
    elif isinstance(node, nodes.Add):
        return _filter_call(node.left, "_sum", node.right)
    elif isinstance(node, nodes.Mul | nodes.Pow | nodes.Mod):
        sign = nodes.Const(_PRODUCTS[type(node)], lineno=node.lineno)
        return _filter_call(node.left, "_product", node.right, sign)
    elif isinstance(node, nodes.Concat):
        return _filter_call(nodes.List(node.nodes, lineno=node.lineno), "_concat")
    elif isinstance(node, nodes.List | nodes.Tuple | nodes.Dict):
        is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
        if node.items and not is_target:
            return _filter_call(node, "_made")
    return node


def _metered(body: list[Node]) -> None:
    """Insert a filter that counts the size of `body` each time that it runs."""
    if body:
        num_steps = sum(map(_size, body)) // _NODES_PER_STEP
        price = nodes.Const(num_steps, lineno=body[0].lineno)
        body.insert(0, nodes.ExprStmt(_filter_call(price, "_metered"), lineno=body[0].lineno))


def _size(node: Node) -> int:
    """The number of nodes, except those in loops, which are counted by the loops."""
    inner = (one for one in node.iter_child_nodes() if not isinstance(node, nodes.For))
    return 1 + sum(map(_size, inner))


def _filter_call(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


class ModelTemplate:
    """A model's chat template. `bos` and `eos` are the texts of these tokens, "" if there are none.

    Each turn keeps the markup with which its answer was generated. So the KV of earlier turns stays
    valid, although some templates move the system message to the last turn."""

    def __init__(self, template: str, bos: str = "", eos: str = "") -> None:
        if len(template) > MAX_TEMPLATE:
            raise InvalidRequest("the model's chat template is too long")
        environment = TemplateSandbox()
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(_GENERATION_MARK.sub("", template))
        except Exception as error:  # noqa: BLE001 - deep nesting fails in Python's own parser
            raise InvalidRequest(f"the model's chat template is broken: {error!s:.500}") from None
        self._budget = environment.budget
        self.source = template
        self._tokens = {"bos_token": bos, "eos_token": eos}
        # By the number of turns, and whether a system message exists.
        self._markup: dict[tuple[int, bool], tuple[str, ...] | InvalidRequest] = {}
        self._cpu_s = 0.0  # the CPU time of recent renderings

    def learn(self) -> None:
        """Render all markup, which later calls only look up. It may take 2 s: use a thread."""
        for has_system in (False, True):
            with suppress(InvalidRequest):
                self.markup(_NUM_RENDERED, has_system=has_system)
        with suppress(InvalidRequest):
            self.takes_system, self.takes_system_anywhere, self.strips  # noqa: B018

    @property
    def is_slow(self) -> bool:
        """Whether recent renderings took long: then the next one should run in a thread."""
        return self._cpu_s > _SLOW_S

    def markup(self, num_turns: int, *, has_system: bool = False) -> tuple[str, ...]:
        """The texts between the messages; generation follows the last one:

            m[0] system m[1] user_0 m[2] assistant_0 m[3] user_1 m[4] ... user_last m[-1]

        or without `m[0] system`. Raises `InvalidRequest` if the template does not show each message
        once and in order, or has no system message."""
        parts = list(self._rendered(1, has_system))
        for turn in range(2, min(num_turns, _NUM_RENDERED) + 1):
            parts += self._rendered(turn)[-2:]
        return tuple(parts + parts[-2:] * (num_turns - _NUM_RENDERED))

    def _rendered(self, num_turns: int, has_system: bool = False) -> tuple[str, ...]:
        """The markup of the first `num_turns` turns, or the error, rendered once."""
        found = self._markup.get((num_turns, has_system))
        if found is None:
            try:
                found = self._render(num_turns, has_system)
            except InvalidRequest as error:
                found = error
            self._markup[num_turns, has_system] = found
        if isinstance(found, InvalidRequest):
            raise InvalidRequest(found.message, param="chat")
        return found

    @cached_property
    def strips(self) -> bool:
        """Whether the template strips white space at the edges of user messages."""
        content = f"\v{sentinel()}\v"  # Templates themselves contain no vertical tabs.
        return content not in self.render([_message("user", content)])

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template shows a system message before all others."""
        return self._shows("system", "user")

    @cached_property
    def takes_system_anywhere(self) -> bool:
        """Whether the template shows system messages at any position, as separate messages."""
        return all(self._shows(*roles) for roles in _SYSTEM_SOMEWHERE)

    def _shows(self, *roles: str) -> bool:
        """Whether the template shows each message of a conversation once and in order."""
        marks = [sentinel() for _ in roles]
        try:
            _split(self.render(list(map(_message, roles, marks))), marks)
        except InvalidRequest:
            return False
        return True

    def _render(self, num_turns: int, has_system: bool = False) -> tuple[str, ...]:
        roles = ["system"] * has_system + (["user", "assistant"] * num_turns)[:-1]
        marks = [sentinel() for _ in roles]
        return tuple(_split(self.render(list(map(_message, roles, marks))), marks))

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt for the next answer. `options` are the template's other variables, such as
        `tools` and `enable_thinking`. Raises `InvalidRequest`."""
        self._budget.renew(len(messages))
        collects, began = gc.isenabled(), thread_time()
        gc.disable()  # A collection would use the budget of the template.
        parts: list[str] = []
        num_chars = 0
        try:
            made = self._template.generate(
                **options, messages=messages, add_generation_prompt=True, **self._tokens
            )
            while some := list(islice(made, _PARTS)):
                parts += some
                num_chars += sum(map(len, some))
                if num_chars > MAX_CHARS:
                    raise TemplateError("its text is too long")
            text = "".join(parts)
            text.encode()  # Raises for a lone surrogate, which no engine could receive.
        except Exception as error:  # noqa: BLE001 - templates may raise any error
            raise InvalidRequest(
                f"the model's chat template failed: {str(error) or type(error).__name__:.500}",
                param="chat",
            ) from None
        finally:
            if collects:
                gc.enable()
            self._cpu_s = max(_DECAY * self._cpu_s, thread_time() - began)
        return text


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def sentinel() -> str:
    """A random mark that no text can contain by accident or guess."""
    return f"m{secrets.token_hex(16)}m"


def _split(text: str, sentinels: list[str]) -> list[str]:
    parts: list[str] = []
    for sentinel in sentinels:
        before, found, text = text.partition(sentinel)
        if not found or sentinel in text:
            raise InvalidRequest(
                "the model's chat template does not show every message once, in order", param="chat"
            )
        parts.append(before)
    return [*parts, text]


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


PLAIN_CHAT = ModelTemplate(
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content + '\n\n' }}"
    "{% else %}{{ m.role | capitalize + ': ' + m.content + '\n\n' }}{% endif %}"
    "{% endfor %}Assistant:"
)
"""A conversation as text, for engines that take text and have no roles."""
