"""A bridge prints and encodes an extension once; equal inputs get the same tokens later."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import renderer_of
from test_bridge import COLOURS, QUESTION, image_part

from renderers import BridgeRefusal, RenderedTokens, RendererOptions, TemplateRenderer, load_renderer

texts = st.sampled_from(["R", "Go on.", "<|im_end|>"])
images = st.sampled_from(list(COLOURS)).map(image_part)
contents = texts | st.lists(texts.map(lambda text: {"type": "text", "text": text}) | images, min_size=1, max_size=2)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": contents}), min_size=1, max_size=2
)


@pytest.fixture(scope="module")
def uncached(tiny_model_dir: Path) -> TemplateRenderer:
    """The renderer of the same model that caches nothing."""
    return load_renderer(tiny_model_dir, config=RendererOptions(cache_bytes=0))


def outcome(renderer: TemplateRenderer, completion: list[int], new: Any, told: bool) -> Any:
    prompt = renderer.render(QUESTION, add_generation_prompt=True)
    result = renderer.try_bridge(
        prompt.token_ids,
        completion,
        new,
        previous_messages=QUESTION if told else None,
        previous_multi_modal_data=prompt.multi_modal_data,
    )
    if isinstance(result, BridgeRefusal):
        return result
    assert isinstance(result, RenderedTokens)
    media = result.multi_modal_data
    items = [] if media is None else [(item.mm_hash, placed) for item, placed in media.items_with_ranges()]
    return result.token_ids, result.spans, result.message_roles, result.message_tool_names, items


@pytest.mark.slow
@settings(max_examples=100)
@given(sampled=st.sampled_from([[], [70, 71]]), stopped=st.booleans(), new=messages, told=st.booleans())
def test_a_cached_extension_is_what_a_renderer_without_caches_prints(
    renderer: TemplateRenderer, uncached: TemplateRenderer, sampled: list[int], stopped: bool, new: Any, told: bool
) -> None:
    completion = sampled + renderer.get_stop_token_ids()[:1] * stopped
    expected = outcome(uncached, completion, new, told)
    for _ in range(2):
        assert outcome(renderer, completion, new, told) == expected


def prints(renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The conversations that the template prints from now on."""
    printed: list[Any] = []
    whole = renderer.template.print

    def counted(conversation: Any, **options: Any) -> Any:
        printed.append(conversation)
        return whole(conversation, **options)

    monkeypatch.setattr(renderer.template, "print", counted)
    return printed


def schema(kind: str) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"a": {"type": kind}}, "required": ["a"]}
    return [{"type": "function", "function": {"name": "get", "parameters": parameters}}]


@pytest.mark.slow
@pytest.mark.parametrize("template", ["trl/qwen3_5_think", "trl/glm4moe_training", "own/minimax"])
def test_a_call_that_was_parsed_with_another_schema_is_parsed_again(template: str) -> None:
    renderer = renderer_of(template)
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": {"a": "text"}}}
    question = [{"role": "user", "content": "?"}]
    asked = [*question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rendered = renderer.render(asked, tools=schema("string"))
    prompt = renderer.render(question, tools=schema("string"), add_generation_prompt=True)
    sampled = [id for span in rendered.spans if span.sampled for id in rendered.token_ids[span.start : span.end]]
    parsed = renderer.parse_response(sampled, tools=schema("integer"), prompt_ids=prompt.token_ids)
    assert not parsed.to_message().get("tool_calls"), "the argument is no integer"

    def tool_names(of: TemplateRenderer) -> list[str | None]:
        result = [{"role": "tool", "content": "r", "tool_call_id": "call_0"}]  # the id of the first call of a turn
        bridged = of.try_bridge(prompt.token_ids, sampled, result, tools=schema("string"), previous_messages=question)
        assert isinstance(bridged, RenderedTokens)
        return bridged.message_tool_names

    has_parsed_nothing = renderer_of.__wrapped__(template)
    assert tool_names(renderer) == tool_names(has_parsed_nothing) == ["get"]
