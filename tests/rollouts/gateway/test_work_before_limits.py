"""What a gateway does with a request that it refuses grows with the size of the request, and stays small."""

from __future__ import annotations

import json

import httpx
import pytest
from gateway_server import served, user

from renderers.tokens.tokenizer import TemplateTokenizer
from rollouts.testing import ScriptedEngine

CONTEXT = 1000


class ShortEngine(ScriptedEngine):
    max_model_len = CONTEXT


@pytest.mark.parametrize("turns", [0, 1])
def test_a_text_that_no_context_holds_is_refused_before_it_is_encoded(renderer, monkeypatch, turns):
    encoded = 0
    encode = TemplateTokenizer._encode

    def counting(tokenizer, text, *others):
        nonlocal encoded
        encoded += len(text)
        return encode(tokenizer, text, *others)

    longest = CONTEXT * renderer.tokenizer.longest_piece
    with served(ShortEngine(["one", "two"], renderer=renderer), renderer) as server:
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
