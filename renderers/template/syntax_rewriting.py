"""Changes to the syntax tree of a chat template before it is compiled.

Loops get marks that say which message they print for. Operators and literals become calls of filters that keep the
provenance of text and count work. `FILTERS` are those filters, by the names that the tree uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser

from renderers.template.operation_costs import added, listed, multiplied, raised_to, sliced
from renderers.template.traced import LoopMark, Span, TracedStr, traced_join
from renderers.template.traced_inputs import TracedMessage
from renderers.template.work_limit import STEP, TemplateRun

_JOIN, _ENTER, _TESTED, _LEAVE = "_traced_join", "_enter_loop_body", "_tested_in_loop", "_leave_loop"
_ADDED, _MULTIPLIED, _RAISED, _LISTED, _SLICED = "_added", "_multiplied", "_raised", "_listed", "_sliced"
#: The variable of a template run that holds its `TemplateRun`.
RUN = "_run"


def rewrite(tree: nodes.Template) -> None:
    """Mark the loops of a parsed template and replace its operators, in place."""
    _LoopMarker().mark(tree)
    _rewrite_operators(tree)


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` prints its body: sampled text is found by the trace instead."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body)]


class _LoopMarker:
    """Puts `_enter_loop_body(n, target)` at the start of every loop body and `_leave_loop(n)` after the loop.

    The mark at the start names the message that the body prints for. It holds until the next mark, so a body left
    early (`continue`, `break`) needs no further mark.
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
        if child.test is not None:  # passes that the test rejects are not counted in the body
            child.test = nodes.Filter(
                child.test, _TESTED, [nodes.Name(RUN, "load")], [], None, None, lineno=child.lineno
            )
        child.body.insert(0, _print_call(_ENTER, [number, nodes.Name(RUN, "load"), *targets], child.lineno))
        # The variable keeps Jinja from evaluating the call at compile time, which would lose the mark.
        return [child, _print_call(_LEAVE, [number, nodes.Name(RUN, "load")], child.lineno)]


def _print_call(function: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Output:
    # A filter call is direct; a function call goes through the checks of the sandbox, which take ten times as long.
    call = nodes.Filter(arguments[0], function, arguments[1:], [], None, None, lineno=lineno)
    return nodes.Output([call], lineno=lineno)


def _rewrite_operators(node: nodes.Node) -> None:
    """Turn `a ~ b`, `a + b + c`, `a * b`, `a ** b`, `[a, b]` and `a[1:]` into calls of `FILTERS`."""
    for field, value in node.iter_fields():
        children = value if isinstance(value, list) else [value]
        replaced = [_rewritten(child) for child in children]
        if any(new is not old for new, old in zip(replaced, children, strict=True)):
            setattr(node, field, replaced if isinstance(value, list) else replaced[0])


def _rewritten(child: Any) -> Any:
    if not isinstance(child, nodes.Node):
        return child
    if isinstance(child, nodes.Add):
        # All terms at once: joining a sum of texts takes half the time of adding them one by one.
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
        case nodes.Getitem(arg=nodes.Slice() as key):
            bounds = (bound or nodes.Const(None) for bound in (key.start, key.stop, key.step))
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


FILTERS: dict[str, Callable[..., Any]] = {
    _JOIN: functools.partial(traced_join, ""),
    _ENTER: _enter_loop_body,
    _TESTED: _tested_in_loop,
    _LEAVE: _leave_loop,
    _ADDED: added,
    _MULTIPLIED: multiplied,
    _RAISED: raised_to,
    _LISTED: listed,
    _SLICED: sliced,
}
