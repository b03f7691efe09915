"""Changes to the syntax tree of a chat template before it is compiled.

Loops get marks that say which message they print for. Operators become calls of filters that keep the
provenance of text and count work. `FILTERS` are those filters, by the names that the tree uses.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser

from renderers.template.operation_costs import added, multiplied, raised_to
from renderers.template.traced import loop_mark, traced_join
from renderers.template.traced_input import TracedMessage
from renderers.template.work_limit import STEP, TemplateRun

#: The variable of a template run that holds its `TemplateRun`.
RUN = "_run"


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` prints its body: the trace finds sampled text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body)]


def rewrite(tree: nodes.Template) -> None:
    """Mark the loops of a parsed template and replace its operators, in place."""
    _rewrite_children(tree, itertools.count(1))


def _rewrite_children(node: nodes.Node, loops: Iterator[int]) -> None:
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [new for child in value for new in _rewritten(child, loops)])
        elif isinstance(value, nodes.Node):
            setattr(node, field, _rewritten_expression(value, loops))


def _rewritten(child: Any, loops: Iterator[int]) -> list[Any]:
    if not isinstance(child, nodes.Node):
        return [child]
    if not isinstance(child, nodes.For):
        return [_rewritten_expression(child, loops)]
    _rewrite_children(child, loops)
    return _marked(child, nodes.Const(next(loops), lineno=child.lineno))


def _marked(loop: nodes.For, number: nodes.Const) -> list[nodes.Node]:
    """The loop with `_enter_loop_body(n, run, target)` at the start of its body, then `_leave_loop(n, run)`.

    The mark at the start names the message that the body prints for. It holds until the next mark, so a
    body left early (`continue`, `break`) needs no further mark.
    """
    target, run = loop.target, nodes.Name(RUN, "load")
    names = [target] if isinstance(target, nodes.Name) else list(target.find_all(nodes.Name))
    targets = [nodes.Name(name.name, "load") for name in names]
    if loop.test is not None:  # passes that the test rejects are not counted in the body
        loop.test = _filter(loop.test, _tested_in_loop, run)
    # A filter call is direct; a function call goes through the checks of the sandbox, which take ten times as long.
    loop.body.insert(0, nodes.Output([_filter(number, _enter_loop_body, run, *targets)], lineno=loop.lineno))
    # The variable keeps Jinja from evaluating the call at compile time, which would lose the mark.
    return [loop, nodes.Output([_filter(number, _leave_loop, run)], lineno=loop.lineno)]


def _rewritten_expression(child: Any, loops: Iterator[int]) -> Any:
    """`a ~ b`, `a + b + c`, `a * b` and `a ** b` as calls of `FILTERS`; other nodes unchanged."""
    if isinstance(child, nodes.Add):
        # All terms at once: joining a sum of texts takes half the time of adding them one by one.
        terms: list[nodes.Expr] = [child.right]
        while isinstance(child.left, nodes.Add):
            child = child.left
            terms.append(child.right)
        operands = [_rewritten_expression(term, loops) for term in (child.left, *reversed(terms))]
        return _filter(nodes.List(operands, lineno=child.lineno), added)
    _rewrite_children(child, loops)
    match child:
        case nodes.Concat():
            return _filter(nodes.Const("", lineno=child.lineno), traced_join, nodes.List(child.nodes))
        case nodes.Mul():
            return _filter(child.left, multiplied, child.right)
        case nodes.Pow():
            return _filter(child.left, raised_to, child.right)
    return child


def _filter(node: Any, function: Callable[..., Any], *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, _name(function), list(arguments), [], None, None, lineno=node.lineno)


def _name(function: Callable[..., Any]) -> str:
    """The name of a function in `FILTERS`; no filter of Jinja has such a name."""
    return f"_rewritten_{function.__name__}"


def _enter_loop_body(loop: int, run: TemplateRun, *targets: Any) -> str:
    run.spend(STEP)
    for target in targets:
        if isinstance(target, TracedMessage):
            run.last_entered = target._index
            return loop_mark(loop, target._index)
    return ""


def _tested_in_loop(condition: Any, run: TemplateRun) -> Any:
    run.spend(STEP)
    return condition


def _leave_loop(loop: int, _: TemplateRun) -> str:
    return loop_mark(loop, None)


_FUNCTIONS = (_enter_loop_body, _tested_in_loop, _leave_loop, added, multiplied, raised_to, traced_join)
FILTERS: dict[str, Callable[..., Any]] = {_name(function): function for function in _FUNCTIONS}
