"""The SDKs of Anthropic and OpenAI, and an agent of the Agents SDK, speak to the gateway with nothing changed."""

import asyncio
from typing import Any

import anthropic
import httpx
import openai
import pytest
from agents_of_dialects import events_of, messages_parts, responses_parts
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from gateway_server import CALL, IMAGE, TOOLS, SteppedEngine, data_url, png, served, user
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from rollouts.errors import ServerUnreachableError
from rollouts.testing import ScriptedEngine

SCRIPT = [f"<think>\nhm\n</think>\n\nI look.{CALL}\n{CALL}", "Red.", "Blue."]
SCHEMA: Any = TOOLS[0]["function"]
MESSAGES_TOOLS = [
    {"name": "look", "description": SCHEMA["description"], "input_schema": SCHEMA["parameters"]},
]
RESPONSES_TOOLS = [{"type": "function", "strict": False, **SCHEMA}]
QUESTION = ["Which colour?", IMAGE]


def engine_of(renderer: Any, *, is_live: bool) -> Any:
    return SteppedEngine(SCRIPT, renderer) if is_live else ScriptedEngine(SCRIPT, renderer=renderer)


def anthropic_client(server: Any, kind: Any = anthropic.Anthropic, **options: Any) -> Any:
    return kind(base_url=f"{server.root}/sessions/s", api_key="none", max_retries=0, **options)


BODIES = {
    "chat/completions": {"messages": [user("a")], "tools": TOOLS},
    "messages": {
        "messages": [{"role": "user", "content": messages_parts(QUESTION)}],
        "max_tokens": 500,
        "tools": MESSAGES_TOOLS,
    },
    "responses": {"input": [{"role": "user", "content": responses_parts(QUESTION)}], "tools": RESPONSES_TOOLS},
}
EVENTS: Any = {
    "chat/completions": ChatCompletionChunk,
    "messages": RawMessageStreamEvent,
    "responses": ResponseStreamEvent,
}


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_every_event_of_a_stream_is_one_of_the_sdks_own_types(renderer, path, is_live):
    with served(engine_of(renderer, is_live=is_live), renderer) as server:
        body = {"model": "policy", "stream": True, **BODIES[path]}
        text = httpx.post(f"{server.base_url}/{path}", json=body).text
    adapter = TypeAdapter(EVENTS[path])
    events = [event for event in events_of(text) if event.get("type") != "ping"]
    for event in events:
        read = adapter.validate_python(event)
        assert adapter.dump_python(read, mode="json", by_alias=True, exclude_unset=True).items() >= event.items()
    assert len(events) >= 8
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert names == ([] if path.startswith("chat") else [event["type"] for event in events_of(text)])


def test_the_events_of_a_message_are_those_of_anthropics_api(renderer):
    with served(engine_of(renderer, is_live=False), renderer) as server:
        body = {"model": "policy", "stream": True, **BODIES["messages"]}
        events = events_of(httpx.post(f"{server.base_url}/messages", json=body).text)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    expected = ["message_start", "ping", *thinking, *block, *block, *block, "message_delta", "message_stop"]
    assert [event["type"] for event in events] == expected
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 100


def play_messages(client: Any) -> list[Any]:
    """A turn with calls, streamed, and a turn after their results."""
    options: Any = {"model": "policy", "max_tokens": 500, "system": "You look.", "tools": MESSAGES_TOOLS}
    messages: list[Any] = [{"role": "user", "content": messages_parts(QUESTION)}]
    with client.messages.stream(messages=messages, **options) as stream:
        first = stream.get_final_message()
    messages += next_messages(first)
    return [first, client.messages.create(messages=messages, **options)]


async def play_messages_async(client: Any) -> list[Any]:
    options: Any = {"model": "policy", "max_tokens": 500, "system": "You look.", "tools": MESSAGES_TOOLS}
    messages: list[Any] = [{"role": "user", "content": messages_parts(QUESTION)}]
    async with client.messages.stream(messages=messages, **options) as stream:
        first = await stream.get_final_message()
    messages += next_messages(first)
    return [first, await client.messages.create(messages=messages, **options)]


def next_messages(message: Any) -> list[Any]:
    calls = [block for block in message.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": messages_parts(["red"])} for call in calls]
    return [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_live", [False, True])
def test_anthropics_sdk_plays_a_turn_with_calls_and_its_next_turn_continues(renderer, is_live, is_async):
    with served(engine_of(renderer, is_live=is_live), renderer) as server:
        if is_async:
            first, second = asyncio.run(play_messages_async(anthropic_client(server, anthropic.AsyncAnthropic)))
        else:
            first, second = play_messages(anthropic_client(server))
        trajectory = server.trajectory("s")
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (first.content[0].thinking, first.content[1].text) == ("hm", "I look.")
    assert [block.input for block in first.content[2:]] == [{"row": 1, "column": "left"}] * 2
    assert (first.stop_reason, second.stop_reason, second.content[0].text) == ("tool_use", "end_turn", "Red.")
    assert isinstance(Message.model_validate(second.model_dump()), Message)
    prompts = [len(trajectory.token_ids(trajectory.nodes[turn.node].parent)) for turn in trajectory.turns]
    assert [message.usage.input_tokens for message in (first, second)] == prompts
    sampled = [len(trajectory.nodes[turn.node]) for turn in trajectory.turns]
    assert [message.usage.output_tokens for message in (first, second)] == sampled
    assert ([node.parent for node in trajectory.nodes], trajectory.forks) == ([-1, 0, 1, 2], 0)


def test_counted_tokens_are_those_of_the_prompt_that_follows_and_begin_no_session(renderer):
    with served(engine_of(renderer, is_live=False), renderer) as server:
        client = anthropic_client(server)
        options: Any = {"model": "policy", "system": "You look.", "tools": MESSAGES_TOOLS}
        messages: list[Any] = [{"role": "user", "content": messages_parts(QUESTION)}]
        for _ in range(2):
            counted = client.messages.count_tokens(messages=messages, **options).input_tokens
            message = client.messages.create(messages=messages, max_tokens=500, **options)
            assert message.usage.input_tokens == counted
            messages += next_messages(message)
        assert server.trajectory("s").num_turns == 2
        alone = anthropic.Anthropic(base_url=server.root, api_key="none")
        assert alone.messages.count_tokens(model="m", messages=[user("a")]).input_tokens > 0
        assert len(server.gateway.sessions()) == 1


@pytest.mark.parametrize("is_live", [False, True])
def test_openais_sdk_plays_responses_and_each_way_to_continue_them_is_one_branch(renderer, is_live):
    with served(engine_of(renderer, is_live=is_live), renderer) as server:
        client = server.client("s")
        options: Any = {"model": "policy", "instructions": "You look.", "tools": RESPONSES_TOOLS}
        items: list[Any] = [{"role": "user", "content": responses_parts(QUESTION)}]
        with client.responses.stream(input=items, **options) as stream:
            first = stream.get_final_response()
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert (first.output[0].content[0].text, first.output_text) == ("hm", "I look.")
        calls = [item for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "red"} for call in calls]
        sent_back = [item.model_dump(exclude_none=True) for item in first.output]
        second = client.responses.create(input=[*items, *sent_back, *results], store=False, **options)
        assert (second.output_text, second.status) == ("Red.", "completed")
        output = second.output[0].model_dump()
        new = [*results, output, {"role": "user", "content": "And now?"}]
        third = client.responses.create(input=new, previous_response_id=first.id, **options)
        assert third.output_text == "Blue."
        trajectory = server.trajectory("s")
        assert (len(trajectory.leaves()), trajectory.forks, trajectory.num_turns) == (1, 0, 3)
        assert client.responses.retrieve(third.id) == third
        assert third.usage.input_tokens == len(trajectory.token_ids(trajectory.nodes[trajectory.turns[2].node].parent))
        for response in (first, second, third):
            Response.model_validate(response.model_dump())
        with pytest.raises(openai.NotFoundError, match="store false"):
            client.responses.retrieve(second.id)
        client.responses.delete(third.id)
        with pytest.raises(openai.BadRequestError, match="there is no response") as refused:
            client.responses.create(model="policy", input="a", previous_response_id=third.id)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_openais_async_sdk_streams_responses(renderer):
    with served(engine_of(renderer, is_live=True), renderer) as server:
        client = server.async_client("s")
        async with client.responses.stream(model="policy", input="a", tools=RESPONSES_TOOLS) as stream:
            names = [event.type async for event in stream]
            response = await stream.get_final_response()
        await client.close()
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    assert names.count("response.output_text.delta") > 3
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]


def test_a_response_is_continued_without_a_session_by_its_id_alone(renderer):
    with served(engine_of(renderer, is_live=False), renderer) as server:
        client = server.client()
        first = client.responses.create(model="policy", input="a", instructions="Look.")
        calls = [item for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "red"} for call in calls]
        options: Any = {"model": "policy", "previous_response_id": first.id, "input": results}
        client.responses.create(instructions="Look.", **options)
        (session,) = server.gateway.sessions()
        assert (session.trajectory.num_turns, session.trajectory.forks) == (2, 0)
        with pytest.raises(openai.BadRequestError, match="is of the session"):
            server.client("other").responses.create(**options)
        client.responses.create(instructions="Other instructions.", **options)
        reason = "forks/the first other message has the role system"
        assert session.trajectory.metrics == {reason: 1}


@pytest.mark.parametrize(
    ("call", "stop_reason", "sequence", "text"),
    [
        ({"stop_sequences": ["loo"]}, "stop_sequence", "loo", "I "),
        ({"max_tokens": 26}, "max_tokens", None, None),
        ({"tool_choice": {"type": "none"}, "tools": MESSAGES_TOOLS}, "end_turn", None, None),
    ],
)
def test_a_message_says_why_it_ends(renderer, call, stop_reason, sequence, text):
    with served(engine_of(renderer, is_live=False), renderer) as server:
        options = {"model": "policy", "max_tokens": 500, "messages": [user("a")], **call}
        message = anthropic_client(server).messages.create(**options)
    assert (message.stop_reason, message.stop_sequence) == (stop_reason, sequence)
    assert text is None or message.content[-1].text == text
    assert all(block.type != "tool_use" for block in message.content)


def test_a_response_that_was_cut_is_incomplete(renderer):
    with served(engine_of(renderer, is_live=False), renderer) as server:
        response = server.client().responses.create(model="policy", input="a", max_output_tokens=26)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[-1].status == "incomplete"


def test_an_error_after_the_first_text_is_logged_and_raised_by_both_sdks(renderer, caplog):
    def engine() -> Any:
        failing = SteppedEngine(["one two"], renderer, pause_after=3, error=ServerUnreachableError("r", "it is gone"))
        failing.continued.set()
        return failing

    with served(engine(), renderer) as server:
        stream = anthropic_client(server).messages.create(model="m", max_tokens=9, messages=[user("a")], stream=True)
        with pytest.raises(anthropic.APIError, match="it is gone"):
            list(stream)
    with served(engine(), renderer) as server:
        *_, last = server.client("s").responses.create(model="m", input="a", stream=True)
        assert (last.type, last.response.status) == ("response.failed", "failed")
        assert "it is gone" in last.response.error.message
        assert server.trajectory("s").num_turns == 0
    lines = [record.message for record in caplog.records if record.name == "rollouts.serve"]
    assert ["it is gone" in line for line in lines] == [True, True]
    assert lines[1].startswith("a stream of the session s: HTTP 503")


def test_the_sdks_raise_their_errors_with_the_reason(renderer):
    with served(engine_of(renderer, is_live=False), renderer, model="policy") as server:
        client = anthropic_client(server)
        with pytest.raises(anthropic.NotFoundError, match="the model 'claude' does not exist") as missing:
            client.messages.create(model="claude", max_tokens=9, messages=[user("a")])
        assert ErrorResponse.model_validate(missing.value.body).error.type == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="should be 'auto' or 'none'"):
            client.messages.create(model="policy", max_tokens=9, messages=[user("a")], tool_choice={"type": "any"})
        with pytest.raises(openai.BadRequestError, match="'web_search', and this server runs no tools"):
            server.client().responses.create(model="policy", input="a", tools=[{"type": "web_search"}])
        assert [model.id for model in client.models.list()] == ["policy"]
        assert [model.id for model in server.client().models.list()] == ["policy"]


@pytest.mark.slow
@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize(
    ("uses_responses", "options"), [(False, {}), (True, {}), (True, {"auto_previous_response_id": True})]
)
def test_an_agent_of_openai_agents_is_one_branch_in_each_mode(renderer, uses_responses, options, is_live):
    agents = pytest.importorskip("agents")

    @agents.function_tool
    def look(row: int, column: str) -> Any:
        """Look at a field."""
        return agents.ToolOutputImage(image_url=data_url(png(IMAGE))) if uses_responses else "red"

    async def play(server: Any) -> Any:
        client = server.async_client("agent")
        provider = agents.OpenAIProvider(openai_client=client, use_responses=uses_responses)
        config = agents.RunConfig(model_provider=provider, tracing_disabled=True)
        agent = agents.Agent(name="viewer", instructions="You look.", model="policy", tools=[look])
        if is_live:
            result = agents.Runner.run_streamed(agent, "Which colours?", run_config=config, **options)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, "Which colours?", run_config=config, **options)
        await client.close()
        return result

    with served(engine_of(renderer, is_live=is_live), renderer) as server:
        result = asyncio.run(play(server))
        trajectory = server.trajectory("agent")
    assert result.final_output == "Red."
    assert (trajectory.num_turns, len(trajectory.leaves()), trajectory.forks) == (2, 1, 0)
    roles = [message["role"] for message in trajectory.to_messages(trajectory.leaves()[0])]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert len(list(trajectory.all_media())) == (2 if uses_responses else 0)


@pytest.mark.slow
def test_the_tool_runner_of_anthropics_sdk_is_one_branch(renderer):
    @anthropic.beta_tool
    def look(row: int, column: str) -> str:
        """Look at a field."""
        return "red"

    with served(engine_of(renderer, is_live=False), renderer) as server:
        runner = anthropic_client(server).beta.messages.tool_runner(
            model="policy", max_tokens=500, messages=[user("Which colours?")], tools=[look]
        )
        assert runner.until_done().content[0].text == "Red."
        trajectory = server.trajectory("s")
    assert (trajectory.num_turns, len(trajectory.leaves()), trajectory.forks) == (2, 1, 0)
