"""Tool calls in the syntax of several model families: prompts equal the full render, wrong calls are answered."""

import json

import pytest
from loaded import renderer_of
from played import play
from pydantic import BaseModel

from rollouts.environments import ToolEnvironment

QUESTION = [{"role": "user", "content": "What is the weather?"}]


class Place(BaseModel):
    city: str
    country: str = "CH"


def weather(city: str, days: int = 1) -> str:
    """Weather of a place."""
    return f"{city}, {days} days: 22 °C"


def distance(start: Place, end: Place | None = None) -> dict:
    """Distance between two places."""
    return {"km": 3}


def tools():
    return ToolEnvironment(None, tools=[weather, distance], messages=lambda task: QUESTION)


FAMILIES = [
    "trl/qwen2_5",
    "trl/qwen3_vl",
    "trl/glm4moe",
    "own/glm-4.5v",
    "trl/llama3_1",
    "trl/gptoss",
    "trl/gemma4",
]
#: Families whose templates print one call a turn.
ONE_CALL_A_TURN = {"trl/llama3_1", "trl/gptoss"}
WEATHER = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
DISTANCE = {"name": "distance", "arguments": {"start": {"city": "Bern"}}}


def sampled_turn(renderer, *functions):
    """The ids of an assistant turn with these calls, as the model's own template prints it."""
    calls = [{"id": f"call{i:05d}", "type": "function", "function": each} for i, each in enumerate(functions)]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    printed = renderer.render([*QUESTION, turn], tools=tools().tools)
    spans = [span for span in printed.spans if span.sampled]
    return list(printed.token_ids[spans[0].start : spans[-1].end])


def answered(renderer, turn):
    """The tool messages of an episode with this turn, its second prompt, and the conversation before the last turn."""
    trajectory, engine = play(tools(), [turn, "Done."], renderer)
    assert trajectory.done
    messages = trajectory.to_messages(trajectory.leaves()[-1])[:-1]
    contents = [message["content"] for message in messages if message["role"] == "tool"]
    return contents, list(engine.requests[1].prompt_ids), messages


TURNS = {"one": [WEATHER], "nested": [DISTANCE], "two": [WEATHER, DISTANCE]}


@pytest.mark.parametrize(
    ("family", "calls"),
    [(family, calls) for family in FAMILIES for calls in TURNS if calls != "two" or family not in ONE_CALL_A_TURN],
)
def test_the_prompt_after_a_call_is_the_full_render_of_the_conversation(family, calls):
    functions = TURNS[calls]
    renderer = renderer_of(family)
    contents, prompt, messages = answered(renderer, sampled_turn(renderer, *functions))
    results = {"weather": "Zürich, 2 days: 22 °C", "distance": '{"km": 3}'}
    assert contents == [results[each["name"]] for each in functions]
    assert prompt == renderer.render_ids(messages, tools=tools().tools, add_generation_prompt=True)


HARMONY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
MALFORMED = {
    "trl/qwen2_5": ['<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>', "<tool_call>weather"],
    "trl/glm4moe": ["<tool_call>weather<arg_key>city</tool_call>", "<tool_call></tool_call>"],
    "trl/llama3_1": ['{"name": "weather", "parameters": {"city": }}', '{"name": "", "parameters": {}}'],
    "trl/gptoss": [HARMONY.format("weather", '{"city": '), HARMONY.format("", "{}")],
    "trl/gemma4": ["<|tool_call>call:weather{days:}<tool_call|>", "<|tool_call>call:{}<tool_call|>"],
}


@pytest.mark.parametrize(("family", "text"), [(family, text) for family, texts in MALFORMED.items() for text in texts])
def test_a_malformed_call_is_answered_in_the_next_prompt(family, text):
    renderer = renderer_of(family)
    contents, prompt, _ = answered(renderer, text)
    assert len(contents) == 1
    printed = renderer.tokenizer.decode(prompt)
    assert contents[0] in printed or json.dumps(contents[0]) in printed
    assert "The call was not made" in printed


@pytest.mark.parametrize("family", ["trl/llama3_1", "trl/llama3_2"])
def test_where_the_template_refuses_several_calls_the_first_is_made_and_the_others_are_answered(family):
    renderer = renderer_of(family)
    turn = '{"name": "weather", "parameters": {"city": "Bern"}}; {"name": "weather", "parameters": {"city": "Basel"}}'
    contents, prompt, messages = answered(renderer, turn)
    second = "error: this call of weather is not the first of its turn, and a turn can make one call"
    assert contents == ["Bern, 1 days: 22 °C", f"{second}. The call was not made"]
    text = renderer.tokenizer.decode(prompt)
    assert turn in text
    assert second in text
    assert [call["id"] for call in messages[1]["tool_calls"]] == [messages[2]["tool_call_id"]] == ["call_0"]
    full = renderer.tokenizer.decode(renderer.render_ids(messages, tools=tools().tools, add_generation_prompt=True))
    results = text[text.index(turn) + len(turn) :]
    assert full.endswith(results)
    trajectory, _ = play(tools(), [turn, "Done."], renderer)
    assert [call["outcome"] for call in trajectory.turns[0].info["tool_calls"]] == ["ok", "surplus"]
