"""What callers, files and templates get wrong: a clear error, a refusal or the right answer, never a wrong token."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus import answer, call, says, user
from loaded import renderer_of

from renderers import (
    RenderedTokens,
    TemplateRenderer,
    load_renderer,
)
from renderers.errors import MessageError

# Bridges.


def test_ids_may_be_arrays_and_results_are_plain_ints(renderer: TemplateRenderer) -> None:
    prompt = renderer.render([user("Q")], add_generation_prompt=True).token_ids
    completion = renderer.tokenizer.encode_scaffold("A<|im_end|>")
    plain = renderer.bridge_to_next_turn(prompt, completion, [user("R")])
    for kind in (np.array, tuple, lambda ids: [np.int64(i) for i in ids]):
        bridged = renderer.bridge_to_next_turn(kind(prompt), kind(completion), [user("R")])
        assert bridged is not None
        assert plain is not None
        assert bridged.token_ids == plain.token_ids
        assert json.loads(json.dumps(bridged.token_ids)) == plain.token_ids
        assert renderer.parse_response(kind(completion)).content == "A"


# Caches.


def test_a_conversation_never_gets_the_cached_ids_of_another(tiny_model_dir: Path) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }} {{ m.score }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    scored = load_renderer(tiny_model_dir, chat_template=source)
    rendered = [scored.render([{**user("x"), "score": score}]) for score in (np.int64(0), np.float64(0))]
    texts = [scored.tokenizer.decode(one.token_ids) for one in rendered]
    assert "x 0<" in texts[0]
    assert "x 0.0<" in texts[1]


# Templates.


# Arguments.


@pytest.mark.parametrize("tools", ["abc", {"function": {}}, ["x"], [{"function": None}], [print], 5])
def test_malformed_tools_are_refused_by_every_method(renderer: TemplateRenderer, tools: Any) -> None:
    prompt = renderer.render([user("Q")], add_generation_prompt=True).token_ids
    with pytest.raises(MessageError, match="tools"):
        renderer.render([user("Q")], tools=tools)
    with pytest.raises(MessageError, match="tools"):
        renderer.parse_response(prompt, tools=tools)
    with pytest.raises(MessageError, match="tools"):
        renderer.try_bridge(prompt, prompt, [user("R")], tools=tools)


@pytest.mark.parametrize(
    "previous", ["abc", [None], 5, [user("Q"), {"role": "assistant", "content": "x", "tool_calls": [{"id": "x"}]}]]
)
def test_a_malformed_history_is_refused(renderer: TemplateRenderer, previous: Any) -> None:
    prompt = renderer.render([user("Q")], add_generation_prompt=True).token_ids
    with pytest.raises(MessageError):
        renderer.try_bridge(
            prompt, renderer.tokenizer.encode_scaffold("A<|im_end|>"), [user("R")], previous_messages=previous
        )


# Files.


def test_a_generated_call_id_never_equals_a_real_one() -> None:
    renderer = renderer_of("trl/gemma4_v4")
    nameless = {"type": "function", "function": {"name": "run", "arguments": {}}}
    turn = says("", None, [call("get_weather", {}, "call00001"), nameless])
    messages = [user("a"), turn, answer("22", "call00001")]
    prompt = renderer.render(messages[:1], add_generation_prompt=True).token_ids
    full = renderer.render(messages, add_generation_prompt=True)
    stop = renderer.get_stop_token_ids()
    length = next(i for i in range(len(prompt), len(full)) if full.token_ids[i] in stop) + 1
    bridged = renderer.try_bridge(
        prompt, full.token_ids[len(prompt) : length], messages[2:], previous_messages=messages[:2]
    )
    assert isinstance(bridged, RenderedTokens)
    assert bridged.token_ids == full.token_ids
    assert bridged.message_tool_names == ["get_weather"]
