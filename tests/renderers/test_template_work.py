"""A template that would run without end, or fill the memory, is one error in bounded time; real ones never are."""

import json
from typing import Any

import corpus
import pytest
from corpus import user
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from loaded import TODAY

from renderers import load_renderer
from renderers.errors import TemplateError, TemplateLimitError, WorkLimitError
from renderers.messages import check_messages
from renderers.template import work_limit
from renderers.template.chat_template import ChatTemplate

GROWING_TEXT = "{%% set ns = namespace(s=%s) %%}{%% for i in range(60) %%}{%% set ns.s = %s %%}{%% endfor %%}{{ ns.s }}"
ENDLESS = {
    "nested loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "a loop whose test is never true": "{% for a in range(90000) %}{% for b in range(90000) if false %}{% endfor %}"
    "{% endfor %}",
    "a loop of continues": "{% for a in range(90000) %}{% for b in range(90000) %}{% continue %}{% endfor %}"
    "{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(100) }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a block that prints itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "a negative width before a loop": "{% set _ = messages[0].content.ljust(-10**15) %}"
    "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "filters in a loop": "{% for a in range(90000) %}{{ range(90000)|sort|first }}{% endfor %}",
    "methods in a loop": "{% set s = 'x' * 900000 %}{% for a in range(90000) %}{{ s.count('y') }}{% endfor %}",
    "slices in a loop": "{% set s = 'x' * 900000 %}{% for a in range(90000) %}{% set t = s[1:] %}{% endfor %}",
}
LARGE = {
    "repetition": "{{ 'x' * 10**12 }}",
    "repetition of content": "{{ 10**12 * messages[0].content }}",
    "repetition of a list": "{{ ([1] * 10**12)|length }}",
    "a width": "{{ 'x'|center(10**12) }}",
    "a width of a method": "{{ 'x'.ljust(10**12) }}{{ 'x'.rjust(10**12) }}",
    "zeros": "{{ 'x'.zfill(10**12) }}",
    "a width of content": "{{ messages[0].content.center(10**12) }}",
    "a width of %": "{{ '%999999999999d' % 5 }}",
    "a given width of %": "{{ '%*d' % (10**9, 5) }}",
    "a precision of %": "{{ '%.999999999f' % 5 }}",
    "the format filter": "{{ '%999999999999d'|format(5) }}",
    "a width of format": "{{ '{:999999999999}'.format(5) }}",
    "a given width of format": "{{ '{:{}}'.format(5, 10**12) }}",
    "indentation": "{{ 'a\nb'|indent(10**12) }}",
    "indented JSON": "{{ [[1]]|tojson(indent=10**12) }}",
    "separators": "{{ range(9999)|list|tojson(separators=('x' * 999999, 'y')) }}",
    "a replacement": "{{ ('x' * 999999)|replace('x', 'y' * 999999) }}",
    "a replacement of nothing": "{{ ('x' * 999999).replace('', 'y' * 999999) }}",
    "a separator": "{{ ('x' * 999999).join(['y'] * 999999) }}",
    "a separator of a filter": "{{ range(99999)|join('x' * 999999) }}",
    "wrapping": "{{ ('a ' * 9999)|wordwrap(1, wrapstring='x' * 999999) }}",
    "links": "{{ ('http://a.b ' * 9999)|urlize(rel='x' * 999999) }}",
    "a batch": "{{ [1]|batch(10**12, 'x')|list|length }}",
    "slices": "{{ [1]|slice(10**12)|list|length }}",
    "fromkeys": "{{ dict.fromkeys(range(99999), range(99999)|list) }}",
    "defaults": "{{ range(99999)|map(attribute='x', default=range(99999)|list)|list }}",
    "a sum of lists": "{{ ([[1] * 99999] * 99)|sum(start=[])|length }}",
    "a power": "{{ 2 ** (10 ** 12) }}",
    "a product": "{{ (2 ** 9999) * (2 ** 9999) }}",
    "rounding": "{{ 10|round(-10**12) }}",
    "letters of a text": "{{ ('x' * 9999999)|list|length }}",
    "letters of content": "{{ (messages[0].content * 9999999)|list|length }}",
    "lines of content": "{{ ((messages[0].content + '\n') * 999999).split('\n')|length }}",
}
DOUBLED = {
    "+": ("'x'", "ns.s + ns.s"),
    "+ of content": ("messages[0].content", "ns.s + ns.s"),
    "+ of a list": ("[1]", "ns.s + ns.s"),
    "~": ("'x'", "ns.s ~ ns.s"),
    "%": ("'x'", "'%s%s' % (ns.s, ns.s)"),
    "format": ("'x'", "'{}{}'.format(ns.s, ns.s)"),
    "join": ("'x'", "[ns.s, ns.s]|join"),
    "replace": ("'xx'", "ns.s.replace('x', 'xx')"),
    "the replace filter": ("'xx'", "ns.s|replace('x', 'xx')"),
    "JSON": ("'\"'", "ns.s|tojson|tojson"),
    "a list of lists": ("[1]", "[ns.s, ns.s]"),
    "a tuple of tuples": ("[1]", "(ns.s, ns.s)"),
    "a dict of dicts": ("[1]", "{'a': ns.s, 'b': ns.s}"),
    "dict()": ("[1]", "dict(a=ns.s, b=ns.s)"),
}
BOMBS = {**ENDLESS, **LARGE, **{f"doubled by {name}": GROWING_TEXT % steps for name, steps in DOUBLED.items()}}


@pytest.fixture
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the units: the same errors a hundred times as soon."""
    monkeypatch.setattr(work_limit, "_UNITS", work_limit._UNITS // 100)


@pytest.mark.usefixtures("little_work")
@pytest.mark.parametrize("bomb", BOMBS)
def test_an_endless_template_raises_a_limit_error(bomb: str) -> None:
    with pytest.raises(TemplateLimitError, match="published with"):
        ChatTemplate(BOMBS[bomb], model="m").print([user("hello")])


@pytest.mark.slow
@pytest.mark.parametrize("bomb", ["nested loops", "repetition", "doubled by +"])
def test_an_endless_template_raises_a_limit_error_with_the_full_number_of_units(bomb: str) -> None:
    with pytest.raises(TemplateLimitError):
        ChatTemplate(BOMBS[bomb], model="m").print([user("hello")])


@pytest.mark.parametrize("source", ["{{ (10**5000)|string }}", "{{ 10**5000 }}", "{{ 9**(9**9) }}"])
def test_an_integer_too_large_to_print_raises_a_limit_error(source: str) -> None:
    with pytest.raises(TemplateLimitError, match="integer"):
        ChatTemplate(source, model="m").print([user("hello")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ (5).to_bytes(10**12) }}",
        "{{ {}.fromkeys([1], 2) }}",
        "{{ 'x'.encode() }}",
        "{{ messages[0].content['encode']().decode() }}",
        "{{ messages[0].content.translate({104: 'x' * 999999}) }}",
        "{{ '\t'.expandtabs(10**12) }}",
    ],
)
def test_templates_cannot_call_methods_that_drop_origins_or_whose_work_is_not_counted(source: str) -> None:
    with pytest.raises(TemplateError, match="unsafe"):
        ChatTemplate(source, model="m").print([user("hello")])


def test_work_that_is_not_counted_is_bounded_by_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_limit, "_SECONDS_PER_UNIT", 1e-12)
    with pytest.raises(TemplateLimitError, match="takes longer"):
        ChatTemplate("{% for a in range(90000) %}{% endfor %}", model="m").print([user("hello")])


def test_the_time_limit_grows_with_the_characters_of_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine may need more than a minute for what spends few of its units."""
    clock = iter([0.0, 0.0, *[100.0] * 10])
    monkeypatch.setattr(work_limit.time, "thread_time", lambda: next(clock))
    long_run = work_limit.TemplateRun(1, [{"role": "user", "content": "x" * 10**6}])
    long_run.spend(10**5)  # the time begins with the first check
    long_run.spend(10**5)
    clock = iter([0.0, 0.0, *[100.0] * 10])
    short_run = work_limit.TemplateRun(1, [{"role": "user", "content": "x"}])
    short_run.spend(10**5)
    with pytest.raises(WorkLimitError, match="takes longer"):
        short_run.spend(10**5)


def test_loading_an_endless_template_is_refused(tiny_model_dir: Any) -> None:
    with pytest.raises(Exception, match="stopped") as stopped:
        load_renderer(tiny_model_dir, chat_template="{{ messages[0].content }}{{ 'x' * 10**12 }}")
    assert type(stopped.value).__module__ == "renderers.errors"


# Operators mean what they meant.

VALUES = st.one_of(
    st.integers(-20, 20),
    st.floats(-4, 4),
    st.booleans(),
    st.none(),
    st.text("ab<é", max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
    st.tuples(st.integers(0, 3)),
    st.just(b"x"),
)


@pytest.mark.slow
@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.sampled_from(["a + b", "a + b + a", "a * b", "a ** b", "[a, b]", "(a, b)", "a ~ b", "b + (a + b)"]),
    VALUES,
    VALUES,
)
def test_operators_give_the_results_of_jinja(expression: str, a: Any, b: Any) -> None:
    source = "{{ " + expression + " }}"
    try:
        expected: Any = ImmutableSandboxedEnvironment().from_string(source).render(a=a, b=b)
    except (TypeError, ValueError, ArithmeticError) as error:
        expected = type(error)
    try:
        found: Any = ChatTemplate(source, model="m").print([user("x")], a=a, b=b).text
    except TemplateError as error:
        found = type(error.__cause__)
    assert found == expected


@settings(max_examples=80, derandomize=True, deadline=None)
@given(
    st.one_of(st.text(max_size=6), st.lists(st.integers(), max_size=6)),
    *[st.none() | st.integers(-7, 7)] * 2,
    st.none() | st.sampled_from([-2, -1, 1, 2]),
)
def test_slices_equal_those_of_python(value: Any, start: int | None, stop: int | None, step: int | None) -> None:
    bounds = [str(bound) if bound is not None else "" for bound in (start, stop, step)]
    source = "{{ x[" + ":".join(bounds) + "]|tojson }}"
    printed = ChatTemplate(source, model="m").print([user("x")], x=value).text
    assert json.loads(printed) == value[start:stop:step]


# Real conversations.


@pytest.fixture(scope="module")
def spent() -> Any:
    """What share of its units a run of a template spends."""

    def share(template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> float:
        made: list[work_limit.TemplateRun] = []
        original = work_limit.TemplateRun.__exit__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                work_limit.TemplateRun, "__exit__", lambda run, *error: (made.append(run), original(run, *error))[1]
            )
            chat = ChatTemplate(corpus.templates()[template], model="m", now=lambda: TODAY)
            del made[:]
            chat.print(check_messages(messages), tools=tools, add_generation_prompt=True)
        return made[-1].spent / (made[-1].spent + made[-1]._units)

    return share


LONG = {
    "10,000 messages": ([user("question " * 5), {"role": "assistant", "content": "answer " * 9}] * 5000, None),
    "contents of a megabyte": ([user("word " * 200_000), {"role": "assistant", "content": "é" * 10**6}] * 2, None),
    "100 tools": ([user("a")], corpus.TOOLS * 50),
}


@pytest.mark.parametrize("conversation", LONG)
@pytest.mark.parametrize("template", ["trl/qwen3", "trl/llama3_1", "own/deepseek-v3", "own/minimax-m3"])
def test_real_templates_use_at_most_a_tenth_of_their_units(template: str, conversation: str, spent: Any) -> None:
    messages, tools = LONG[conversation]
    assert spent(template, messages, tools) < 0.1
