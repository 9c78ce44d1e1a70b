"""Jinja for templates of models: code of whoever made the model's files, which runs on ServeCore's
event loop. It may look at what it is given and make a text of it, within bounds of work and size.

Whatever takes time or memory beyond the code's own length is replaced, when a template is read, by
a filter that first asks the budget: loops, sums, products, lists that are written out."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter, thread_time
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.nodes import Node
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_TEMPLATE = 2**17  # characters
# Of a rendering, and for each message that it shows: ten times what most models' templates need.
MAX_STEPS, MESSAGE_STEPS = 2**18, 512  # turns of loops, calls, kilobytes that are made
MAX_CPU_S, MESSAGE_CPU_S = 0.25, 400e-6
MAX_CHARS = 2**25  # of a text
_LOOK_S = 0.005
_NODES_PER_STEP = 16  # of a template's code
_MAX_ITEMS = 2**16  # of a list that is made, and of all in it
_MAX_BITS = 4096  # of a number
_MAX_INDENT = 16
_DICT_NAMES = frozenset(dir(dict))
_PLAIN = (str, int, float, type(None))
_FILTERS = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first"),
    *("float", "groupby", "int", "items", "last", "length", "lower", "map", "max", "min", "reject"),
    *("rejectattr", "reverse", "round", "safe", "select", "selectattr", "sort", "title", "trim"),
    *("unique", "upper", "wordcount"),
)
# Methods of texts whose results may be of any size, whatever they are called on.
_ENDLESS = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"})


class Budget:
    """The work that a rendering may still do. All raise `SecurityError`."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._end_s = self._look_s = 0.0

    def renew(self, num_messages: int) -> None:
        """Begin a rendering of so many messages: a long conversation may take longer."""
        self._num_steps = MAX_STEPS + MESSAGE_STEPS * num_messages
        self._look_s = perf_counter() + _LOOK_S
        self._end_s = thread_time() + MAX_CPU_S + MESSAGE_CPU_S * num_messages

    def spend(self, num_steps: int) -> None:
        """A step may be long, since it is of text that may be."""
        self._num_steps -= num_steps
        is_over = self._num_steps < 0
        if perf_counter() > self._look_s:  # which costs less than to ask for the thread's time
            self._look_s = perf_counter() + _LOOK_S
            is_over |= thread_time() > self._end_s
        if is_over:
            raise SecurityError("it does too much")

    def text(self, num_chars: int) -> None:
        """A text of this size will be made."""
        if num_chars > MAX_CHARS:
            raise SecurityError("it makes too long a text")
        self.spend(num_chars >> 10)

    def weigh(self, value: Any) -> None:
        """The value will be kept, or shown: count all that is in it, as often as it is in it."""
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
                raise SecurityError("it makes too large a list")
        self.spend(4 + (count >> 1))


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Its `budget` is renewed by whoever renders. Attributes give the same as in its base, but that
    takes most of a template's time to find out, by an exception each time, that a message has no
    attribute `role`."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols],
            optimized=False,  # it would compute products of constants, however large
            finalize=self._shown,
        )
        self.budget = Budget()
        known = self.filters
        self.filters = {name: known[name] for name in _FILTERS}
        own: dict[str, Callable[..., Any]] = {
            "list": self._list,
            "join": partial(self._bounded_join, known["join"]),
            "replace": self._replace,
            "string": self._text,
            "tojson": self._to_json,
            "indent": partial(self._bounded_indent, known["indent"]),
            "_turns": self._turns,
            "_sum": self._sum,
            "_product": self._product,
            "_concat": self._concat,
            "_made": self._made,
            "_paid": self.budget.spend,
        }
        self.filters |= own
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace")}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _guard(tree)
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
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
                raise SecurityError(f"`{name}` may make a text of any size")
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

    def _turns(self, values: Iterable[Any]) -> Sequence[Any]:
        """The values that a loop goes over."""
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
            raise SecurityError(f"`{sign}` is for numbers")
        if sign == "*" and isinstance(left, str):
            self.budget.text(len(left) * max(0, right))
            return left * right
        if sign == "%":
            return left % right
        if sign == "**":
            if abs(right) > 64:
                raise SecurityError("it makes too large a number")
            return self._number(left**right)
        return self._number(left * right)

    def _number(self, value: Any) -> Any:
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise SecurityError("it makes too large a number")
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
            raise SecurityError("`join` takes no attribute here")
        return self._join(d, values)

    def _replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        text = str(text)
        if new:
            number = text.count(old) if count is None or count < 0 else count
            self.budget.text(len(text) + number * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _bounded_indent(self, indent: Any, text: str, width: Any = 4, *options: Any) -> Any:
        if not isinstance(width, int) or width > _MAX_INDENT:
            raise SecurityError("`indent` is too wide")
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
        """Like transformers' filter, not like Jinja's, which escapes HTML."""
        self.budget.weigh(value)
        if isinstance(indent, str) or (indent or 0) > _MAX_INDENT:
            raise SecurityError("`tojson` indents too far")
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )


_PRODUCTS = {nodes.Mul: "*", nodes.Pow: "**", nodes.Mod: "%"}


def _guard(node: Node) -> None:
    """Put the filters in. Raises `SecurityError` for what none can bound."""
    put_in = _shown_sum if isinstance(node, nodes.Output) else _guarded
    for name, child in list(node.iter_fields()):
        if isinstance(child, list):
            child[:] = [put_in(one) if isinstance(one, Node) else one for one in child]
        elif isinstance(child, Node):
            setattr(node, name, put_in(child))


def _shown_sum(node: Node) -> Node:
    """A sum that goes into the prompt at once, whose size is counted there: most are."""
    if not isinstance(node, nodes.Add):
        return _guarded(node)
    left, right = _shown_sum(node.left), _shown_sum(node.right)
    return nodes.Add(left, right, lineno=node.lineno)


def _guarded(node: Node) -> Node:
    _guard(node)
    if isinstance(node, nodes.For):
        if node.recursive:
            raise SecurityError("loops may not call themselves")
        node.iter = _asked(node.iter, "_turns")
        _paid(node.body)
    elif isinstance(node, nodes.Macro | nodes.CallBlock):
        _paid(node.body)
    elif isinstance(node, nodes.Add):
        return _asked(node.left, "_sum", node.right)
    elif isinstance(node, nodes.Mul | nodes.Pow | nodes.Mod):
        sign = nodes.Const(_PRODUCTS[type(node)], lineno=node.lineno)
        return _asked(node.left, "_product", node.right, sign)
    elif isinstance(node, nodes.Concat):
        return _asked(nodes.List(node.nodes, lineno=node.lineno), "_concat")
    elif isinstance(node, nodes.List | nodes.Tuple | nodes.Dict):
        is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
        if node.items and not is_target:
            return _asked(node, "_made")
    return node


def _paid(body: list[Node]) -> None:
    """Count, each time that it runs, what it is made of."""
    if body:
        num_steps = sum(map(_size, body)) // _NODES_PER_STEP
        price = nodes.Const(num_steps, lineno=body[0].lineno)
        body.insert(0, nodes.ExprStmt(_asked(price, "_paid"), lineno=body[0].lineno))


def _size(node: Node) -> int:
    """The nodes of its code, but for those of loops in it, which count their own."""
    inner = (one for one in node.iter_child_nodes() if not isinstance(node, nodes.For))
    return 1 + sum(map(_size, inner))


def _asked(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)
