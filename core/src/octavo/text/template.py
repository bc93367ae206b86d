"""ChatTemplate: a checkpoint's Jinja template, rendered in a sandbox that tracks the client's text.

Owns the environment: what Hugging Face templates may use, what nobody may, and how far one rendering
may go. Templates are the operator's (a request never brings one), so they are not hostile, but they
are not reviewed either: attributes and ranges are limited by Jinja's immutable sandbox, and time,
loop turns and the size of every string by a Budget. Time is looked at between operations of the template; one
operation cannot take long, because what it may build is bounded. Never tokenises.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_environment
from markupsafe import Markup

from octavo.errors import LoadError, RequestError
from octavo.text.tracked import Tracked, claim, concat, is_clean

SECONDS = 5.0
SPARE_CHARS = 1 << 20
WIDEST = 100_000
"""A number handed to a string method, filter or format: more is no layout but an attempt to fill memory."""

_WIDE = re.compile(r"[%{][^%{}]{0,40}[0-9]{6}")

# Filters that hand on the very objects they were given: their results carry their own spans.
_PASSING = frozenset(
    {"attr", "batch", "d", "default", "dictsort", "first", "groupby", "items", "join", "last", "list", "map"}
    | {"max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort", "sum", "unique"}
)


class TemplateRefused(Exception):
    """What a template says through raise_exception. Not a TemplateError: Jinja must not rewrite it."""


class Budget:
    """How far one rendering may go: until a moment, and to strings of at most `chars` characters."""

    def __init__(self, seconds: float, chars: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._seconds, self.chars = clock, seconds, chars
        self._end = clock() + seconds

    def tick(self) -> None:
        if self._clock() > self._end:
            raise SecurityError(f"it ran for more than {self._seconds:g} seconds")

    def size(self, chars: int) -> None:
        self.tick()
        if chars > self.chars:
            raise SecurityError(f"it builds a text of {chars} characters; at most {self.chars} are allowed here")


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks what the assistant says; rendering ignores the mark."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b`, through the environment, which keeps the spans."""
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Every way of making a string in a template passes through here, and keeps or claims its spans."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_finalize)
        self._local = threading.local()
        self.filters["tojson"], self.filters["join"] = _tojson, _join
        self.filters = {name: filter if name in _PASSING else self._guard(filter) for name, filter in self.filters.items()}
        self.globals.update(raise_exception=_raise, strftime_now=_now)
        self.globals.pop("lipsum", None)

    @property
    def budget(self) -> Budget:
        """Of the rendering that this thread is in; nearly none outside of one (constants folded at load)."""
        return getattr(self._local, "budget", None) or Budget(SECONDS, SPARE_CHARS)

    @budget.setter
    def budget(self, value: Budget | None) -> None:
        self._local.budget = value

    def concat(self, parts: Iterable[Any]) -> str:
        """Of output pieces, of `~`, of blocks and macros."""
        texts = [part if type(part) in (str, Tracked) else str(_finalize(part)) for part in parts]
        self.budget.size(sum(map(len, texts)))
        return concat(texts)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _check_widths(owner, *args, *kwargs.values())
            if type(owner) is str and obj.__name__ == "join" and len(args) == 1:
                return self.concat([part for item in args[0] for part in (owner, item)][1:])
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(obj, Macro) or isinstance(owner, (dict, list, tuple)):
            return result
        inputs = (*args, *kwargs.values(), owner)
        return self._settle(result, all(map(is_clean, inputs)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_widths(left, *(right if isinstance(right, tuple) else (right,)))
            return self._settle(left % right, is_clean(left) and is_clean(right))
        if operator == "**" and not (_small(left, 1 << 32) and _small(right, 64)):
            raise SecurityError(f"{left!r:.40} ** {right!r:.40} is too large a power")
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, (str, list, tuple)) and isinstance(count, int):
                    self.budget.size(len(text) * max(count, 0))
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
                raise SecurityError("a product of more than 4096 bits")
        if operator == "+" and isinstance(left, (str, list)) and isinstance(right, (str, list)):
            self.budget.size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format = super().wrap_str_format(value)
        if format is None:
            return None
        owner = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_widths(owner, *args, *kwargs.values())
            return str(self._settle(format(*args, **kwargs), all(map(is_clean, (owner, *args, *kwargs.values())))))

        return checked

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """At once, where Jinja waits until the value is used."""
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is unsafe")

    def tick(self) -> None:
        """Called at the start of every turn of every loop."""
        self.budget.tick()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno).set_environment(self))
        return tree

    def _guard(self, filter: Callable[..., Any]) -> Callable[..., Any]:
        skip = 1 if hasattr(filter, "jinja_pass_arg") else 0

        @functools.wraps(filter)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            inputs = (*args[skip:], *kwargs.values())
            _check_widths(*inputs)
            return self._settle(filter(*args, **kwargs), all(map(is_clean, inputs)))

        return guarded

    def _settle(self, result: Any, clean: bool) -> Any:
        """A result made of clean inputs is clean; any other that does not know its spans is the client's."""
        if isinstance(result, str):
            self.budget.size(len(result))
        if isinstance(result, Markup):
            result = "".join(result)  # escaping is off; a Markup would escape what is added to it
        return result if clean else claim(result)


class ChatTemplate:
    """A compiled template. LoadError if it does not compile. Thread-safe."""

    def __init__(self, source: str) -> None:
        self._environment = TemplateEnvironment()
        try:
            self._template = self._environment.from_string(source)
            self._variables = meta.find_undeclared_variables(self._environment.parse(source))
        except (TemplateSyntaxError, SecurityError, RecursionError) as error:
            where = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise LoadError(f"the chat template does not compile: {where}{error}") from error

    def reads(self, name: str) -> bool:
        """Whether it looks at a variable of this name that it has not set itself."""
        return name in self._variables

    def render(self, values: Mapping[str, Any], *, chars: int, seconds: float = SECONDS) -> str:
        """The text, a Tracked string where the client's text is part of it.

        chars: size of the client's text; no string may grow past four times that and a mebibyte more.
        RequestError carries the template's own message, or says what went wrong in it.
        """
        self._environment.budget = Budget(seconds, 4 * chars + SPARE_CHARS)
        try:
            return self._template.render(values)
        except TemplateRefused as error:
            raise _failed(str(error) or "the chat template refuses these messages") from error
        except SecurityError as error:
            raise _failed(f"the chat template was stopped: {error}") from error
        except TemplateError as error:
            raise _failed(f"the chat template failed: {error.message or type(error).__name__}") from error
        except RecursionError as error:
            raise _failed("the chat template was stopped: it calls itself too deeply") from error
        except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
            raise _failed(f"the chat template failed on these messages: {type(error).__name__}: {error}") from error
        finally:
            self._environment.budget = None


def _failed(message: str) -> RequestError:
    return RequestError(message, param="messages", code="chat_template_error")


def _finalize(value: Any) -> Any:
    """Of every printed expression: what is neither text nor a scalar (a list, say) is printed as the client's."""
    if isinstance(value, (Tracked, Undefined)) or is_clean(value):
        return value
    return Tracked("".join(str(value)))


def _check_widths(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > WIDEST:
            raise SecurityError(f"{value} is too large a number for a string operation; at most {WIDEST}")
        if type(value) is str and _WIDE.search(value):
            raise SecurityError(f"the format {value!r:.60} asks for too wide a field")


def _small(value: Any, bound: int) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= bound


def _raise(message: str) -> NoReturn:
    raise TemplateRefused(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As templates expect it: not escaped for HTML, unlike Jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def _join(environment: TemplateEnvironment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return environment.concat([part for item in value for part in (d, item)][1:])
