"""Templates that print earlier messages differently once others follow: decided by the history where it is given."""

import functools
from typing import Any

import pytest
from corpus import TOOLS, answer, call, says, system, text, user
from grafted import graft
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers import BridgeRefusal, RenderedTokens, RendererOptions, TemplateRenderer, load_renderer

# Mistral's habits. Pixtral: a system message stands in the user's turn if that is the last message; a user may send
# parts, the others strings. Mistral 7B v0.3: the tools stand before the last user's turn.
PIXTRAL = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content + '\\n\\n' %}{%- set talk = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set talk = messages %}{%- endif %}
{%- for message in talk %}
    {%- set is_turn_of_user = loop.index0 % 2 == 0 %}
    {%- if (message.role == 'user') != is_turn_of_user %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + (system if loop.last else '') }}
        {%- if message.content is string %}{{- message.content }}
        {%- else %}{%- for part in message.content %}{{- part.text }}{%- endfor %}{%- endif %}
        {{- '[/INST]' }}
    {%- else %}{{- message.content + eos_token }}{%- endif %}
{%- endfor %}"""
MISTRAL_V3 = """\
{{- bos_token }}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == asked[-1] %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS]' }}
        {%- for call in message.tool_calls %}{{- call.function.name + (call.function.arguments | tojson) }}{%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}{{- message.content + eos_token }}{%- endif %}
{%- endfor %}"""
WITH_SYSTEM = [system("Be brief."), user("a"), says("b"), user("c")]


@functools.cache
def loaded(source: str, history: Any = "template") -> TemplateRenderer:
    return load_renderer(graft("mistral", source), config=RendererOptions(history=history))


def sampled(renderer: TemplateRenderer, messages: list[Any], turn: int, **options: Any) -> tuple[list[int], list[int]]:
    """The prompt of an assistant's turn, and the turn as the template prints it behind that prompt."""
    prompt = renderer.render(messages[:turn], add_generation_prompt=True, **options).token_ids
    printed = renderer.render(messages[: turn + 1], **options)
    columns = zip(printed.token_ids, printed.message_indices, printed.sampled_mask, strict=True)
    return prompt, [token_id for token_id, owner, is_sampled in columns if is_sampled and owner == turn]


def histories(messages: list[Any], turn: int) -> list[list[Any]]:
    return [messages[:turn], messages[: turn + 1]]


# The template's own history.


CALLING = [user("Weather?"), says("", None, [call("run", {})]), answer("22 °C"), says("Warm."), user("And now?")]


def test_tools_that_move_to_the_last_question_refuse_user_messages_and_allow_tool_results() -> None:
    renderer = loaded(MISTRAL_V3)
    prompt, _ = sampled(renderer, CALLING, 1, tools=TOOLS)
    completion = renderer.tokenizer.encode_scaffold("[TOOL_CALLS]run{}</s>")
    for previous in (None, *histories(CALLING, 1)):
        outcome = renderer.try_bridge(prompt, completion, CALLING[2:3], tools=TOOLS, previous_messages=previous)
        assert isinstance(outcome, RenderedTokens)
        assert outcome.token_ids == renderer.render(CALLING[:3], tools=TOOLS, add_generation_prompt=True).token_ids
    prompt, completion = sampled(renderer, CALLING, 3, tools=TOOLS)
    for previous in histories(CALLING, 3):
        outcome = renderer.try_bridge(prompt, completion, CALLING[4:], tools=TOOLS, previous_messages=previous)
        assert outcome is BridgeRefusal.REWRITES_HISTORY
    prompt, completion = sampled(renderer, CALLING, 3)
    for previous in histories(CALLING, 3):
        outcome = renderer.try_bridge(prompt, completion, CALLING[4:], previous_messages=previous)
        assert isinstance(outcome, RenderedTokens)


words = st.text("ab\n é[", max_size=4)
contents = words | st.lists(words, max_size=2).map(lambda texts: text(*texts))


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    before=st.lists(st.builds(system, words), max_size=1),
    talk=st.lists(st.tuples(contents, words), min_size=1, max_size=3),
    last=contents,
    with_turn=st.booleans(),
)
def test_a_bridge_is_the_full_render_and_is_refused_only_where_the_render_differs(
    before: list[Any], talk: list[tuple[Any, str]], last: Any, with_turn: bool
) -> None:
    renderer = loaded(PIXTRAL)
    messages = [*before, *(message for asked, said in talk for message in (user(asked), says(said))), user(last)]
    turn = len(messages) - 2
    prompt, completion = sampled(renderer, messages, turn)
    full = renderer.render(messages, add_generation_prompt=True).token_ids
    outcome = renderer.try_bridge(prompt, completion, messages[-1:], previous_messages=messages[: turn + with_turn])
    goes_on = full[: len(prompt) + len(completion)] == [*prompt, *completion]
    if isinstance(outcome, RenderedTokens):
        assert outcome.token_ids == full
    else:
        assert outcome is BridgeRefusal.REWRITES_HISTORY
        assert not goes_on or before  # a system message moves, be it an empty one


# History as it was sampled.


def test_as_sampled_extends_the_tokens_that_the_policy_saw_and_is_counted() -> None:
    renderer = loaded(PIXTRAL, "as_sampled")
    kept = renderer.bridge_stats.overridden[BridgeRefusal.REWRITES_HISTORY]
    prompt, completion = sampled(renderer, WITH_SYSTEM, 2)
    outcome = renderer.try_bridge(prompt, completion, WITH_SYSTEM[3:], previous_messages=WITH_SYSTEM[:2])
    assert isinstance(outcome, RenderedTokens)
    assert renderer.tokenizer.decode(outcome.token_ids) == (
        "<s>[INST]Be brief.\n\na[/INST]b</s>[INST]Be brief.\n\nc[/INST]"
    )
    # What follows is what the template prints there; the full render would have taken the message away from the first.
    full = renderer.tokenizer.decode(renderer.render(WITH_SYSTEM, add_generation_prompt=True).token_ids)
    assert full == "<s>[INST]a[/INST]b</s>[INST]Be brief.\n\nc[/INST]"
    assert renderer.bridge_stats.overridden[BridgeRefusal.REWRITES_HISTORY] == kept + 1


def test_a_bridge_that_depends_on_a_missing_history_is_refused_with_needs_history() -> None:
    renderer = loaded(PIXTRAL)
    prompt, completion = sampled(renderer, WITH_SYSTEM[1:], 1)
    assert renderer.try_bridge(prompt, completion, WITH_SYSTEM[3:]) is BridgeRefusal.NEEDS_HISTORY
