"""Clients send messages back in other forms. What means the same continues the recorded turn, what does not forks."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from gateway_server import CALL, IMAGE, TOOLS, image_part, plain_tree, user
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from rollouts.serve.gateway.history import History
from rollouts.serve.gateway.routes import Gateway
from rollouts.testing import ScriptedEngine

SCRIPT = ["<think>\nLook first.\n</think>\n\nI look.", f"Again.{CALL}", "Red.", "Done."]


def in_other_order(value: Any) -> Any:
    return {key: value[key] for key in reversed(value)} if isinstance(value, dict) else value


@st.composite
def harmless_rewrites(draw: st.DrawFn) -> Any:
    """A function that sends an assistant message back in another form, as clients of OpenAI's API do."""
    flags = draw(st.sets(st.sampled_from(["reasoning", "null", "parts", "arguments", "strip", "name", "extra", "ids"])))

    def rewrite(message: dict[str, Any]) -> dict[str, Any]:
        message = json.loads(json.dumps(message))
        if "reasoning" in flags:
            message.pop("reasoning_content", None)
        content = message["content"]
        if content and "strip" in flags:
            message["content"] = f" {content}\n"
        if not content:
            message["content"] = draw(st.sampled_from([None, "", []]))
            if message["content"] is None and "null" in flags:
                del message["content"]
        elif "parts" in flags:
            cut = draw(st.integers(0, len(content)))
            message["content"] = [{"type": "text", "text": text} for text in (content[:cut], content[cut:])]
        for call in message.get("tool_calls") or ():
            if "arguments" in flags:
                arguments = in_other_order(json.loads(call["function"]["arguments"]))
                arguments["row"] = draw(st.sampled_from([1, 1.0]))
                call["function"]["arguments"] = json.dumps(arguments, indent=draw(st.sampled_from([None, 2])))
            if "ids" in flags:
                call["id"] = f"own-{call['id'][-4:]}"
        if "name" in flags:
            message["name"] = "agent"
        if "extra" in flags:
            message |= {"refusal": None, "annotations": [], "function_call": None, "provider_specific_fields": {"a": 1}}
        return message

    return rewrite


def play(renderer: Any, rewrite: Any) -> tuple[Any, list[Any]]:
    """The trajectory of a conversation in which every earlier answer is sent back rewritten, and the prompts."""
    engine = ScriptedEngine(SCRIPT, renderer=renderer)

    async def talk() -> Any:
        gateway = Gateway(engine, renderer)
        transport = httpx.ASGITransport(Starlette(routes=gateway.routes()))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            messages: list[Any] = [{"role": "user", "content": [image_part(IMAGE), {"type": "text", "text": "?"}]}]
            for turn in range(len(SCRIPT)):
                body = {"messages": messages, "tools": TOOLS}
                response = await client.post("/sessions/s/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                answer = rewrite(response.json()["choices"][0]["message"])
                calls = answer.get("tool_calls")
                new = [{"role": "tool", "tool_call_id": calls[0]["id"], "content": "r"}] if calls else [user(str(turn))]
                messages = [*messages, answer, *new]
        trajectory = gateway.trajectory("s")
        await gateway.close()
        return trajectory

    trajectory = asyncio.run(talk())
    return trajectory, [request.prompt_ids for request in engine.requests]


@pytest.mark.slow
@settings(max_examples=25)
@given(harmless_rewrites())
def test_any_combination_of_harmless_rewrites_leaves_the_tree_as_it_is(renderer, rewrite):
    expected, prompts = play(renderer, lambda message: message)
    trajectory, rewritten_prompts = play(renderer, rewrite)
    assert rewritten_prompts == prompts
    assert plain_tree(trajectory) == plain_tree(expected)
    assert len(trajectory.leaves()) == 1


@pytest.mark.parametrize("per_turn", [False, True])
async def test_a_client_that_gives_the_calls_of_its_history_other_ids_in_each_request_continues(renderer, per_turn):
    """`per_turn`: it numbers the calls of each message from 0. One result comes after a later completion."""
    engine = ScriptedEngine([CALL + CALL, CALL, "Wait.", "Done."], renderer=renderer)
    gateway = Gateway(engine, renderer)
    transport = httpx.ASGITransport(Starlette(routes=gateway.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        messages: list[Any] = [user("a")]
        for turn, answered in enumerate([[1], [0], [], []]):
            sent = json.dumps(messages)
            for number, call in enumerate(call for one in messages for call in one.get("tool_calls", ())):
                sent = sent.replace(call["id"], f"own-{turn}-{number % 2 if per_turn else number}")
            body = {"messages": json.loads(sent), "tools": TOOLS}
            response = await client.post("/sessions/s/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            messages.append(response.json()["choices"][0]["message"])
            calls = messages[-1].get("tool_calls")
            new = [{"role": "tool", "tool_call_id": calls[at]["id"], "content": f"r{turn}"} for at in answered]
            messages += new or [user(f"u{turn}")]
            if turn == 2 and not per_turn:
                first = messages[1]["tool_calls"][0]["id"]
                messages.append({"role": "tool", "tool_call_id": first, "content": "late"})
    trajectory = gateway.trajectory("s")
    await gateway.close()
    assert (trajectory.forks, [node.parent for node in trajectory.nodes]) == (0, [*range(-1, 7)])
    results = [one for one in trajectory.to_messages(trajectory.leaves()[0]) if one["role"] == "tool"]
    assert [one["tool_call_id"] for one in results] == ["call_1", "call_0"] + ["call_0"] * (not per_turn)


ANSWER: Any = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": '{"row": 1, "on": true, "at": [1, 2]}'}}],
}


def call_with(**changes: Any) -> Any:
    return {**ANSWER, "tool_calls": [{"id": "c", "function": {**ANSWER["tool_calls"][0]["function"], **changes}}]}


@pytest.mark.parametrize(
    "changed",
    [
        {**ANSWER, "content": "I  look."},
        {**ANSWER, "role": "user"},
        call_with(name="see"),
        call_with(arguments='{"row": 1, "on": 1, "at": [1, 2]}'),
        call_with(arguments='{"row": 1, "on": true, "at": [2, 1]}'),
    ],
)
def test_a_real_change_of_a_message_is_another_history(changed):
    assert History([user("a"), ANSWER], None).digests[-1] != History([user("a"), changed], None).digests[-1]


def test_a_result_is_that_of_the_call_with_its_id_whatever_the_ids_are():
    def digest(*ids: str | None) -> bytes:
        calls = [{"id": one, "function": {"name": "look", "arguments": "{}"}} for one in ids[:2]]
        results = [{"role": "tool", "content": "red", "tool_call_id": one} for one in ids[2:]]
        return History([{"role": "assistant", "content": "", "tool_calls": calls}, *results], None).digests[-1]

    assert digest("a", "b", "a", "b") == digest("x", "y", "x", "y")
    different = [digest("a", "b", *answered) for answered in ("ab", "ba", "aa", "bb", "cb", "db", (None, "b"))]
    assert len({*different}) == len(different)


def test_another_image_behind_the_same_text_is_another_history():
    def digest(url: str) -> bytes:
        content = [{"type": "text", "text": "What is this?"}, {"type": "image", "image": url}]
        return History([{"role": "user", "content": content}], None).digests[-1]

    assert digest("data:image/png;base64,AAAA") != digest("data:image/png;base64,BBBB")


@given(st.lists(st.tuples(st.sampled_from(["user", "system", "tool"]), st.text(max_size=4)), max_size=5), st.data())
def test_histories_are_equal_only_where_messages_are(messages, data):
    conversation = [{"role": role, "content": text} for role, text in messages]
    other = data.draw(st.permutations(conversation))
    same = History(conversation, None).digests[-1] == History(other, None).digests[-1]
    assert same == (list(conversation) == list(other))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.mark.slow
@given(JSON_VALUES)
def test_arguments_of_equal_value_are_equal_whatever_the_order_of_their_keys(value):
    def digest(arguments: str) -> bytes:
        return History([call_with(arguments=arguments)], None).digests[-1]

    assert digest(json.dumps({"a": value, "b": 1})) == digest(json.dumps({"b": 1, "a": value}, indent=1))
