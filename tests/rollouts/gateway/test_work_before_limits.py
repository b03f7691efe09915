"""What a gateway does with a request that it refuses grows with the size of the request, and stays small."""

import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_server import served, user

from renderers.tokens.tokenizer import TemplateTokenizer
from rollouts import SamplingParams
from rollouts.engines.chat_completions import read_answer
from rollouts.engines.fleet import EngineFleet
from rollouts.environments.tools.parameters import FunctionParameters
from rollouts.errors import RolloutsError, ServerUnreachableError
from rollouts.run_config.config_file import checked_config
from rollouts.serve.errors import RequestError
from rollouts.serve.gateway.chat import CHAT
from rollouts.serve.gateway.dialect import Reading
from rollouts.serve.gateway.limits import GatewayLimits
from rollouts.serve.gateway.request_checks import read_turn
from rollouts.testing import ScriptedEngine

CONTEXT = 1000


class ShortEngine(ScriptedEngine):
    max_model_len = CONTEXT


class UnprobedEngine(ScriptedEngine):
    max_model_len = None

    async def capabilities(self):
        self.max_model_len = CONTEXT


class UnreachableEngine(UnprobedEngine):
    async def capabilities(self):
        raise ServerUnreachableError("probe", "connection refused")


def fleet(*answers, **options):
    return EngineFleet({"down": UnreachableEngine(*answers, **options), "up": UnprobedEngine(*answers, **options)})


@pytest.mark.parametrize(
    ("engine_class", "turns"),
    [(ShortEngine, 0), (ShortEngine, 1), (UnprobedEngine, 0), (UnprobedEngine, 1), (fleet, 0)],
)
def test_a_text_that_no_context_holds_is_refused_before_it_is_encoded(renderer, monkeypatch, engine_class, turns):
    encoded = 0
    encode = TemplateTokenizer._encode

    def counting(tokenizer, text, *others):
        nonlocal encoded
        encoded += len(text)
        return encode(tokenizer, text, *others)

    longest = CONTEXT * renderer.tokenizer.longest_piece
    with served(engine_class(["one", "two"], renderer=renderer), renderer) as server:
        chat = server.client("s").chat.completions.create
        messages = [user("a")]
        for _ in range(turns):
            messages += [chat(model="m", messages=messages).choices[0].message, user("b")]
        monkeypatch.setattr(TemplateTokenizer, "_encode", counting)
        for size in (longest, 2 * longest, 1000 * longest):
            body = {"model": "m", "messages": [*messages[:-1], user("word " * (size // 5 + 1))]}
            refused = httpx.post(f"{server.base_url}/chat/completions", json=_plain(body), timeout=60)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
            assert "the prompt length (at least " in error["message"]
        assert encoded <= 5000, "what a bridge tries, and not the text"
        assert chat(model="m", messages=messages).choices[0].message.content


def _plain(body):
    return json.loads(json.dumps(body, default=lambda message: message.model_dump(exclude_none=True)))


# Unknown and wrong keys and values: none is listed that is not shown.


def read_chat(body: Any) -> None:
    text = json.dumps({"messages": [user("a")], **body}).encode()
    read_turn(text, CHAT, Reading(sampling=SamplingParams(), limits=GatewayLimits(max_parts=100)))


def look(row: int) -> str:
    """A tool."""
    return str(row)


def names(count: int) -> dict[str, Any]:
    return {f"k{number}": number for number in range(count)}


ATTACKS: dict[str, tuple[Callable[[Any], Any], Callable[[int], Any]]] = {
    "fields of a body": (read_chat, names),
    "fields of stream_options": (read_chat, lambda count: {"stream_options": names(count)}),
    "tools that are none": (read_chat, lambda count: {"tools": [{}] * count}),
    "stop strings that are none": (read_chat, lambda count: {"stop": [1] * count}),
    "messages that are none": (read_chat, lambda count: {"messages": [{}] * count}),
    "keys of a message": (read_chat, lambda count: {"messages": [{**user("a"), **names(count)}]}),
    "keys of a part": (
        read_chat,
        lambda count: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **names(count)}]}]},
    ),
    "arguments of a tool": (FunctionParameters("look", look).checked, lambda count: {"row": 1, **names(count)}),
    "tables of a configuration": (partial(checked_config, Path("run.toml")), names),
    "keys of a table": (
        partial(checked_config, Path("run.toml")),
        lambda count: {"engine": {"kind": "vllm", **names(count)}},
    ),
    "tool calls of an answer": (
        lambda body: read_answer("r", json.dumps(body).encode(), None),
        lambda count: {"choices": [{"message": {"tool_calls": [1] * count}, "finish_reason": "stop"}]},
    ),
}


def peak_bytes(attack: Callable[[Any], Any], value: Any) -> int:
    """The most memory that Python takes while an attack is refused, and how long the text of the error is."""
    tracemalloc.start()
    try:
        with pytest.raises((RequestError, RolloutsError)) as refused:
            attack(value)
        assert len(str(refused.value)) < 2000
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("attack", "value"), ATTACKS.values(), ids=ATTACKS)
def test_what_is_refused_takes_no_more_memory_than_the_request(attack, value):
    small, large = (peak_bytes(attack, value(count)) for count in (20_000, 40_000))
    assert large <= 2.2 * small + 100_000
    assert large <= 400 * 40_000
