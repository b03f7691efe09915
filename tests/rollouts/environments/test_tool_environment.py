"""Episodes with tools: every call of a turn is answered, in order, with the id that the model gave it."""

import asyncio
import json
import threading
from contextvars import ContextVar
from typing import Annotated

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played import PROMPT, play
from pydantic import Field

from renderers import ParsedResponse, ParsedToolCall, ToolCallParseStatus
from rollouts.environments import Tool, ToolEnvironment
from rollouts.environments.tools import ToolFailedError, ToolResultError
from rollouts.episodes.errors import EpisodeError
from rollouts.errors import ArgumentError

RUN = ContextVar("RUN")


def add(a: int, b: Annotated[int, Field(ge=0)] = 1) -> int:
    """Add two numbers."""
    return a + b


def picture(shade: int) -> np.ndarray:
    """Make an image."""
    return np.full((32, 32, 3), shade, np.uint8)


def fail() -> str:
    """Fail."""
    raise KeyError("the shelf is empty")


def refuse() -> str:
    """Refuse."""
    raise ToolFailedError("the shop is closed")


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def prompt(task):
    return PROMPT


def environment(*tools, **options):
    return ToolEnvironment("the task", tools=tools or [add, picture, fail, refuse], messages=prompt, **options)


def answers(trajectory):
    """The tool messages of the first branch as (id, name, content)."""
    return [
        (message["tool_call_id"], message["name"], message["content"])
        for message in trajectory.to_messages(trajectory.leaves()[0])
        if message["role"] == "tool"
    ]


def outcomes(trajectory):
    return [each["outcome"] for turn in trajectory.turns for each in turn.info.get("tool_calls", ())]


def test_an_exception_of_a_tool_is_logged_with_its_traceback_and_a_refusal_is_not(renderer, caplog):
    with caplog.at_level("INFO", "rollouts.environments.tools"):
        play(environment(), [call("fail", {}), call("refuse", {}), "done"], renderer)
    (record,) = [record for record in caplog.records if record.name == "rollouts.environments.tools"]
    assert "tool fail raised KeyError" in record.getMessage()
    assert record.exc_info[1].__traceback__.tb_next is not None


def test_everything_that_goes_wrong_is_answered_in_the_place_of_its_call(renderer):
    turn = "".join(
        [
            "I try. ",
            call("add", {"a": 1}),
            call("jump", {}),
            call("add", {"b": -1, "c": 2}),
            '<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>',
            call("fail", {}),
            call("refuse", {}),
            '<tool_call>\n{"arguments": {}}\n</tool_call>',
            call("add", {"a": 5}),
            '<tool_call>\n{"name": "add"',
        ]
    )
    trajectory, _ = play(environment(), [turn, "done"], renderer)
    assert answers(trajectory) == [
        ("call_0", "add", "2"),
        ("call_1", "jump", "error: there is no tool 'jump'; the tools are add, picture, fail, refuse"),
        (
            "call_2",
            "add",
            "error: invalid arguments for add: a is missing; b: Input should be greater than or equal to 0, not -1; "
            "there is no argument 'c'; the arguments are a, b",
        ),
        (
            "call_6",
            "invalid_call",
            "error: the arguments of this call are not valid JSON. The call was not made",
        ),
        ("call_3", "fail", "error: KeyError: 'the shelf is empty'"),
        ("call_4", "refuse", "error: the shop is closed"),
        ("call_7", "invalid_call", "error: this call does not name a tool. The call was not made"),
        ("call_5", "add", "6"),
        ("call_8", "invalid_call", "error: this call has no end. The call was not made"),
    ]
    assert outcomes(trajectory) == [
        "ok",
        "unknown_tool",
        "invalid_arguments",
        "malformed",
        "failed",
        "failed",
        "malformed",
        "ok",
        "malformed",
    ]
    assert trajectory.done


def test_the_calls_of_a_turn_run_at_the_same_time_and_are_answered_in_order(renderer):
    both, others = threading.Barrier(2, timeout=30), asyncio.Event()

    def blocking(name: str) -> str:
        both.wait()
        return name

    async def waiting() -> str:
        await asyncio.wait_for(others.wait(), 30)
        return "first"

    async def releasing() -> str:
        others.set()
        return "second"

    turn = call("waiting", {}) + call("blocking", {"name": "a"}) + call("blocking", {"name": "b"})
    trajectory, _ = play(environment(waiting, blocking, releasing), [turn + call("releasing", {}), "done"], renderer)
    assert [content for _, _, content in answers(trajectory)] == ["first", "a", "b", "second"]


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_a_tool_with_a_schema_of_its_own_gets_what_the_model_wrote(renderer, kind):
    seen = []

    async def call_later(arguments):
        return seen.append(arguments)

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = Tool("own", "Its own schema.", schema, call_later if kind == "async" else seen.append)
    trajectory, _ = play(environment(tool), [call("own", {"a": "x", "b": 1}), "done"], renderer)
    assert seen == [{"a": "x", "b": 1}]
    assert answers(trajectory)[0][2] == "null"


def test_a_blocking_tool_runs_on_a_thread_with_the_context_of_the_episode(renderer):
    def where() -> list:
        return [threading.current_thread() is threading.main_thread(), RUN.get()]

    RUN.set("run 7")
    trajectory, _ = play(environment(where), [call("where", {}), "done"], renderer)
    assert answers(trajectory)[0][2] == '[false, "run 7"]'


def test_a_call_that_takes_too_long_is_answered(renderer):
    async def wait() -> str:
        await asyncio.Event().wait()

    tool = Tool.from_function(wait, timeout_seconds=0.02)
    trajectory, _ = play(environment(tool), [call("wait", {}), "done"], renderer)
    assert answers(trajectory)[0][2] == "error: wait had not ended after 0.02 seconds and was stopped"
    assert outcomes(trajectory) == ["timeout"]


def test_blocking_calls_that_never_end_do_not_stop_later_ones(renderer):
    released = threading.Event()

    def block() -> str:
        released.wait(60)
        return ""

    slow = Tool.from_function(block, timeout_seconds=0.01)
    turns = [call("block", {}) * 12, call("block", {}) * 12, call("block", {}) * 12, call("add", {"a": 1}), "done"]
    trajectory, _ = play(environment(slow, add), turns, renderer)
    released.set()
    assert outcomes(trajectory) == ["timeout"] * 36 + ["ok"]


async def slow() -> str:
    raise TimeoutError("no answer")


async def leave() -> str:
    raise SystemExit("usage: leave [-h]")


def leave_thread() -> str:
    raise SystemExit("usage: leave [-h]")


async def wait_for_cancelled() -> str:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


def long() -> str:
    raise ValueError("x" * 10_000)


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        (slow, "error: TimeoutError: no answer"),
        (leave, "error: SystemExit: usage: leave [-h]"),
        (leave_thread, "error: SystemExit: usage: leave [-h]"),
        (wait_for_cancelled, "error: the tool waited for something that was cancelled"),
        (long, f"error: ValueError: {'x' * 485}..."),
    ],
)
def test_a_tool_has_failed_whatever_it_raises_and_the_model_is_told(renderer, tool, text):
    trajectory, _ = play(environment(tool), [call(tool.__name__, {}), "done"], renderer)
    assert (answers(trajectory)[0][2], outcomes(trajectory)) == (text, ["failed"])


def test_a_result_that_no_message_can_hold_fails_the_episode(renderer):
    def odd() -> object:
        return object()

    with pytest.raises(EpisodeError, match="tool 'odd' returned a object that cannot be written as JSON") as caught:
        play(environment(odd), [call("odd", {}), "done"], renderer)
    assert isinstance(caught.value.__cause__.__cause__, ToolResultError)
    assert caught.value.trajectory.num_turns == 1


def crop(left: int, top: int, right: int, bottom: int) -> np.ndarray:
    """Crop the image."""
    return np.full((400, 400, 3), 200, np.uint8)[top:bottom, left:right]


@pytest.mark.parametrize("bridged", [True, False])
def test_an_image_that_the_renderer_refuses_is_named_with_its_tool(renderer, monkeypatch, bridged):
    if not bridged:
        monkeypatch.setattr(type(renderer), "bridge_to_next_turn", lambda *args, **options: None)
    turn = call("add", {"a": 1}) + call("crop", {"left": 0, "top": 0, "right": 1, "bottom": 300})
    with pytest.raises(
        EpisodeError, match=r"(for|of) turn 0, the result of tool 'crop': message \d, part 0: 1x300 pixels"
    ):
        play(environment(add, crop), [turn, "done"], renderer)


attempts = st.builds(
    ParsedToolCall,
    raw=st.text(),
    name=st.none() | st.sampled_from(["add", "jump", ""]),
    arguments=st.none() | st.text() | st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=2),
    status=st.sampled_from(ToolCallParseStatus),
    id=st.none() | st.uuids().map(str),
)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(attempts, min_size=1, max_size=5))
def test_every_attempt_of_a_turn_has_one_answer_and_no_two_have_one_id(calls):
    parsed = ParsedResponse("", tool_calls=calls)
    tools = environment()

    async def answer():
        await tools.reset(0)
        return await tools.step_parsed(parsed.to_message(), parsed)

    result = asyncio.run(answer())
    assert len(result.messages) == len(calls)
    assert not result.done
    ids = [message["tool_call_id"] for message in result.messages]
    assert len(set(ids)) == len(ids)
    for attempt, call_id in zip(calls, ids, strict=True):
        assert attempt.id in (None, call_id)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "exact"}, "score is"),
        ({"call_seconds": 0}, "call_seconds is 0"),
        ({"max_result_characters": 0}, "max_result_characters is 0"),
        ({"max_result_images": 1.5}, "max_result_images is 1.5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_refused_with_its_name(options, message):
    with pytest.raises(ArgumentError, match=message):
        ToolEnvironment(None, **{"tools": [add], "messages": prompt, **options})
