"""Every reason for which a bridge is refused, and the options that override a refusal."""

from pathlib import Path
from typing import Any

import pytest
from spelling import ids_of
from test_bridge import QUESTION, REPLY, bridged, image_part

from renderers import (
    BridgeRefusal,
    MultiModalData,
    RenderedTokens,
    RendererOptions,
    TemplateRenderer,
    ThinkingRetention,
    load_renderer,
)
from rollouts.testing import CHAT_TEMPLATE


def refusal(renderer: TemplateRenderer, *arguments: Any, **options: Any) -> BridgeRefusal:
    """The reason; checks that it was counted once and that the public method answers None."""
    before = renderer.bridge_stats.refused.copy()
    outcome = renderer.try_bridge(*arguments, **options)
    assert isinstance(outcome, BridgeRefusal)
    assert renderer.bridge_stats.refused - before == {outcome: 1}
    assert renderer.bridge_to_next_turn(*arguments, **options) is None
    assert renderer.bridge_stats.refused[outcome] == before[outcome] + 2
    return outcome


@pytest.fixture(scope="module")
def prompt(renderer: TemplateRenderer) -> list[int]:
    return renderer.render(QUESTION, add_generation_prompt=True).token_ids


@pytest.fixture(scope="module")
def completion(renderer: TemplateRenderer) -> list[int]:
    return ids_of(renderer, "A", "<|im_end|>")


@pytest.mark.parametrize(
    ("asked", "sampled", "new", "reason"),
    [
        (QUESTION, ["A"], [], BridgeRefusal.NO_NEW_MESSAGES),
        (QUESTION, ["A"], [*REPLY, {"role": "assistant", "content": "x"}], BridgeRefusal.ASSISTANT_IN_EXTENSION),
        (QUESTION, ["<think>", "hm"], REPLY, BridgeRefusal.OPEN_REASONING),
        ([{"role": "user", "content": [image_part()]}], ["A"], REPLY, BridgeRefusal.MISSING_MEDIA),
        (None, ["A"], REPLY, BridgeRefusal.NO_PROMPT),
    ],
    ids=lambda value: value.name if isinstance(value, BridgeRefusal) else "",
)
def test_a_bridge_that_could_not_be_right_is_refused(
    renderer: TemplateRenderer, asked: Any, sampled: list[str], new: Any, reason: BridgeRefusal
) -> None:
    prompt = renderer.render(asked, add_generation_prompt=True).token_ids if asked else []
    assert refusal(renderer, prompt, ids_of(renderer, *sampled, "<|im_end|>"), new) is reason


def test_reasoning_cut_off_by_a_length_limit_is_closed_with_scaffold(
    renderer: TemplateRenderer, prompt: list[int]
) -> None:
    thought = ids_of(renderer, "<think>", "hm")
    extended = bridged(renderer.bridge_to_next_turn(prompt, thought, REPLY))
    close = ids_of(renderer, "</think>", "<|im_end|>")
    sampled_end = len(prompt) + len(thought)
    assert extended.token_ids[:sampled_end] == prompt + thought
    assert extended.token_ids[sampled_end : sampled_end + 2] == close
    assert extended.sampled_mask[sampled_end - 1 : sampled_end + 2] == [True, False, False]


FORGETFUL = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last -%}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


ALWAYS_FORGETFUL = """{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' and m.reasoning_content and loop.last -%}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


@pytest.mark.parametrize("role", ["tool", "developer", "user"])
@pytest.mark.parametrize("retention", ["template", "tool_cycle", "all"])
def test_retention_decides_whether_reasoning_is_kept_within_a_tool_cycle_which_others_end(
    tiny_model_dir: Path, retention: ThinkingRetention, role: str
) -> None:
    config = RendererOptions(thinking_retention=retention, history="as_sampled", chat_template=ALWAYS_FORGETFUL)
    forgetful = load_renderer(tiny_model_dir, config=config)
    prompt = forgetful.render(QUESTION, add_generation_prompt=True).token_ids
    thought = ids_of(forgetful, "<think>", "\nhm\n", "</think>", "\n\nA", "<|im_end|>")
    kept = forgetful.bridge_to_next_turn(prompt, thought, [{"role": role, "content": "T"}])
    may_keep = retention == "all" or (retention, role) == ("tool_cycle", "tool")
    assert (kept is not None) == may_keep
    assert forgetful.bridge_stats.overridden[BridgeRefusal.DROPS_REASONING] == may_keep


def plain_template(message: str) -> str:
    """A ChatML template that prints every message with the expression or statements given."""
    return (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}"
        + message
        + "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        + "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )


def test_a_bridge_with_tools_is_refused_where_the_template_moves_them_to_the_last_question(
    tiny_model_dir: Path,
) -> None:
    show_tools = "{%- if tools and loop.last -%}{{- tools | tojson -}}{%- endif -%}"
    moving = load_renderer(tiny_model_dir, chat_template=plain_template(show_tools + "{{- m.content -}}"))
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    prompt = moving.render(QUESTION, tools=tools, add_generation_prompt=True).token_ids
    said = ids_of(moving, "A", "<|im_end|>")
    assert moving.try_bridge(prompt, said, REPLY, tools=tools) is BridgeRefusal.REWRITES_HISTORY
    without = moving.render(QUESTION, add_generation_prompt=True).token_ids
    assert isinstance(moving.try_bridge(without, said, REPLY), RenderedTokens)


NAMES_TOOLS = """
{%- if m.role == 'tool' -%}
{%- for c in messages[loop.index0 - 1].tool_calls or messages[loop.index0 - 2].tool_calls -%}
{%- if c.id == m.tool_call_id -%}{{- c.function.name ~ ': ' -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- m.content -}}
{%- for c in m.tool_calls or [] -%}{{- '<tool_call>{"name": "' ~ c.function.name ~ '"}</tool_call>' -}}{%- endfor -%}
"""


def test_the_name_of_a_tool_is_found_by_id_and_never_by_position(tiny_model_dir: Path) -> None:
    naming = load_renderer(tiny_model_dir, chat_template=plain_template(NAMES_TOOLS))
    made = [("x", "a"), ("y", "b")]
    calls = [{"id": i, "type": "function", "function": {"name": n, "arguments": {}}} for i, n in made]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    answers = [{"role": "tool", "tool_call_id": i, "content": i} for i in ("y", "x")]
    prompt = naming.render(QUESTION, add_generation_prompt=True).token_ids
    sampled = [
        *(token for _, n in made for token in ids_of(naming, "<tool_call>", f'{{"name": "{n}"}}', "</tool_call>")),
        *ids_of(naming, "<|im_end|>"),
    ]
    assert naming.try_bridge(prompt, sampled, answers) is BridgeRefusal.NEEDS_HISTORY
    history = [*QUESTION, turn]
    extended = bridged(naming.bridge_to_next_turn(prompt, sampled, answers, previous_messages=history))
    assert extended.token_ids == naming.render([*history, *answers], add_generation_prompt=True).token_ids
    assert extended.message_tool_names == ["b", "a"]


def test_new_messages_that_the_template_refuses_are_refused(tiny_model_dir: Path) -> None:
    refuse = "{%- if m.role == 'tool' -%}{{- raise_exception('no tools here') -}}{%- endif -%}"
    strict = load_renderer(tiny_model_dir, chat_template=plain_template(refuse + "{{- m.content -}}"))
    prompt = strict.render(QUESTION, add_generation_prompt=True).token_ids
    new = [{"role": "tool", "content": "T"}]
    assert refusal(strict, prompt, ids_of(strict, "A", "<|im_end|>"), new) is BridgeRefusal.TEMPLATE_REFUSES


def test_media_whose_range_covers_other_tokens_is_refused(renderer: TemplateRenderer, completion: list[int]) -> None:
    seen = renderer.render([{"role": "user", "content": [image_part()]}], add_generation_prompt=True)
    assert seen.multi_modal_data is not None
    ((item, where),) = seen.multi_modal_data.items_with_ranges()
    for wrong in (where.shifted(1), where.shifted(-1), where.shifted(10**6)):
        media = MultiModalData.from_items([(item, wrong)])
        reason = refusal(renderer, seen.token_ids, completion, REPLY, previous_multi_modal_data=media)
        assert reason is BridgeRefusal.MISPLACED_MEDIA


def test_a_template_that_does_not_close_earlier_turns_is_refused(tiny_model_dir: Path) -> None:
    source = CHAT_TEMPLATE.replace(
        "{{- '<|im_end|>\\n' -}}\n{%- elif message.role == 'tool' -%}",
        "{%- if loop.last -%}{{- '<|im_end|>\\n' -}}{%- endif -%}\n{%- elif message.role == 'tool' -%}",
    )
    assert source != CHAT_TEMPLATE
    open_ended = load_renderer(tiny_model_dir, chat_template=source)
    prompt = open_ended.render(QUESTION, add_generation_prompt=True).token_ids
    reason = refusal(open_ended, prompt, ids_of(open_ended, "A", "<|im_end|>"), REPLY)
    assert reason is BridgeRefusal.NO_TURN_END


def test_every_refusal_reason_is_covered_above() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [reason for reason in BridgeRefusal if f"BridgeRefusal.{reason.name}" not in source] == []


def with_markers(start: str, end: str) -> str:
    """FORGETFUL with other markers around reasoning."""
    return FORGETFUL.replace("<think>", start).replace("</think>", end)


def test_reasoning_between_unknown_tags_is_found_in_the_print_of_the_template(tiny_model_dir: Path) -> None:
    forgetful = load_renderer(tiny_model_dir, chat_template=with_markers("<mull:x>", "</mull:x>"))
    assert forgetful.format.reasoning is not None
    assert (forgetful.format.reasoning.start, forgetful.format.reasoning.end) == ("<mull:x>", "</mull:x>")
    prompt = forgetful.render(QUESTION, add_generation_prompt=True).token_ids
    thought = ids_of(forgetful, "<mull:x>\nhm\n</mull:x>\n\nA", "<|im_end|>")
    assert forgetful.parse_response(thought, prompt_ids=prompt).reasoning_content == "hm"
    assert refusal(forgetful, prompt, thought, REPLY) is BridgeRefusal.DROPS_REASONING
    plain = forgetful.bridge_to_next_turn(prompt, ids_of(forgetful, "A", "<|im_end|>"), REPLY)
    assert bridged(plain).token_ids[: len(prompt)] == prompt
