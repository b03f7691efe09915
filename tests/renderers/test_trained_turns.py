# ruff: noqa: RUF001  (DeepSeek spells its tokens with a fullwidth bar)
"""A trained turn follows the prompt of its history and is what the model would sample; any other is refused."""

import functools
import math
import re
from ast import literal_eval
from collections.abc import Iterator
from typing import Any

import corpus
import pytest
from corpus import answer, call, says, user
from loaded import TODAY, directory_of, renderer_of

from renderers import RendererOptions, TemplateRenderer, build_training_sample, build_training_samples, load_renderer
from renderers.errors import MessageError, TemplateError

Conversation = list[dict[str, Any]]

WEATHER = call("get_weather", {"city": "Krakow"}, "call00000")
RUN = call("run", {"code": "Trento"}, "call00001")
RESULT, CALLS = answer("Lisbon", "call00000", "get_weather"), says("", None, [WEATHER])
IN_CONTENT = "<think>\nbecause\n</think>\n\nfine"
#: The last message of each is the trained turn.
CONVERSATIONS: dict[str, Conversation] = {
    "answer": [user("Q"), says("fine")],
    "thought": [user("Q"), says("fine", "because")],
    "thought in the content": [user("Q"), says(IN_CONTENT)],
    "thought in a part": [user("Q"), says([{"type": "text", "text": IN_CONTENT}])],
    "call": [user("Q"), CALLS],
    "call with thought and content": [user("Q"), says("fine", "because", [WEATHER])],
    "answer to a result": [user("Q"), CALLS, RESULT, says("fine")],
    "thought on a result": [user("Q"), says("", "earlier", [WEATHER]), RESULT, says("fine", "because")],
    "call on a result": [user("Q"), CALLS, RESULT, says("", None, [RUN])],
    "second answer": [user("Q"), says("before", "earlier"), user("R"), says("fine", "because")],
}
WORDS = ("fine", "because", "Krakow", "Trento")


def words_of(turn: dict[str, Any]) -> set[str]:
    return {word for word in WORDS if word in repr(turn)}


@functools.cache
def renderers_of(template: str) -> dict[str, TemplateRenderer]:
    """By the setting of thinking: as it is by default, on and off."""
    source = corpus.templates()[template]
    settings: dict[str, dict[str, Any]] = {"default": {}}
    if "thinking" in source:
        settings |= {str(on): {"thinking": on, "enable_thinking": on} for on in (True, False)}
    return {
        name: load_renderer(
            directory_of(template),
            config=RendererOptions(chat_template=source, chat_template_kwargs=variables),
            now=lambda: TODAY,
        )
        for name, variables in settings.items()
    }


def cases(template: str) -> Iterator[tuple[str, TemplateRenderer, Conversation]]:
    for thinking, renderer in renderers_of(template).items():
        for name, messages in CONVERSATIONS.items():
            yield f"{name}, thinking {thinking}", renderer, messages


def is_in_reasoning(renderer: TemplateRenderer, prompt_text: str) -> bool:
    markers = renderer.format.reasoning
    return markers is not None and prompt_text.rfind(markers.start) > prompt_text.rfind(markers.end)


def begins_reasoning_again(renderer: TemplateRenderer, prompt_text: str, text: str) -> bool:
    """Whether a turn begins reasoning that its prompt began, or ended."""
    markers = renderer.format.reasoning
    if markers is None or not text.lstrip().startswith(markers.start):
        return False
    return is_in_reasoning(renderer, prompt_text) or prompt_text.rstrip().endswith(markers.end)


def faults_of(renderer: TemplateRenderer, messages: Conversation) -> list[str]:
    """What is wrong with the last turn as it is trained, or with its refusal."""
    history, turn = messages[:-1], messages[-1]
    decode = renderer.tokenizer.decode
    try:
        printed = decode(renderer.render_ids(messages, tools=corpus.TOOLS))
        prompt = renderer.render(history, tools=corpus.TOOLS, add_generation_prompt=True)
    except TemplateError:
        return []
    prompt_text, words = decode(prompt.token_ids), words_of(turn)
    mask = [message is turn for message in messages]
    try:
        (sample,) = build_training_samples(renderer, messages, tools=corpus.TOOLS, message_loss_mask=mask)
    except MessageError as error:
        text = printed.removeprefix(prompt_text)
        continues = len(text) < len(printed) and all(word in text for word in words)
        is_sampled = continues and not begins_reasoning_again(renderer, prompt_text, text)
        return [f"refused: {error}"] if is_sampled or error.message_index != len(history) else []
    ((start, end),) = sample.loss_ranges
    trained = sample.token_ids[start:end]
    text = decode(trained)
    controls = {match.token_id for match in renderer.tokenizer.controls(prompt_text)}
    first = max((at for at, index in enumerate(prompt.message_indices, 1) if index >= 0), default=0)
    supplied = controls.intersection(prompt.token_ids[first:])
    faults = {
        "does not follow its prompt": sample.token_ids[:start] != prompt.token_ids,
        f"lacks {[word for word in words if word not in text]}": not all(word in text for word in words),
        "has words of others": any(word in text for word in ("before", "earlier", "Lisbon")),
        "trains what the prompt supplies": trained[0] in supplied.difference(renderer.get_stop_token_ids()),
    }
    if (markers := renderer.format.reasoning) is not None:
        faults["leaves reasoning open"] = is_in_reasoning(renderer, prompt_text) and markers.end not in text
        faults["begins reasoning again"] = begins_reasoning_again(renderer, prompt_text, text)
    return [f"{fault}: {prompt_text[-40:]!r} {text!r}" for fault, is_fault in faults.items() if is_fault]


# Its template prints a token that its tokenizer lacks.
TEMPLATES = [name for name in corpus.templates() if name != "own/deepseek-vl2-small"]


@pytest.mark.parametrize("template", corpus.drawn(TEMPLATES))
def test_a_turn_is_trained_as_the_model_samples_it_or_refused(template: str) -> None:
    found = {name: faults for name, *case in cases(template) if (faults := faults_of(*case))}
    assert found == {}


@pytest.mark.parametrize("template", ["own/deepseek-v3", "own/deepseek-r1-0528-qwen3-8b", "own/deepseek-v2.5"])
@pytest.mark.parametrize("build", [build_training_sample, lambda *a, **k: build_training_samples(*a, **k)[-1]])
def test_an_answer_to_a_result_is_trained_without_the_token_that_its_prompt_ends_with(
    template: str, build: Any
) -> None:
    renderer = renderer_of(template)
    sample = build(renderer, CONVERSATIONS["answer to a result"], tools=corpus.TOOLS)
    start, end = sample.loss_ranges[-1]
    assert renderer.tokenizer.decode(sample.token_ids[start:end]) == "fine<｜end▁of▁sentence｜>"
    assert renderer.tokenizer.decode(sample.token_ids[:start]).endswith(
        "Lisbon<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    )


@pytest.mark.parametrize("build", [build_training_sample, build_training_samples])
@pytest.mark.parametrize(
    ("template", "thinking", "name", "dropped"),
    [
        ("own/deepseek-v3.1", "True", "thought", "reasoning"),
        ("trl/qwen3_instruct_2507", "default", "second answer", "reasoning"),
        ("trl/llama3_1", "default", "call with thought and content", "content"),
        ("trl/qwen2_5_vl", "default", "call", "tool_calls"),
    ],
)
def test_a_turn_of_which_the_template_drops_something_is_refused_with_what_and_a_cure(
    build: Any, template: str, thinking: str, name: str, dropped: str
) -> None:
    messages = CONVERSATIONS[name]
    with pytest.raises(
        MessageError, match=f"prints nothing of its {dropped}.*message_loss_mask.*chat_template="
    ) as caught:
        build(renderers_of(template)[thinking], messages, tools=corpus.TOOLS)
    assert messages[caught.value.message_index]["role"] == "assistant"


@pytest.mark.parametrize("template", ["own/glm-z1-32b-0414", "own/minimax", "own/qwq-32b"])
def test_the_end_of_a_prompt_is_quoted_by_whole_characters_with_the_header_of_the_turn(template: str) -> None:
    renderer, messages = renderer_of(template), [user("\U0001f9ea" * 80), says("An answer.")]
    with pytest.raises(MessageError, match="the printed turn never ends reasoning") as caught:
        build_training_samples(renderer, messages)
    quoted = literal_eval(str(caught.value).split("the prompt ends with ")[1].split(", and the printed")[0])
    prompt = renderer.render_ids(messages[:1], add_generation_prompt=True)
    assert renderer.tokenizer.decode(prompt).endswith(quoted)
    assert re.search(r"(?s)(assistant|ai)\W+think>", quoted)


@pytest.mark.parametrize("build", [build_training_sample, build_training_samples])
@pytest.mark.parametrize("arguments", ["", "{a: 1", None, "[1]", '{"a": 1, "a": 2}', '{"a": NaN}', {"a": math.nan}])
@pytest.mark.parametrize("template", ["trl/qwen3", "trl/qwen3_5_think", "own/deepseek-v3.1"])
def test_a_call_whose_arguments_are_no_json_object_is_not_trained(build: Any, template: str, arguments: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(MessageError, match=r"message 1: .*tool_calls\[0\].*not the text of a JSON object.*give a dict"):
        build(renderers_of(template)["default"], messages, tools=corpus.TOOLS)
