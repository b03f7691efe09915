"""`generate` with an OpenAI-style client: what is posted, what is returned, which responses are refused."""

import asyncio
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from images import png_url
from PIL import Image
from spelling import ids_of

from renderers import (
    MalformedGenerateResponseError,
    OverlongPromptError,
    Renderer,
    TemplateRenderer,
    create_renderer,
    load_tokenizer,
)
from renderers.client import generate, parse_generate_response

QUESTION = [{"role": "user", "content": "Q"}]
MODEL = "served"


def logprobs(token_ids: list[int], form: str = "0.32") -> dict[str, Any]:
    names = {"0.31": lambda token: {"token": f"token_id:{token}"}, "0.32": lambda token: {"token_id": token}}
    return {"content": [{**names[form](token), "logprob": -0.5} for token in token_ids]}


_servers = itertools.count()  # an address is used once: limits of servers are kept by address


class Client:
    """Records what is posted; responds with `completion`, or with what `respond` makes of the body."""

    def __init__(self, completion: list[int], **choice: Any) -> None:
        self.base_url = f"http://server.test/{next(_servers)}/v1/"
        self.posted: list[tuple[str, dict[str, Any], Any]] = []
        self.choice = {"token_ids": completion, "logprobs": logprobs(completion), "finish_reason": "stop", **choice}
        self.max_model_len: Any = 4096
        self.listings: list[Any] | None = None  # what `/models` returns or raises, in place of `max_model_len`
        self.expanded: dict[str, Any] = {}
        self.held: set[str] = set()

    async def get(self, path: str, *, cast_to: Any) -> Any:
        assert path == "/models"
        if self.listings is not None:
            listing = self.listings.pop(0)
            if isinstance(listing, Exception):
                raise listing
            return listing
        return {"data": [{"id": MODEL, "max_model_len": self.max_model_len}]}

    async def post(self, url: str, *, cast_to: Any, body: dict[str, Any], options: Any = None) -> Any:
        self.posted.append((url, body, options))
        for part in body.get("content_parts", ()):
            if part["url"] is None and part["uuid"] not in self.held:
                raise CacheMissError
            self.held.add(part.get("uuid"))
        return SimpleNamespace(
            content=json.dumps({"request_id": "r", "choices": [self.choice], **self.expanded}).encode()
        )


class CacheMissError(Exception):
    status_code = 400
    response = SimpleNamespace(text='{"error": {"message": "Cache miss for uuid"}}')


def run(client: Client, renderer: Renderer, messages: Any = QUESTION, **options: Any) -> dict[str, Any]:
    return asyncio.run(generate(client=client, renderer=renderer, messages=messages, model=MODEL, **options))


@pytest.fixture(scope="module")
def answer(renderer: TemplateRenderer) -> list[int]:
    return ids_of(renderer, "A", "<|im_end|>")


@pytest.mark.parametrize("form", ["0.31", "0.32"])
def test_the_prompt_is_posted_and_the_completion_is_parsed(
    renderer: TemplateRenderer, answer: list[int], form: str
) -> None:
    client = Client(answer, logprobs=logprobs(answer, form))
    result = run(client, renderer, sampling_params={"max_tokens": 5, "logprobs": 7}, cache_salt="s", priority=3,
                 extra_headers={"X-Session-ID": "e"})  # fmt: skip
    ((url, body, options),) = client.posted
    prompt = renderer.render_ids(QUESTION, add_generation_prompt=True)
    assert url == client.base_url.removesuffix("/v1/") + "/inference/v1/generate"
    assert options == {"headers": {"X-Session-ID": "e"}}
    assert body == {
        "model": MODEL,
        "token_ids": prompt,
        "sampling_params": {
            "skip_special_tokens": False,
            "max_tokens": 5,
            "stop_token_ids": renderer.get_stop_token_ids(),
            "logprobs": 1,
        },
        "cache_salt": "s",
        "priority": 3,
    }
    assert (result["prompt_ids"], result["completion_ids"], result["content"]) == (prompt, answer, "A")
    assert result["completion_logprobs"] == [-0.5] * len(answer)
    assert (result["finish_reason"], result["request_id"], result["renderer_prompt_ids"]) == ("stop", "r", None)
    assert result["prompt_attribution"].token_ids == prompt


@pytest.mark.slow
def test_the_client_of_openai_is_one(renderer: TemplateRenderer, answer: list[int]) -> None:
    from openai import AsyncOpenAI

    completion = json.dumps({"choices": [Client(answer).choice]}).encode()

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(completion)))
            self.end_headers()
            self.wfile.write(completion)

        def log_message(self, *arguments: Any) -> None:
            pass

    async def one(port: int) -> dict[str, Any]:
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k") as client:
            return await generate(client=client, renderer=renderer, messages=QUESTION, model=MODEL)

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            assert asyncio.run(one(server.server_port))["content"] == "A"
        finally:
            server.shutdown()


def test_a_stop_after_a_valid_call_is_a_finish_for_tool_calls(renderer: TemplateRenderer) -> None:
    called = ids_of(renderer, "<tool_call>", '{"name": "look", "arguments": {}}', "</tool_call>", "<|im_end|>")
    assert run(Client(called), renderer)["finish_reason"] == "tool_calls"
    assert run(Client(called, finish_reason="length"), renderer)["finish_reason"] == "length"
    called = ids_of(renderer, "<tool_call>", '{"name": "look", "parameters": {}}', "</tool_call>", "<|im_end|>")
    assert run(Client(called), renderer)["finish_reason"] == "tool_calls"


def test_a_prompt_longer_than_the_limit_is_refused_before_it_is_sent(
    renderer: TemplateRenderer, answer: list[int]
) -> None:
    length = len(renderer.render_ids(QUESTION, add_generation_prompt=True))
    client = Client(answer)
    with pytest.raises(OverlongPromptError, match="maximum context length") as caught:
        run(client, renderer, max_prompt_len=length - 1)
    assert (caught.value.prompt_len, caught.value.max_prompt_len) == (length, length - 1)
    assert client.posted == []
    assert run(client, renderer, max_prompt_len=length)["content"] == "A"
    limited = Client(answer)
    limited.max_model_len = length - 1
    with pytest.raises(OverlongPromptError):
        run(limited, renderer)


BROKEN: dict[str, Any] = {
    "no object": None,
    "too few": {"content": []},
    "another token": logprobs([7, 8]),
    "text": {"content": [{"token_id": 0, "logprob": "x"}] * 2},
    "the value of vLLM for none": {"content": [{"token_id": 0, "logprob": -9999.0}] * 2},
    "not finite": {"content": [{"token_id": 0, "logprob": float("nan")}] * 2},
    "too large": {"content": [{"token_id": 0, "logprob": -(10**400)}] * 2},
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_response_without_a_usable_log_probability_for_each_token_is_refused(
    renderer: TemplateRenderer, broken: Any
) -> None:
    with pytest.raises(MalformedGenerateResponseError, match="logprob"):
        run(Client([0, 0], logprobs=broken), renderer)


def test_the_base64_of_routed_experts_is_a_view_of_the_response() -> None:
    raw = b'{"choices":[{"token_ids":[1],"routed_experts":{"data":"QUJD","shape":[1]}}]}'
    (choice,) = parse_generate_response(raw)["choices"]
    assert (bytes(choice["routed_experts"]["data"]), choice["routed_experts"]["shape"]) == (b"QUJD", [1])
    assert choice["routed_experts"]["data"].obj is raw


# Images that the server loads.


def data_url(colour: int) -> str:
    return png_url((colour, 0, 0))


def image_message(*colours: int) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(colour)}} for colour in colours]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]


def test_the_data_of_an_image_are_sent_once_and_again_after_the_server_has_evicted_them(
    renderer: TemplateRenderer, answer: list[int]
) -> None:
    client = Client(answer)
    client.expanded = {"prompt_token_ids": [9, 9, 9], "mm_placeholders": {"image": [{"offset": 0, "length": 3}]}}
    result = run(client, renderer, image_message(1), process_multimodal=False)
    logical = renderer.render_ids(image_message(1), add_generation_prompt=True, process_multimodal=False)
    assert (result["prompt_ids"], result["renderer_prompt_ids"]) == ([9, 9, 9], logical)
    assert result["mm_placeholders"] == client.expanded["mm_placeholders"]
    run(client, renderer, image_message(1, 2), process_multimodal=False)
    sent = [[part["url"] for part in body["content_parts"]] for _, body, _ in client.posted]
    assert sent == [[data_url(1)], [None, data_url(2)]]
    client.held.clear()
    run(client, renderer, image_message(2), process_multimodal=False)
    assert [[part["url"] for part in body["content_parts"]] for _, body, _ in client.posted[2:]] == [
        [None],
        [data_url(2)],
    ]


def test_a_response_without_the_expanded_prompt_is_refused(renderer: TemplateRenderer, answer: list[int]) -> None:
    with pytest.raises(MalformedGenerateResponseError, match="prompt_token_ids"):
        run(Client(answer), renderer, image_message(1), process_multimodal=False)


def test_an_image_without_a_url_cannot_be_left_to_the_server(renderer: TemplateRenderer, answer: list[int]) -> None:
    message = {"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (32, 32))}]}
    with pytest.raises(ValueError, match="message 0, part 0"):
        run(Client(answer), renderer, [message], process_multimodal=False)


def test_a_tokenizer_without_transformers_makes_the_same_renderer(
    tiny_model_dir: Path, renderer: TemplateRenderer
) -> None:
    tokenizer = load_tokenizer(str(tiny_model_dir))
    made = create_renderer(tokenizer)
    assert made.render(QUESTION, add_generation_prompt=True) == renderer.render(QUESTION, add_generation_prompt=True)
    ids = tokenizer.encode("Q<|im_end|>")
    assert tokenizer.decode(ids) == "Q<|im_end|>"
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>"]) == ids[-1:]


class UnreachableError(OSError):
    """What the `get` of a client raises, whether `openai` is loaded in this process or not."""

    def __init__(self, status_code: int | None = None) -> None:
        self.status_code = status_code


@pytest.mark.parametrize(
    "listing",
    [UnreachableError(404), {}, {"data": None}, {"data": ["m"]}, {"data": [{"id": MODEL}]}, {"data": [{"id": "o"}]}, 7,
     {"data": [{"id": MODEL, "max_model_len": "2"}]}, {"data": [{"id": MODEL, "max_model_len": True}]}],
    ids=repr,
)  # fmt: skip
def test_a_server_that_publishes_no_limit_is_asked_once(
    renderer: TemplateRenderer, answer: list[int], listing: Any
) -> None:
    client = Client(answer)
    client.listings = [listing]
    for _ in range(2):
        assert run(client, renderer)["content"] == "A"
    assert client.listings == []
