"""The Jinja environment in which chat templates run: what transformers offers them, made provenance-preserving.

Settings and helpers follow `transformers.utils.chat_template_utils` (trim_blocks, lstrip_blocks, loop controls, tojson
without ASCII escaping, raise_exception, strftime_now, the `{% generation %}` tag). Six places in Jinja would silently
drop spans, and each is replaced here: the `concat` that joins a template's output, the text of a printed list or dict,
the operators `~` and `%`, methods called on string literals (`', '.join(items)`), and filters that build new strings.

A template also must come to an end. What it does is counted (`template.work`) in loops, calls, filters and the
operators that make something larger than their operands: `+`, `*`, `**`, `~`, `%`, lists and slices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from renderers.template.json_dump import traced_json
from renderers.template.operation_costs import FILTER_COSTS, added, listed, multiplied, raised_to, sliced
from renderers.template.traced import (
    LoopMark,
    Span,
    TracedStr,
    plain,
    spend_on_width,
    tainted_like,
    traced_format,
    traced_join,
    traced_percent,
    traced_text,
)
from renderers.template.work_limit import STEP, TemplateRun, spend, spend_on_text_of, spend_on_text_times

_JOIN, _ENTER, _TESTED, _LEAVE = "_traced_join", "_enter_loop_body", "_tested_in_loop", "_leave_loop"
_ADDED, _MULTIPLIED, _RAISED, _LISTED, _SLICED = "_added", "_multiplied", "_raised", "_listed", "_sliced"
#: The variable of a template run that holds its `TemplateRun`.
RUN = "_run"

_DICT_ATTRIBUTES = frozenset(dir(dict))
# The sandbox allows all public methods of a string; formatting can reach attributes, and it replaces those two.
_SAFE_STR_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {
    "encode",
    "format",
    "format_map",
}
# Methods of bytes, integers and dicts that make what no operation counts; `dict.fromkeys` is a function of ours.
_UNCOUNTED = frozenset(
    ("center", "expandtabs", "fromkeys", "join", "ljust", "replace", "rjust", "to_bytes", "translate", "zfill")
)


class TracedMessage(dict[str, Any]):
    """A message as the template sees it; knows its index, so that a loop over messages can be followed."""

    __slots__ = ("_index",)

    def __init__(self, fields: dict[str, Any], index: int) -> None:
        super().__init__(fields)
        self._index = index


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates print `TracedStr`."""

    concat = staticmethod(functools.partial(traced_join, ""))
    intercepted_binops = frozenset("%")  # `'%s' % (traced,)` is plain: Python asks the tuple, not what is in it

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, jinja2.ext.loopcontrols],
            autoescape=False,
            finalize=_printed,
        )
        self.binop_table["%"] = _percent
        self.filters = {name: _tainting(name, function) for name, function in self.filters.items()}
        self.filters.update(
            tojson=traced_json,
            format=_format_filter,
            join=_join_filter,
            indent=_indent_filter,
            replace=_replace_filter,
            reverse=_reverse_filter,
            safe=_identity,
        )
        del self.globals["lipsum"]  # random text, in any amount
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda fmt: now().strftime(fmt),
            dict=_TemplateDict(),
            namespace=_TemplateNamespace,
        )
        self.filters |= {
            _JOIN: self.concat,
            _ENTER: _enter_loop_body,
            _TESTED: _tested_in_loop,
            _LEAVE: _leave_loop,
            _ADDED: added,
            _MULTIPLIED: multiplied,
            _RAISED: raised_to,
            _LISTED: listed,
            _SLICED: sliced,
        }

    def compile_chat_template(self, source: str) -> jinja2.Template:
        """Parse, add the loop marks, rewrite operators, compile. Raises `jinja2.TemplateSyntaxError`."""
        tree = self.parse(source)
        _LoopMarker().mark(tree)
        _rewrite_operators(tree)
        return self.from_string(tree)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox's own, which checks the same few attributes at every access, for half the time of a print."""
        if isinstance(obj, dict):
            if attribute not in _DICT_ATTRIBUTES and attribute in obj:
                return obj[attribute]
        elif isinstance(obj, str):
            if attribute in _SAFE_STR_METHODS:
                return getattr(obj, attribute)
        elif type(obj) in _PLAIN_OBJECTS and attribute[:1] != "_":
            found = getattr(obj, attribute, _ABSENT)
            if found is not _ABSENT:
                return found
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As the sandbox's own; what a traced string has beside the methods of a string is not for templates.

        Nor is `encode`: decoded again, content would pass for text of the template and could spell control tokens.
        """
        if isinstance(obj, TracedStr) and (attr == "encode" or not hasattr(str, attr)):
            return False
        if attr in _UNCOUNTED and isinstance(obj, (bytes, int, dict)):
            return False
        return bool(super().is_safe_attribute(obj, attr, value))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Methods of string literals run on a traced copy, so that `'\\n'.join(traced)` stays traced."""
        owner = getattr(obj, "__self__", None)
        spend(STEP + len(owner) if isinstance(owner, str) else STEP)
        if isinstance(owner, str) and not isinstance(owner, TracedStr):
            obj = getattr(TracedStr(owner), obj.__name__)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` runs in Jinja's own formatter (it must not reach attributes); its fields keep their spans."""
        safe_format = super().wrap_str_format(value)
        if safe_format is None:
            return None
        template: str = value.__self__
        formatter = _CountingFormatter(self)

        @functools.wraps(safe_format)
        def formatted(*args: Any, **kwargs: Any) -> str:
            positional, named = ((), args[0]) if value.__name__ == "format_map" and args else (args, kwargs)
            formatter.vformat(plain(template), positional, named)
            expected = safe_format(*args, **kwargs)  # raises what a wrong call raises
            if not (isinstance(template, TracedStr) and template.spans):
                text = traced_format(
                    template,
                    lambda one: formatter.vformat(one, positional, named),
                    lambda name: formatter.get_field(name, positional, named)[0],
                )
                if text == expected:
                    return text
            return str(tainted_like(plain(expected), (template, *args, kwargs)))

        return formatted


class _CountingFormatter(jinja2.sandbox.SandboxedFormatter):
    """Counts what a field is about to become."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        spend_on_text_of(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        spend_on_text_of(value)
        spend_on_width(format_spec)
        return str(super().format_field(value, format_spec))


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` prints its body: who sampled what is read off the trace instead."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body)]


class _LoopMarker:
    """Puts `_enter_loop_body(n, target)` at the start of every loop body and `_leave_loop(n)` after the loop.

    The mark at the start names the message that the body is about to print for; a body left early (`continue`,
    `break`) needs nothing more, because the next entry or the end of the loop replaces it.
    """

    def __init__(self) -> None:
        self.loops = 0

    def mark(self, node: nodes.Node) -> None:
        for field, value in node.iter_fields():
            if isinstance(value, list):
                setattr(node, field, [marked for child in value for marked in self._marked(child)])
            elif isinstance(value, nodes.Node):
                self.mark(value)

    def _marked(self, child: Any) -> list[Any]:
        if not isinstance(child, nodes.Node):
            return [child]
        self.mark(child)
        if not isinstance(child, nodes.For):
            return [child]
        self.loops += 1
        number = nodes.Const(self.loops)
        target = child.target
        names = [target] if isinstance(target, nodes.Name) else list(target.find_all(nodes.Name))
        targets: list[nodes.Expr] = [nodes.Name(name.name, "load") for name in names]
        if child.test is not None:  # a loop that its test leaves empty has no body to count in
            child.test = nodes.Filter(
                child.test, _TESTED, [nodes.Name(RUN, "load")], [], None, None, lineno=child.lineno
            )
        child.body.insert(0, _print_call(_ENTER, [number, nodes.Name(RUN, "load"), *targets], child.lineno))
        # With the variable it is no constant, which Jinja would print at compile time, without its mark.
        return [child, _print_call(_LEAVE, [number, nodes.Name(RUN, "load")], child.lineno)]


def _print_call(function: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Output:
    # Filters are called directly, functions through the checks of the sandbox: ten times the price.
    call = nodes.Filter(arguments[0], function, arguments[1:], [], None, None, lineno=lineno)
    return nodes.Output([call], lineno=lineno)


def _rewrite_operators(node: nodes.Node) -> None:
    """Turn `a ~ b`, `a + b + c`, `a * b`, `a ** b`, `[a, b]` and `a[1:]` into calls of what traces and counts."""
    for field, value in node.iter_fields():
        children = value if isinstance(value, list) else [value]
        replaced = [_rewritten(child) for child in children]
        if any(new is not old for new, old in zip(replaced, children, strict=True)):
            setattr(node, field, replaced if isinstance(value, list) else replaced[0])


def _rewritten(child: Any) -> Any:
    if not isinstance(child, nodes.Node):
        return child
    if isinstance(child, nodes.Add):
        # From the left: joined at once, a sum of texts takes half the time of its additions one by one.
        terms: list[nodes.Expr] = [child.right]
        while isinstance(child.left, nodes.Add):
            child = child.left
            terms.append(child.right)
        operands = [_rewritten(term) for term in (child.left, *reversed(terms))]
        return _filter(nodes.List(operands, lineno=child.lineno), _ADDED)
    _rewrite_operators(child)
    match child:
        case nodes.Concat():
            return _filter(nodes.List(child.nodes, lineno=child.lineno), _JOIN)
        case nodes.Mul():
            return _filter(child.left, _MULTIPLIED, child.right)
        case nodes.Pow():
            return _filter(child.left, _RAISED, child.right)
        case nodes.Getitem(arg=nodes.Slice() as cut):
            bounds = (bound or nodes.Const(None) for bound in (cut.start, cut.stop, cut.step))
            return _filter(child.node, _SLICED, *bounds)
        case nodes.List() | nodes.Dict() if _holds_variables(child):
            return _filter(child, _LISTED)
        case nodes.Tuple(ctx="load") if _holds_variables(child):
            return _filter(child, _LISTED)
    return child


def _holds_variables(literal: nodes.Expr) -> bool:
    return not all(isinstance(inner, (nodes.Const, nodes.Pair)) for inner in literal.find_all(nodes.Expr))


def _filter(node: nodes.Expr, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


def _enter_loop_body(loop: int, run: TemplateRun, *targets: Any) -> str:
    run.spend(STEP)
    for target in targets:
        if isinstance(target, TracedMessage):
            run.entered.append(target._index)
            return _loop_mark(loop, target._index)
    return ""


def _tested_in_loop(condition: Any, run: TemplateRun) -> Any:
    run.spend(STEP)
    return condition


def _leave_loop(loop: int, _: TemplateRun) -> str:
    return _loop_mark(loop, None)


@functools.lru_cache(4096)
def _loop_mark(loop: int, message_index: int | None) -> str:
    return TracedStr("", (Span(0, 0, LoopMark(loop, message_index)),))


def _tainting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter: its work is counted, and a plain string that it makes from traced input counts as content."""
    first = int(hasattr(function, "jinja_pass_arg"))  # a context, evaluation context or environment before the value
    count: Callable[..., None] = FILTER_COSTS.get(name, spend_on_text_of)

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        count(*args[first:], **kwargs)
        return tainted_like(function(*args, **kwargs), (*args, *kwargs.values()))

    return filtered


@jinja2.pass_eval_context
def _join_filter(eval_context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    value, d = list(value), str(d)
    if attribute is not None:
        pick = jinja2.filters.make_attrgetter(eval_context.environment, attribute)
        value = [pick(item) for item in value]
    return traced_join(d, value)


def _indent_filter(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """As Jinja's own filter, which joins with a plain string."""
    spend((s.count("\n") + 1) * (len(width) if isinstance(width, str) else width))
    indention = width if isinstance(width, str) else " " * width
    lines = TracedStr(s, s.spans if isinstance(s, TracedStr) else ()) + "\n"
    head, *rest = lines.splitlines()
    if blank:
        text = traced_join("\n" + indention, [head, *rest])
    else:
        text = traced_join("\n", [head, *(traced_join("", (indention, line)) if line else line for line in rest)])
    return traced_join("", (indention, text)) if first else text


def _format_filter(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise jinja2.exceptions.FilterArgumentError("format takes positional or keyword arguments, not both")
    return traced_percent(traced_text(value), kwargs or args)


@jinja2.pass_eval_context
def _replace_filter(eval_context: Any, s: str, old: str, new: str, count: int | None = None) -> str:
    return TracedStr.replace(_as_traced(s), str(old), str(new), -1 if count is None else count)


def _as_traced(value: Any) -> TracedStr:
    text = traced_text(value)
    return text if isinstance(text, TracedStr) else TracedStr(text)


def _printed(value: Any) -> Any:
    """What `{{ value }}` prints: the text of a list or a dict is content, as what it holds is."""
    return value if isinstance(value, (str, jinja2.Undefined)) else traced_text(value)


def _percent(left: Any, right: Any) -> Any:
    return traced_percent(left, right) if isinstance(left, str) else left % right


def _reverse_filter(value: Any) -> Any:
    return value[::-1] if isinstance(value, str) else jinja2.filters.do_reverse(value)


def _identity(value: Any) -> Any:
    return value


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


class _TemplateDict:
    """`dict(...)` and `dict.fromkeys(...)`, without the class that a template could climb from."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        made = dict(*args, **kwargs)
        spend_on_text_of(made)
        return made

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        keys = list(keys)
        spend_on_text_times(value, len(keys))
        return dict.fromkeys(keys, value)


class _TemplateNamespace(Namespace):
    """A namespace that a template cannot use to reach into Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as Jinja's own: `self` may be the name of an attribute
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # a namespace may hold another one twice, and that one too


_PLAIN_OBJECTS = frozenset((_TemplateNamespace, LoopContext))
_ABSENT = object()


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold an underscore name, got {name!r}")
