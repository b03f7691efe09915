"""Ways in which environments, engines and renderers of users go wrong, and the small world that they do it in."""

import asyncio
from dataclasses import replace

import numpy as np

from rollouts import Completion, FinishReason, GenerateResult, StepResult, WeightSpan
from rollouts.errors import EngineError, RolloutsError
from rollouts.testing import ScriptedEngine

ASKED = [{"role": "user", "content": "?"}]


class Talkative:
    """Asks three times, and pays 0.25 for each answer but the last."""

    def __init__(self):
        self.turns = 0

    def reset(self, seed):
        return list(ASKED)

    def step(self, assistant):
        self.turns += 1
        return StepResult(ASKED, reward=0.25, done=self.turns == 3, info={"turn": self.turns})


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class PanicError(BaseException):
    """Like the `PanicException` of extension modules written in Rust, which is no `Exception`."""


class RaisingSequence(list):
    """Has a length, and fails when it is read."""

    def __len__(self):
        return 3

    def __iter__(self):
        raise OSError("the data base is gone")


class RaisingNumber(float):
    def __float__(self):
        raise OSError("no number")


class RaisingResult(StepResult):
    def __getattribute__(self, name):
        if name == "done":
            raise OSError("done is computed, badly")
        return super().__getattribute__(name)


class NoContent(dict):
    def items(self):
        raise KeyError("items")


def cyclic():
    loop = {}
    loop["self"] = loop
    return loop


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


EXCEPTIONS = [
    ZeroDivisionError("x"),
    KeyError("maze"),
    AttributeError("x"),
    AssertionError(),
    NotImplementedError(),
    RecursionError("x"),
    MemoryError(),
    OSError(5, "I/O"),
    ConnectionError("x"),
    TimeoutError(),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"),
    StopIteration("x"),
    StopAsyncIteration(),
    ExceptionGroup("x", [ValueError("y")]),
    asyncio.CancelledError(),
    asyncio.InvalidStateError(),
    UnprintableError(),
    ValueError("half a pair: \ud800"),
    RolloutsError("one of ours"),
]

#: Of `StepResult`, at the second turn.
WRONG_FIELDS = {
    "reward": [
        "1", "", b"1", None, [], [1.0], {}, 1j, np.array([1.0]), np.array([[1.0]]), np.array("x"), 10**400, -(10**400),
        float("nan"), float("inf"), np.float32("nan"), np.complex64(1), object(), RaisingNumber(1), float,
    ],
    "info": [
        None, [], [("a", 1)], "text", 5, {(1, 2): 3}, {"a": {(1, 2): 3}}, {"a": object()}, {"a": [lambda: 0]},
        {"a": "\ud800"}, {"\udfff": 1}, {"a": {1, (2,)}}, {"a": np.array([object()])}, {"a": type}, {2**70: 1},
        {"a": ValueError("x")}, cyclic(), {"deep": nested(1020)}, NoContent(a=1), {"a": NoContent()},
    ],
    "messages": [
        5, None, "text", b"x", {}, {"role": "user", "content": "x"}, [5], [None], ["x"], [[]], [{}],
        [{"role": "alien"}], [{"role": "user"}], [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "odour"}]}], [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "x", "meta": object()}], [{"role": "user", "content": "x", "meta": {(1, 2): 3}}],
        [{"role": "user", "content": "x", "name": 5}], [{"role": "user", "content": "x", "meta": "\udfff"}],
        [{"role": "user", "content": [{"type": "image", "image": b"no image"}]}],
        [{"role": "user", "content": [{"type": "image", "image": object()}]}], RaisingSequence(), (), [],
        (m for m in ASKED), {1: 2}.items(), np.array([1]), [{"role": "user", "content": "x", "meta": cyclic()}],
        [{"role": "assistant", "content": "x", "tool_calls": 5}],
    ],
    "done": [np.array([True]), np.array([True, False]), "yes", 1, 0.0, None, [], object()],
}  # fmt: skip

WRONG_STEPS = [None, "text", 5, {}, (), [StepResult()], StepResult, {"reward": 1.0, "done": True}, RaisingResult()]

WRONG_RESETS = [*WRONG_FIELDS["messages"], (ASKED, {}), 0.5]

WRONG_TOOLS = [5, "tools", {"name": "f"}, [5], ["f"], [{"function": 5}]]


def named(values):
    """Parameters with ids that can be printed, whatever the values are."""
    return [f"{index}-{type(value).__name__}" for index, value in enumerate(values)]


# Engines.

#: A good completion of three tokens.
GOOD = Completion(
    0,
    np.array([40, 41, 42], np.int32),
    np.array([-0.5, -1, -2], np.float32),
    FinishReason.STOP,
    42,
    (WeightSpan("0", 0, 3),),
)

WRONG_COMPLETIONS = {
    "token_ids": [
        None, [40, 41, 42], (40, 41, 42), np.array([40.0, 41.0, 42.0]), np.array([[40, 41, 42]]),
        np.array([40, None, 42]),
        np.array([True, False, True]), np.array(["a", "b", "c"]), np.array(40), "abc", 40, np.array([40, 41]),
        np.array([], np.int32), np.array([40, 41, -1]), np.array([40, 41, 10**6]), np.array([40, 41, 2**31]),
        np.array([40, 41, 2**40]), np.array([40, 41, 2**63], np.uint64),
    ],
    "logprobs": [
        None, [-0.5, -1, -2], np.array([-0.5, None, -2]), np.array([-1, -1, -1]), np.array([[-0.5, -1, -2]]),
        np.array([-0.5, -1]), np.array([-0.5, -1, -2, -3]), np.array([-0.5, np.nan, -2]), np.array([-0.5, np.inf, -2]),
        np.array([-0.5, -np.inf, -2]), np.array([-0.5, 5, -2]), np.array([-0.5, 0.01, -2]), np.array([-9999.0, -1, -2]),
        np.array([-0.5, -1e6, -2]), np.array(["a", "b", "c"]), np.array(-0.5), "abc", -0.5, np.array([1j, 1j, 1j]),
    ],
    "finish_reason": [None, "weird", "stop", 5, FinishReason, FinishReason.ABORT, FinishReason.ERROR],
    "index": [None, "0", 1, -1, 0.5],
    "stop_token_id": ["42", 42.5, [42]],
    "weight_spans": [
        None, 5, ("0",), (("0", 0, 3),), (WeightSpan("0", 0, 4),), (WeightSpan("0", -1, 2),),
        (WeightSpan("0", 2, 3), WeightSpan("1", 0, 2)), (WeightSpan(None, 0, 3),), (WeightSpan("0", 0.0, 3),),
        (WeightSpan("\ud800", 0, 3),), (WeightSpan("0", 0, 1),), (WeightSpan("0", 0, 1), WeightSpan("1", 2, 3)),
    ],
    "routed_experts": [5, [[1]], np.zeros((3, 2)), np.zeros((1, 1, 1), np.int32), np.array(None)],
    "sampling_masks": [5, [None] * 3, (np.array([1]),), (np.zeros((1, 1), int),) * 3, (np.array([0.5]),) * 3],
}  # fmt: skip

WRONG_RESULTS = [
    None,
    "text",
    {},
    GOOD,
    [GOOD],
    GenerateResult("r", None),
    GenerateResult("r", []),
    GenerateResult("r", [GOOD, replace(GOOD, index=1)]),
    GenerateResult("r", [None]),
    GenerateResult("r", ["text"]),
    GenerateResult("r", {0: GOOD}),
    GenerateResult("of another request", [GOOD]),
    GenerateResult(None, [GOOD]),
    GenerateResult,
]

ENGINE_EXCEPTIONS = [*EXCEPTIONS, EngineError("r", "one of ours"), ConnectionRefusedError(), BrokenPipeError("x")]


class ReturningEngine(ScriptedEngine):
    """Returns something of its own at the second request; a result with the id of that request."""

    def __init__(self, renderer, wrong):
        super().__init__(["a", "b", "c"], renderer=renderer)
        self.wrong = wrong

    async def generate(self, request, listen=None):
        result = await super().generate(request)
        if len(self.requests) != 2:
            return result
        if isinstance(self.wrong, GenerateResult) and self.wrong.request_id == "r":
            return replace(self.wrong, request_id=request.request_id)
        return self.wrong


class RaisingEngine(ScriptedEngine):
    """Raises at the second request."""

    def __init__(self, renderer, error):
        super().__init__(["a", "b", "c"], renderer=renderer)
        self.error = error

    async def generate(self, request, listen=None):
        result = await super().generate(request)
        if len(self.requests) == 2:
            raise self.error
        return result
