"""The Jinja environment in which chat templates run: that of transformers, made to keep provenance and count work.

Settings and helpers follow `transformers.utils.chat_template_utils`. Six operations of Jinja would silently
drop spans, and each is replaced here or in `syntax_rewriting`: the `concat` that joins a template's output,
the text of a printed list or dict, the operators `~` and `%`, methods called on string literals (`',
'.join(items)`), and filters that build new strings. The work of loops, calls, filters and of the operators
whose result is larger than their operands is counted (`work_limit`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from renderers.template.operation_costs import count_filter
from renderers.template.syntax_rewriting import FILTERS, GenerationTag, rewrite
from renderers.template.traced import (
    TracedStr,
    plain,
    spend_on_width,
    tainted_like,
    traced_join,
    traced_percent,
    traced_text,
)
from renderers.template.traced_json import traced_json
from renderers.template.work_limit import STEP, spend, spend_on_text_of, spend_on_text_times

_DICT_ATTRIBUTES = frozenset(dir(dict))
# Methods of strings, integers and dicts that would drop spans, or whose work is not counted. Content that a template
# encodes and decodes again would count as text of the template. `_TemplateDict` has a counted `fromkeys`.
_FORBIDDEN = frozenset(("encode", "expandtabs", "fromkeys", "to_bytes", "translate"))
# The sandbox replaces `format` and `format_map`, which could read attributes.
_SAFE_STR_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - _FORBIDDEN - {"format", "format_map"}


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates print `TracedStr`."""

    concat = staticmethod(functools.partial(traced_join, ""))
    intercepted_binops = frozenset("%")  # Python drops the spans in `'%s' % (traced,)`

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
            replace=_replace_filter,
            reverse=_reverse_filter,
            safe=lambda value: value,
        )
        del self.globals["lipsum"]  # random text, in any amount
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda fmt: now().strftime(fmt),
            dict=_TemplateDict(),
            namespace=_TemplateNamespace,
        )
        self.filters |= FILTERS

    def compile_chat_template(self, source: str) -> jinja2.Template:
        """Parse, rewrite and compile a template. Raises `jinja2.TemplateSyntaxError`."""
        tree = self.parse(source)
        rewrite(tree)
        return self.from_string(tree)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The attribute as the sandbox allows it, whose own checks would take half the time of a print."""
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
        """Whether an attribute may be read: not what the sandbox forbids, nor `_FORBIDDEN`, nor what `str` lacks."""
        if attr in _FORBIDDEN and isinstance(obj, (str, int, dict)):
            return False
        if isinstance(obj, TracedStr) and not hasattr(str, attr):
            return False
        return bool(super().is_safe_attribute(obj, attr, value))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call methods of plain strings on a traced copy, so that `'\\n'.join(traced)` stays traced."""
        if type(obj) is Macro:  # a macro of the template, to which Jinja's checks of functions do not apply
            spend(STEP)
            # Jinja adds these to every call and removes them itself for other functions.
            kwargs.pop("_block_vars", None)
            kwargs.pop("_loop_vars", None)
            return obj(context.eval_ctx, *args, **kwargs)
        owner = getattr(obj, "__self__", None)
        spend(STEP + len(owner) if isinstance(owner, str) else STEP)
        if isinstance(owner, str) and not isinstance(owner, TracedStr):
            obj = getattr(TracedStr(owner), obj.__name__)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` in Jinja's formatter, which forbids unsafe attributes; fields keep their spans."""
        safe_format = super().wrap_str_format(value)
        if safe_format is None:
            return None
        template: str = value.__self__
        formatter = _CountingFormatter(self)

        @functools.wraps(safe_format)
        def formatted(*args: Any, **kwargs: Any) -> str:
            positional, named = ((), args[0]) if value.__name__ == "format_map" and args else (args, kwargs)
            # First for its count: the next line makes a text of any width at once.
            formatter.vformat(plain(template), positional, named)
            expected = safe_format(*args, **kwargs)  # raises the errors of a wrong call
            if not (isinstance(template, TracedStr) and template.spans):
                text = formatter.traced(plain(template), positional, named)
                if text == expected:
                    return text
            return str(tainted_like(plain(expected), (template, *args, kwargs)))

        return formatted


class _CountingFormatter(jinja2.sandbox.SandboxedFormatter):
    """Counts the text of a field before it is made."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        spend_on_text_of(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        spend_on_text_of(value)
        spend_on_width(format_spec)
        return str(super().format_field(value, format_spec))

    def traced(self, template: str, positional: Sequence[Any], named: Mapping[str, Any]) -> str | None:
        """`vformat` with the spans of its fields; None for a nested format specification."""
        pieces: list[str] = []
        automatic = 0
        for literal, name, spec, conversion in self.parse(template):
            pieces.append(literal)
            if name is None:
                continue
            if spec and "{" in spec:
                return None
            if not name or name[0] in ".[":
                name, automatic = f"{automatic}{name}", automatic + 1
            value = self.get_field(name, positional, named)[0]
            if not spec and not conversion:
                pieces.append(traced_text(value))
            else:
                suffix = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
                pieces.append(tainted_like(self.vformat(f"{{{name}{suffix}}}", positional, named), (value,)))
        return traced_join("", pieces)


def _tainting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter: its work is counted, and a plain string made from traced input counts as content."""
    first = int(hasattr(function, "jinja_pass_arg"))  # a context, evaluation context or environment before the value

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        count_filter(name, *args[first:], **kwargs)
        return tainted_like(function(*args, **kwargs), (*args, *kwargs.values()))

    return filtered


@jinja2.pass_eval_context
def _join_filter(eval_context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    value, d = list(value), str(d)
    if attribute is not None:
        pick = jinja2.filters.make_attrgetter(eval_context.environment, attribute)
        value = [pick(item) for item in value]
    return traced_join(d, value)


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
    """The text that `{{ value }}` prints; the text of a list or a dict counts as content."""
    return value if isinstance(value, (str, jinja2.Undefined)) else traced_text(value)


def _percent(left: Any, right: Any) -> Any:
    return traced_percent(left, right) if isinstance(left, str) else left % right


def _reverse_filter(value: Any) -> Any:
    return value[::-1] if isinstance(value, str) else jinja2.filters.do_reverse(value)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


class _TemplateDict:
    """`dict(...)` and `dict.fromkeys(...)`, without access to the class `dict` and its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        made = dict(*args, **kwargs)
        spend_on_text_of(made)
        return made

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        keys = list(keys)
        spend_on_text_times(value, len(keys))
        return dict.fromkeys(keys, value)


class _TemplateNamespace(Namespace):
    """A namespace that refuses names with a leading underscore, which lead to Python's internals."""

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
        return "<Namespace>"  # nested namespaces could make a text of exponential size


_PLAIN_OBJECTS = frozenset((_TemplateNamespace, LoopContext))
_ABSENT = object()


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold an underscore name, got {name!r}")
