"""A traced template prints what transformers prints, and says where each character came from."""

import json
from datetime import datetime
from itertools import groupby
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from renderers.errors import TemplateError
from renderers.template.chat_template import ChatTemplate
from renderers.template.traced import Origin, TracedStr, plain
from renderers.template.traced_json import traced_json

# Plain text, which every template below takes.
TEXT_CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": "Hi"}],
    "dialogue": [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "a\nb\n\n  c  "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes: {x} %s 100%"},
        {"role": "user", "content": "and <|im_end|> then?"},
    ],
    "unicode": [
        {"role": "user", "content": "héß 漢字 🙂\u2028\u00a0İ\t"},
        {"role": "assistant", "content": "ﬁn ǆ \U0001f469\u200d\U0001f52c"},
    ],
    "empty": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    "white space": [{"role": "user", "content": " \n\t "}],
}

TEXT_TEMPLATES: dict[str, str] = {
    "chatml": """{% for message in messages %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
    {%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "macro": """{%- macro turn(m, n=0) %}[{{ n }}:{{ m.role | upper }}] {{ m.content }};{% endmacro %}
{%- for m in messages %}{{ turn(m, n=loop.index0) }}
{% endfor %}""",
    "set block": """{% set body %}
{% for m in messages %}
  {{ m.role }}: {{ m.content }}
{% endfor %}
{% endset %}<<{{ body | trim }}>>{{ body }}""",
    "call block": """{% macro wrap(tag) %}<{{ tag }}>{{ caller() }}</{{ tag }}>{% endmacro %}
{% for m in messages %}{% call wrap(m.role) %}{{ m.content }}{% endcall %}{% endfor %}""",
    "filter block": "{% for m in messages %}{% filter upper %}{{ m.role }} {{ m.content }}{% endfilter %}{% endfor %}",
    "join": "{{ messages | map(attribute='content') | join(' | ') }}{{ messages | join('-', attribute='role') }}",
    "replace filter": """{% for m in messages %}{{ '<|im_start|>{c}\\n' | replace('{c}', m.content) }}
{{- m.content | replace('\\n', '<br>') | replace('a', m.role, 1) }}{% endfor %}""",
    "indent": """{% for m in messages %}{{ m.content | indent }}|{{ m.content | indent(2, true) }}|
{{- m.content | indent('> ', first=true, blank=true) }}{% endfor %}""",
    "case": """{% for m in messages %}{{ m.content | upper }}{{ m.content | lower }}{{ m.content | title }}
{{- m.content | capitalize }}{{ m.content.swapcase() }}{{ m.content.title() }}{% endfor %}""",
    "namespace": """{% set ns = namespace(n=0, seen='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}
{%- set ns.seen = ns.seen ~ m.content %}{{ ns.n }}{% endfor %}{{ ns.seen }}""",
    "neighbours": """{% for m in messages %}{% if loop.previtem is defined %}{{ loop.previtem.content }}<{% endif %}
{{- m.content }}{% if not loop.last %}>{{ loop.nextitem.role }}{% endif %}{{ loop.changed(m.role) }}{% endfor %}""",
    "reversed": """{% for m in messages[::-1] %}{{ m.content }}{{ m.content[::-1] }}{% endfor %}
{%- for m in messages | reverse %}{{ m.content | reverse }}{% endfor %}""",
    "sliced": "{% for m in messages[1:] %}{{ m.content[1:-1] }}{{ m.content[:3] }}{{ m.content[-1:] }}{% endfor %}",
    "continue and break": """{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{{- m.role }}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}end""",
    "tilde": "{% for m in messages %}{{ '<' ~ m.role ~ 1 ~ none ~ m.content ~ '>' ~ [m.content] }}{% endfor %}",
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}""",
    "methods on literals": """{% for m in messages %}{{ 'x-{}'.format(m.content) }}
{{- '{a}{0!s:>9}'.format(1, a=m.content) }}
{{- '<a>'.replace('a', m.content) }}{{ '-'.join(m.content.split()) }}{{ 'ab'.center(9) }}{% endfor %}""",
    "format": """{% for m in messages %}{{ '%s: %s' % (m.role, m.content) }}{{ '%s' % m.content }}{{ '%05d' % 3 }}
{{- '%s=%r' | format(m.role, m.content) }}{% endfor %}""",
    "splitting": """{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}
{{- m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] }}{{ m.content.partition(' ') | join('/') }}
{{- m.content.splitlines() | join('+') }}{{ m.content.rsplit(none, 1) | list | tojson }}{% endfor %}""",
    "containers": "{{ messages[0].content.split() }}{{ [messages[0].content, 1] }}{{ {'k': messages[0].content} }}",
    "dict": """{% set d = dict(a=messages[0].content, b=1) %}{{ d.a }}{{ d | tojson }}
{%- for k, v in d.items() %}{{ k }}{{ v }}{% endfor %}{{ dict.fromkeys(['q'], messages[0].content).q }}""",
    "more filters": """{% for m in messages %}{{ m.content | string | length }}{{ m.content | list | join('') }}
{{- m.content | first | default('') }}{{ m.content | wordcount }}{{ m.content | truncate(4, true, '') }}
{{- m.content | center(20) }}{{ m.content | e }}{{ m.content | urlencode }}{{ m.content | wordwrap(3) }}
{{- m.content | striptags }}{{ m.content | safe }}{{ (m.content ~ 'x') | batch(2) | list }}{% endfor %}""",
    "lookups that fail": "{{ messages[0].content['x'] is defined }}{{ messages[0].no }}{{ messages[0]['no'] is none }}",
    "arithmetic": "{% for m in messages %}{{ m.content * 2 }}{{ 2 * m.content }}{{ loop.index0 % 2 }}{% endfor %}",
}


def by_transformers(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=source, **variables)
    return rendered[0]


def pieces(source: str, messages: list[dict[str, Any]], **variables: Any) -> list[tuple[str, int, str | None]]:
    """(text, owner, field) of each stretch of equal owner and field."""
    text, segments = ChatTemplate(source, model="m").print(messages, **variables)
    return [
        ("".join(text[s.start : s.end] for s in stretch), owner, field)
        for (owner, field), stretch in groupby(segments, key=lambda s: (s.owner, s.origin and s.origin.path))
    ]


@pytest.mark.parametrize("conversation", TEXT_CONVERSATIONS)
@pytest.mark.parametrize("template", TEXT_TEMPLATES)
def test_the_printed_text_equals_that_of_transformers(template: str, conversation: str) -> None:
    source, messages = TEXT_TEMPLATES[template], TEXT_CONVERSATIONS[conversation]
    printed = ChatTemplate(source, model="m").print(messages, add_generation_prompt=True)
    assert printed.text == by_transformers(source, messages, add_generation_prompt=True)
    assert "".join(printed.text[s.start : s.end] for s in printed.segments) == printed.text
    assert type(printed.text) is str


# Characters that no template above writes itself, not even after a case map.
SECRET = "ЖЩЮ"


@pytest.mark.parametrize("template", TEXT_TEMPLATES)
def test_no_character_of_content_counts_as_template_text(template: str) -> None:
    messages = [{"role": "user", "content": f" {SECRET} {SECRET}\n"}, {"role": "assistant", "content": f"{SECRET}a"}]
    text, segments = ChatTemplate(TEXT_TEMPLATES[template], model="m").print(messages)
    leaked = [text[s.start : s.end] for s in segments if s.origin is None]
    assert not set("".join(leaked).upper()) & set(SECRET)


def test_the_leak_check_finds_a_planted_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renderers.template.traced_input.traced_value", lambda value, index, path: value)
    with pytest.raises(AssertionError):
        test_no_character_of_content_counts_as_template_text("chatml")


# Owners and origins, written out.

ASK_AND_ANSWER: list[dict[str, Any]] = [
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A"},
]


def test_a_loop_over_messages_owns_what_it_prints() -> None:
    source = "B{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}E"
    assert pieces(source, ASK_AND_ANSWER) == [
        ("B", -1, None),
        ("<user>", 0, None),
        ("Q", 0, "content"),
        (";", 0, None),
        ("<assistant>", 1, None),
        ("A", 1, "content"),
        (";", 1, None),
        ("E", -1, None),
    ]


def test_a_loop_body_left_early_does_not_own_the_text_of_the_next_message() -> None:
    source = "{% for m in messages %}a{% if loop.first %}{% continue %}{% endif %}b{% break %}{% endfor %}c"
    assert pieces(source, ASK_AND_ANSWER) == [("a", 0, None), ("ab", 1, None), ("c", -1, None)]


@pytest.mark.parametrize(
    "source",
    [
        "{{ '<|im_start|>%s' % messages[0].content }}",
        "{{ '<|im_start|>{}'.format(messages[0].content) }}",
        "{{ '<|im_start|>{m[content]}'.format(m=messages[0]) }}",
        "{{ '<|im_start|>{x}' | replace('{x}', messages[0].content) }}",
        "{{ '<|im_start|>' ~ messages[0].content }}",
        "{{ ['<|im_start|>', messages[0].content] | join }}",
    ],
)
def test_formatting_keeps_the_control_tokens_of_the_template_apart_from_content(source: str) -> None:
    printed = pieces(source, [{"role": "user", "content": "<|im_end|>"}])
    assert printed == [("<|im_start|>", -1, None), ("<|im_end|>", 0, "content")]


# JSON.

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.integers() | st.booleans() | st.none(), inner, max_size=3)
    ),
    max_leaves=8,
)
options = st.fixed_dictionaries(
    {},
    optional={
        "ensure_ascii": st.booleans(),
        "indent": st.none() | st.integers(-1, 4) | st.sampled_from(["\t", ""]),
        "separators": st.none() | st.sampled_from([(",", ":"), (" , ", " : ")]),
        "sort_keys": st.booleans(),
    },
)


def with_origins(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return TracedStr.of(value, Origin(depth, "x"))
    if isinstance(value, dict):
        return {with_origins(key, depth + 1): with_origins(item, depth + 1) for key, item in value.items()}
    return [with_origins(item, depth + 1) for item in value] if isinstance(value, list) else value


@settings(max_examples=60)
@given(value=values, settings_of_json=options)
def test_traced_json_is_json_dumps(value: Any, settings_of_json: dict[str, Any]) -> None:
    defaults = {"ensure_ascii": False}
    try:
        expected = json.dumps(value, **{**defaults, **settings_of_json})
    except TypeError:  # keys of different types cannot be sorted
        with pytest.raises(TypeError):
            traced_json(with_origins(value), **settings_of_json)
        return
    text = traced_json(with_origins(value), **settings_of_json)
    assert plain(text) == expected
    assert traced_json(value, **settings_of_json) == expected


@settings(max_examples=60)
@given(text=st.text(), ensure_ascii=st.booleans())
def test_json_traces_exactly_the_inside_of_a_string(text: str, ensure_ascii: bool) -> None:
    written = traced_json(TracedStr.of(text, Origin(5, "c")), ensure_ascii=ensure_ascii)
    inside = json.dumps(text, ensure_ascii=ensure_ascii)[1:-1]
    covered = [(s.start, s.end) for s in written.spans] if isinstance(written, TracedStr) else []
    assert covered == ([(1, 1 + len(inside))] if inside else [])


# Errors and the sandbox.


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.at_all }}",
        "{{ messages[9].content }}",
        "{{ 'a' + 1 }}",
        "{{ object() | tojson }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(x=1) }}",
        "{{ ', '.join([1]) }}",
        "{{ '{}'.format() }}",
    ],
)
def test_a_template_that_fails_where_transformers_fails_raises_a_template_error(source: str) -> None:
    with pytest.raises((jinja2.TemplateError, TypeError, IndexError)):
        by_transformers(source, ASK_AND_ANSWER)
    with pytest.raises(TemplateError):
        ChatTemplate(source, model="m").print(ASK_AND_ANSWER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content._spans }}",
        "{{ messages[0].content | attr('_spans') }}",
        "{{ messages[0].content.of('<|im_end|>', 1) }}",
        "{{ messages[0]._index }}",
        "{{ messages[0].content.__class__ }}",
        "{{ '{0.__class__}'.format(messages[0].content) }}",
        "{{ '{0._spans}'.format(messages[0].content) }}",
        "{{ messages[0].content.format.__self__ }}",
        "{{ dict.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ self.__dict__ }}",
    ],
)
def test_a_template_cannot_access_spans_or_python_internals(source: str) -> None:
    try:
        printed = ChatTemplate(source, model="m").print(ASK_AND_ANSWER).text
    except TemplateError:
        return
    assert printed == ""  # an undefined value


def test_the_sandbox_test_can_fail_because_public_attributes_are_printed() -> None:
    assert ChatTemplate("{{ messages[0].content.upper }}", model="m").print(ASK_AND_ANSWER).text != ""


def test_the_clock_of_a_template_can_be_set() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", model="m", now=lambda: datetime(2024, 7, 26))
    assert template.print([]).text == "26 Jul 2024"
