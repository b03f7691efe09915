"""What a client of chat completions did is the trajectory that `run_episode` records for the same answers."""

import asyncio
import functools
import json

import corpus
import httpx
import numpy as np
import openai
import pytest
from gateway_server import (
    CALL,
    IMAGE,
    OTHER_IMAGE,
    TOOLS,
    Conversation,
    data_url,
    image_part,
    plain_tree,
    png,
    served,
    user,
)
from test_parsing_families import renderer_of

from renderers import load_renderer
from renderers.formats import Format
from rollouts import Completion, FinishReason, SamplingParams, TopLogprobs, run_episode
from rollouts.serve.gateway.session import _KEPT_PROMPTS
from rollouts.testing import ScriptedEngine
from rollouts.testing.scripted_engine import ScriptedCompletion
from transport import read_records


def episode(renderer, script, first, answers, tools=None, max_tokens=4096):
    """The trajectory of `run_episode`."""
    engine = ScriptedEngine(script, renderer=renderer)
    environment = Conversation(first, answers, tools)
    sampling = SamplingParams(max_tokens=max_tokens)
    return asyncio.run(
        run_episode(environment, engine=engine, renderer=renderer, sampling=sampling, max_turns=len(answers) + 1)
    )


def chat(server, first, answers, session_id="s", **options):
    """The same conversation through the OpenAI client; returns the last response."""
    client, messages = server.client(session_id), list(first)
    response = client.chat.completions.create(model="m", messages=messages, **options)
    for answer in answers:
        message = response.choices[0].message.model_dump()
        messages += [message, *answer(message)]
        response = client.chat.completions.create(model="m", messages=messages, **options)
    return response


def result_of_call(assistant):
    return [{"role": "tool", "tool_call_id": assistant["tool_calls"][0]["id"], "content": "red"}]


TOOL_CONVERSATION = [
    {"role": "system", "content": "You look."},
    {"role": "user", "content": [image_part(IMAGE), {"type": "text", "text": "Which colour?"}]},
]
TOOL_ANSWERS = [
    result_of_call,
    lambda assistant: [{"role": "user", "content": [{"type": "text", "text": "And"}, image_part(OTHER_IMAGE)]}],
    lambda assistant: [user("Thanks.")],
]
TOOL_SCRIPT = [f"I look.{CALL}", "Red.", "Blue.", "Welcome."]


@pytest.mark.slow
def test_a_fetched_record_file_holds_the_trajectory(renderer, tmp_path):
    expected = episode(renderer, TOOL_SCRIPT, TOOL_CONVERSATION, TOOL_ANSWERS, TOOLS)
    with served(ScriptedEngine(TOOL_SCRIPT, renderer=renderer), renderer) as server:
        chat(server, TOOL_CONVERSATION, TOOL_ANSWERS, tools=TOOLS)
        data = httpx.get(f"{server.root}/sessions/s/trajectory").content
        as_json = httpx.get(f"{server.root}/sessions/s/trajectory", params={"format": "json"}).json()
    (tmp_path / "s.mmr").write_bytes(data)
    (fetched,) = read_records(tmp_path / "s.mmr")
    assert plain_tree(fetched) == plain_tree(expected)
    assert [node["token_ids"] for node in as_json["nodes"]] == [node.token_ids.tolist() for node in expected.nodes]
    assert as_json["nodes"][0]["media"][0]["base64"] == data_url(png(IMAGE)).partition(",")[2]
    assert as_json["turns"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"


def test_a_completion_that_was_cut_off_is_continued_after_its_tokens(renderer):
    script = [ScriptedCompletion("one two", finish_reason=FinishReason.LENGTH), "three"]
    answers = [lambda _: [user("go on")]]
    expected = episode(renderer, script, [user("count")], answers, max_tokens=4)
    with served(ScriptedEngine(script, renderer=renderer), renderer) as server:
        chat(server, [user("count")], answers, max_tokens=4)
        assert plain_tree(server.trajectory("s")) == plain_tree(expected)


@pytest.mark.slow
def test_an_earlier_turn_is_continued_exactly_when_its_prompt_is_no_longer_kept(renderer):
    """The prompt is made again from the tree, images included."""
    turns = _KEPT_PROMPTS + 3
    engine = ScriptedEngine([*map(str, range(turns)), "late"], renderer=renderer)
    with served(engine, renderer) as server:
        client = server.client("s")
        messages = [{"role": "user", "content": [image_part(IMAGE), {"type": "text", "text": "0?"}]}]
        for turn in range(turns):
            response = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            messages += [response.choices[0].message, user(f"{turn + 1}?")]
        client.chat.completions.create(model="m", messages=[*messages[:4], user("other")], tools=TOOLS)
        trajectory = server.trajectory("s")
    second, late = engine.requests[1], engine.requests[-1]
    completion = trajectory.nodes[trajectory.turns[1].node].token_ids.tolist()
    prefix = [*second.prompt_ids, *completion]
    assert late.prompt_ids[: len(prefix)] == prefix
    assert late.sampled == [*engine.requests[2].sampled]
    assert late.media[0][0].mm_hash == second.media[0][0].mm_hash
    np.testing.assert_array_equal(late.media[0][0].tensors["pixel_values"], second.media[0][0].tensors["pixel_values"])
    assert late.placeholder_token_ids == second.placeholder_token_ids
    assert trajectory.nodes[trajectory.turns[-1].node - 1].parent == trajectory.turns[1].node


def test_a_request_of_several_choices_adds_one_branch_for_each(renderer):
    engine = ScriptedEngine(["one", "two", "three", "more"], renderer=renderer)
    with served(engine, renderer) as server:
        client = server.client("s")
        response = client.chat.completions.create(model="m", messages=[user("a")], n=3)
        assert [choice.message.content for choice in response.choices] == ["one", "two", "three"]
        assert [choice.turn for choice in response.choices] == [0, 1, 2]
        messages = [user("a"), response.choices[1].message, user("b")]
        client.chat.completions.create(model="m", messages=messages)
        trajectory = server.trajectory("s")
    assert len(engine.requests) == 2
    assert len(trajectory.leaves()) == 3
    assert trajectory.nodes[trajectory.turns[3].node - 1].parent == trajectory.turns[1].node


@pytest.mark.slow
def test_the_ids_of_calls_are_unique_for_the_client_and_the_models_own_in_the_tree(renderer):
    engine = ScriptedEngine([CALL, CALL, "done"], renderer=renderer)
    with served(engine, renderer) as server:
        client, messages, ids = server.client("s"), [user("a")], []
        for _ in range(2):
            response = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            ids.append(response.choices[0].message.tool_calls[0].id)
            messages += [response.choices[0].message, {"role": "tool", "tool_call_id": ids[-1], "content": "red"}]
        client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        trajectory = server.trajectory("s")
    assert len(set(ids)) == 2
    path = trajectory.to_messages(trajectory.turns[-1].node)
    assert [message["tool_calls"][0]["id"] for message in path if message.get("tool_calls")] == ["call_0", "call_0"]
    assert [message["tool_call_id"] for message in path if message["role"] == "tool"] == ["call_0", "call_0"]


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_of_choices_with_equal_tokens_the_next_turn_continues_the_one_that_the_client_took(renderer, taken):
    engine = ScriptedEngine([CALL, CALL, CALL, "done"], renderer=renderer)
    with served(engine, renderer) as server:
        client = server.client("s")
        response = client.chat.completions.create(model="m", messages=[user("a")], tools=TOOLS, n=3)
        message = response.choices[taken].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "red"}
        client.chat.completions.create(model="m", messages=[user("a"), message, result], tools=TOOLS)
        trajectory = server.trajectory("s")
    assert trajectory.nodes[trajectory.turns[3].node - 1].parent == trajectory.turns[taken].node


@pytest.mark.parametrize("stream", [False, True])
def test_alternatives_are_the_likeliest_tokens_and_are_in_the_tree(renderer, stream):
    ids = [*renderer.tokenizer.encode_scaffold("one"), renderer.get_stop_token_ids()[0]]
    rows = TopLogprobs(
        np.stack([np.arange(3) + 65 + index for index in range(len(ids))]).astype(np.int32),
        np.tile(np.array([-0.5, -1.5, -2.5], np.float32), (len(ids), 1)),
    )
    logprobs = np.full(len(ids), -3.0, np.float32)
    completion = Completion(0, np.array(ids, np.int32), logprobs, FinishReason.STOP, ids[-1], top_logprobs=rows)
    with served(ScriptedEngine([completion, *["without"] * 4], renderer=renderer), renderer) as server:
        ask = server.client("s").chat.completions.create
        options = {"model": "m", "messages": [user("a")], "logprobs": True, "top_logprobs": 3, "stream": stream}
        response = ask(**options)
        if stream:
            entries = [one for chunk in response for c in chunk.choices if c.logprobs for one in c.logprobs.content]
        else:
            entries = response.choices[0].logprobs.content
            with pytest.raises(openai.APIStatusError, match="likeliest"):  # an engine that has none
                ask(**options)
        trajectory = server.trajectory("s")
    assert len(entries) == len(ids)
    for entry, row in zip(entries, rows.token_ids.tolist(), strict=True):
        assert [each.token for each in entry.top_logprobs] == [renderer.tokenizer.decode([one]) for one in row]
        assert all(bytes(each.bytes).decode() == each.token for each in entry.top_logprobs)
        assert [each.logprob for each in entry.top_logprobs] == [-0.5, -1.5, -2.5]
    np.testing.assert_array_equal(trajectory.nodes[1].extras["top_ids"], rows.token_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("qwen-3", "<|im_end|>"),
        ("deepseek-v3.2", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        ("glm-4.5v", "<|endoftext|>"),
        ("jiutian-139moe-chat", "</s>"),
    ],
)
def test_each_token_is_reported_with_its_own_bytes(name, end, stream):
    """Joined they are the text, also where a character has several tokens, and where a decoder drops spaces."""
    plain = Format("plain", (end,))
    real = load_renderer(corpus.model_dir(name), format=plain, chat_template="{{ messages[0].content }}")
    text = "Zürich 日本語 two"
    text += "" if name.startswith("jiutian") else " 🙂𒀱."  # its vocabulary has neither of them
    ids = real.tokenizer.encode_run(text, first=True).ids
    with served(ScriptedEngine([ids], renderer=real), real) as server:
        response = server.client("s").chat.completions.create(
            model="m", messages=[user("a")], logprobs=True, max_tokens=len(ids), stream=stream
        )
        if stream:
            entries = [one for chunk in response for c in chunk.choices if c.logprobs for one in c.logprobs.content]
        else:
            entries = response.choices[0].logprobs.content
    assert len(entries) == len(ids)
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == text
    for entry in entries:
        assert entry.token == bytes(entry.bytes).decode(errors="replace")
        assert "\N{REPLACEMENT CHARACTER}".encode() not in bytes(entry.bytes)
    if not name.startswith("jiutian"):
        assert any("\N{REPLACEMENT CHARACTER}" in entry.token for entry in entries)  # a part of a character


UNKNOWN_CALL = '<tool_call>\n{"name": "jump", "arguments": {"high": 1}}\n</tool_call>'


@pytest.mark.slow
def test_a_call_of_a_tool_that_is_not_offered_is_returned_and_its_answer_continues_the_turn(renderer):
    with served(ScriptedEngine([UNKNOWN_CALL, "Done."], renderer=renderer), renderer) as server:
        client = server.client("s")
        (choice,) = client.chat.completions.create(model="m", messages=[user("a")], tools=TOOLS).choices
        message = choice.message.to_dict()
        assert choice.finish_reason == "tool_calls"
        assert not message["content"]
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("jump", {"high": 1})
        result = {"role": "tool", "tool_call_id": call["id"], "content": "there is no tool jump"}
        client.chat.completions.create(model="m", messages=[user("a"), message, result], tools=TOOLS)
        trajectory = server.trajectory("s")
    assert ([node.parent for node in trajectory.nodes], trajectory.forks) == ([-1, 0, 1, 2], 0)
    messages = trajectory.to_messages(trajectory.leaves()[0])
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "jump", "arguments": {"high": 1}}
    rendered = renderer.render(messages[:-1], tools=TOOLS, add_generation_prompt=True)
    added = trajectory.nodes[2].token_ids.tolist()
    assert added == rendered.token_ids[-len(added) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "look", "arguments": {"row": }}\n</tool_call>',
        "<tool_call>\nlook",
        "<tool_call></tool_call>",
    ],
)
def test_a_call_that_cannot_be_read_is_text_and_stays_the_turn_that_is_continued(renderer, text):
    with served(ScriptedEngine([text, "Done."], renderer=renderer), renderer) as server:
        client = server.client("s")
        (choice,) = client.chat.completions.create(model="m", messages=[user("a")], tools=TOOLS).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
        client.chat.completions.create(model="m", messages=[user("a"), choice.message, user("again")], tools=TOOLS)
        trajectory = server.trajectory("s")
    assert ([node.parent for node in trajectory.nodes], trajectory.forks) == ([-1, 0, 1, 2], 0)


#: What each template prints of a call `look(row=1)`: templates that print JSON, that loop over arguments, that join
#: texts, and one that prints ids in place of names.
CALLS_OF_FAMILIES = {
    "qwen-2.5": '{"name": "look", "arguments": {"row": 1}}',
    "qwen-3": '{"name": "look", "arguments": {"row": 1}}',
    "qwen-3.5": "<function=look>\n<parameter=row>\n1\n</parameter>\n</function>",
    "glm-4.5v": "look\n<arg_key>row</arg_key>\n<arg_value>1</arg_value>\n",
    "glm-4.7-flash": "look<arg_key>row</arg_key><arg_value>1</arg_value>",
    "minimax": '<invoke name="look">\n<parameter name="row">1</parameter>\n</invoke>',
    "minimax-m3": "<row>1]<]minimax[>[</row>]<]minimax[>[</invoke>",
    "deepseek-v3.1": 'look<｜tool▁sep｜>{"row": 1}<｜tool▁call▁end｜>',  # noqa: RUF001
    "kimi": '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"row": 1}<|tool_call_end|>',
}


@functools.cache
def renderer_of_family(name):
    return renderer_of(name) if name == "kimi" else load_renderer(corpus.model_dir(name))


def prompt_of_call(name, arguments):
    """The prompt of a conversation with a call that the gateway has not sampled."""
    renderer = renderer_of_family(name)
    messages = [
        user("a"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "red"},
    ]
    body = {"messages": messages, "tools": TOOLS, "return_token_ids": True}
    with served(ScriptedEngine(["Red."], renderer=renderer), renderer) as server:
        response = httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=30)
    assert response.status_code == 200, response.text
    return renderer.tokenizer.decode(response.json()["prompt_token_ids"])


@pytest.mark.parametrize("name", CALLS_OF_FAMILIES)
def test_calls_that_the_gateway_has_not_sampled_are_printed_as_the_model_writes_them(name):
    """OpenAI's API has arguments as text, and ids without names."""
    prompt = prompt_of_call(name, '{"row": 1}')
    assert CALLS_OF_FAMILIES[name] in prompt
    assert "c1" not in prompt


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen-2.5", "qwen-3.5", "deepseek-v3.1"])
def test_a_call_without_arguments_is_one_with_an_empty_object(name):
    expected = prompt_of_call(name, "{}")
    for arguments in ("", " ", "null", None):
        assert prompt_of_call(name, arguments) == expected, arguments
