"""Requests that `rollouts serve` refuses, with the status codes and bodies of vLLM 0.32."""

from __future__ import annotations

import base64
import json
import threading
import urllib.error
import urllib.request

import msgpack
import numpy as np
import openai
import pytest
from served_in_thread import ServedInThread, local_app
from test_served_engine import image_messages, request_of

from rollouts.engines.vllm import VLLMEngine
from rollouts.engines.vllm.features import encode_features
from rollouts.errors import OverlongPromptError
from rollouts.serve import bodies as json_bodies
from rollouts.serve.bodies import MAX_JSON_VALUES, has_more_values
from rollouts.serve.gateway.routes import Gateway
from rollouts.testing import ScriptedEngine


@pytest.fixture(scope="module")
def gateway_server(tiny_model_dir, renderer):
    gateway = Gateway(ScriptedEngine(lambda request: "x", renderer=renderer), renderer)
    with ServedInThread(local_app(tiny_model_dir, routes=gateway.routes())) as server:
        yield server


GENERATE = "/inference/v1/generate"
SAMPLING = {"max_tokens": 2, "temperature": 0}


def body(**fields):
    return {"token_ids": [5, 6, 7], "sampling_params": SAMPLING, **fields}


def sampling(**options):
    return body(sampling_params={**SAMPLING, **options})


#: What is sent, and vLLM's status, type and (the beginning of) param.
REFUSED = {
    "another model": (body(model="nope"), 404, "NotFoundError", "model"),
    "a prompt longer than the context": (body(token_ids=[5] * 5000), 400, "BadRequestError", None),
    "a prompt as long as the context": (body(token_ids=[5] * 4096), 400, "BadRequestError", None),
    "a token beyond the vocabulary": (body(token_ids=[999_999]), 400, "BadRequestError", None),
    "an id that no response could hold": (body(request_id="\ud800"), 400, "Bad Request", "body.request_id"),
    "no tokens": (body(token_ids=[]), 400, "Bad Request", "body.token_ids"),
    "a negative token": (body(token_ids=[-1]), 400, "Bad Request", "body.token_ids"),
    "no sampling options": ({"token_ids": [5]}, 400, "Bad Request", "body.sampling_params"),
    "tokens that are text": (body(token_ids="ab"), 400, "Bad Request", "body.token_ids"),
    "a list for a body": ([1], 400, "Bad Request", "body"),
    "a body that is no JSON": (b"{", 400, "Bad Request", "body"),
    "a temperature below 0": (sampling(temperature=-1), 400, "BadRequestError", "temperature"),
    "a temperature that is text": (sampling(temperature="a"), 400, None, None),
    "max_tokens 0": (sampling(max_tokens=0), 400, "BadRequestError", "max_tokens"),
    "21 log-probabilities": (sampling(logprobs=21), 400, "BadRequestError", "logprobs"),
    "top_p 0": (sampling(top_p=0), 400, "BadRequestError", "top_p"),
    "a stop token beyond the vocabulary": (sampling(stop_token_ids=[9_999]), 400, "BadRequestError", None),
    "more samples than any engine takes": (sampling(n=2**40, temperature=1), 400, "BadRequestError", "n"),
    "several greedy samples": (sampling(n=2), 400, "BadRequestError", None),
    "features without hashes": (body(features={"mm_placeholders": {}}), 400, "Bad Request", "body.features"),
    "features of different lengths": (
        body(features={"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": []}}),
        400,
        "Bad Request",
        "body.features",
    ),
    "a placeholder past the end": (
        body(features={"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 2, "length": 2}]}}),
        400,
        "Bad Request",
        "body",
    ),
    "features and content_parts": (
        body(features={"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}})
        | {"content_parts": [{"type": "image_url"}]},
        400,
        "Bad Request",
        "body",
    ),
    "data that are no base64": (
        body(
            features={
                "mm_hashes": {"image": ["a"]},
                "mm_placeholders": {"image": [{"offset": 0, "length": 1}]},
                "kwargs_data": {"image": ["?"]},
            }
        ),
        400,
        "BadRequestError",
        None,
    ),
    "an image that is not cached": (
        body(features={"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}}),
        500,
        "InternalServerError",
        None,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_vllm_refuses_gets_its_status_and_its_kind_of_error(tiny_server, name):
    sent, status, kind, param = REFUSED[name]
    answer = tiny_server.post(GENERATE, sent)
    assert answer.status == status
    error = answer.json["error"]
    assert error["code"] == status
    assert error["message"]
    assert kind in (None, error["type"])
    assert param is None or str(error["param"]).startswith(param)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("get", "/nope", 404),
        ("get", GENERATE, 405),
        ("post", "/version", 405),
        ("post", "/pause?mode=nope", 400),
        ("post", "/sleep?level=7", 400),
        ("post", "/inference/v1/abort_requests", 400),
        ("post", "/update_weight_version", 400),
        ("post", "/collective_rpc", 400),
        ("post", "/init_weight_transfer_engine", 400),
        ("post", "/update_weights", 400),
        ("post", "/finish_weight_update", 500),
        ("post", "/v1/load_lora_adapter", 400),
        ("post", "/v1/unload_lora_adapter", 400),
    ],
)
def test_routes_refuse_what_they_do_not_know(tiny_server, method, path, status):
    assert getattr(tiny_server, method)(path, *([{}] if method == "post" else [])).status == status


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "said"),
    [
        ("post", "/v1/nope", 404, "unknown_url", "POST /v1/nope: there is no such route"),
        ("get", "/v1", 404, "unknown_url", "GET /v1/models"),
        ("post", "/v1/completions", 404, "unknown_url", "POST /v1/chat/completions"),
        ("get", "/sessions/s/nope", 404, "unknown_url", "GET /sessions/s/nope"),
        ("get", "/v1/chat/completions", 405, "method_not_supported", "this path takes POST"),
        ("post", "/v1/models", 405, "method_not_supported", "this path takes GET"),
        ("get", "/sessions/s/reward", 405, "method_not_supported", "this path takes POST"),
    ],
)
def test_an_unknown_route_of_openais_api_is_told_in_its_form(gateway_server, method, path, status, code, said):
    answer = getattr(gateway_server, method)(path, *([{}] if method == "post" else []))
    assert answer.status == status
    error = answer.json["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, code)
    assert said in error["message"]


def test_an_openai_client_reads_the_error_of_a_route_that_there_is_not(gateway_server):
    with (
        openai.OpenAI(base_url=f"{gateway_server.base_url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="there is no such route") as raised,
    ):
        client.embeddings.create(model="m", input="a")
    assert (raised.value.code, raised.value.type) == ("unknown_url", "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "sent"),
    [("/v1/chat/completions/render", {"messages": 1}), ("/v1/load_lora_adapter", {"lora_name": 1}), (GENERATE, {})],
)
def test_routes_of_vllm_below_v1_have_errors_in_its_form(gateway_server, path, sent):
    answer = gateway_server.post(path, sent)
    assert (answer.status, answer.json["error"]["code"], answer.json["error"]["type"]) == (400, 400, "Bad Request")


def test_other_unknown_routes_have_the_form_of_vllm(gateway_server):
    assert gateway_server.get("/nope").json == {"detail": "Not Found"}
    answer = gateway_server.get(GENERATE)
    assert (answer.json, answer.headers["Allow"]) == ({"detail": "Method Not Allowed"}, "POST")


def test_all_methods_of_a_path_with_several_routes_are_allowed(gateway_server):
    request = urllib.request.Request(f"{gateway_server.base_url}/sessions", method="PUT")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value as error:
        assert (error.status, error.headers["Allow"]) == (405, "GET, HEAD, POST")
        assert "takes GET and HEAD and POST" in json.load(error)["error"]["message"]


def test_a_body_of_another_media_type_is_refused(tiny_server):
    answer = tiny_server.post(GENERATE, body(), {"Content-Type": "text/plain"})
    assert (answer.status, answer.json["error"]["type"]) == (400, "Bad Request")
    assert "Only 'application/json' is allowed" in answer.json["error"]["message"]


def test_a_request_whose_model_would_need_another_engine_is_refused_with_the_option(tiny_server):
    for option, value in {"min_p": 0.1, "stop": ["a"], "structured_outputs": {"json": {}}, "new_option": 1}.items():
        answer = tiny_server.post(GENERATE, sampling(**{option: value}))
        assert answer.status == 400
        assert option in answer.json["error"]["message"]
    for option, value in {"min_p": 0, "stop": [], "repetition_penalty": 1.0, "detokenize": False}.items():
        assert tiny_server.post(GENERATE, sampling(**{option: value})).status == 200


def test_max_tokens_beyond_the_context_ends_the_completion_at_its_limit(tiny_server):
    prompt = [5] * 4090
    sent = {"token_ids": prompt, "sampling_params": {"max_tokens": 100, "ignore_eos": True, "logprobs": 0}}
    (choice,) = tiny_server.post(GENERATE, sent).json["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (6, "length")


async def test_a_prompt_without_room_is_refused_before_it_is_sent(tiny_server, renderer):
    request = request_of(renderer, [{"role": "user", "content": "long " * 5000}])
    async with VLLMEngine(tiny_server.base_url) as engine:
        with pytest.raises(OverlongPromptError):
            await engine.generate(request)


# Images that vLLM takes for others, or dies of.


def image_body(renderer, change=lambda item: None, move=(0, 0)):
    """A request with an image whose tensors `change` has changed."""
    request = request_of(renderer, image_messages(0))
    features = json.loads(b"".join(encode_features(request.multi_modal_data, pixel_dtype="uint8")))
    item = msgpack.unpackb(base64.b64decode(features["kwargs_data"]["image"][0]))
    change(item)
    features["kwargs_data"]["image"] = [base64.b64encode(msgpack.packb(item)).decode()]
    place = features["mm_placeholders"]["image"][0]
    place["offset"] += move[0]
    place["length"] += move[1]
    return {"token_ids": list(request.prompt_ids), "features": features, "sampling_params": SAMPLING}


def as_floats(item):
    _, shape, raw = item["pixel_values"]["data"]
    values = np.frombuffer(raw.data, np.uint8).astype(np.float32)
    item["pixel_values"]["data"] = ["float32", shape, msgpack.ExtType(3, values.tobytes())]


def other_grid(item):
    grid = np.frombuffer(item["image_grid_thw"]["data"][2].data, np.int64) * 2
    item["image_grid_thw"]["data"][2] = msgpack.ExtType(3, grid.tobytes())


def with_grid(change, dtype="int64"):
    """The image with `change(height, width)` as its grid; its number of patches is height x width."""

    def change_item(item):
        _, height, width = np.frombuffer(item["image_grid_thw"]["data"][2].data, np.int64).tolist()
        grid = np.array(change(height, width), dtype)
        item["image_grid_thw"]["data"][0] = dtype
        item["image_grid_thw"]["data"][2] = msgpack.ExtType(3, grid.tobytes())

    return change_item


def no_pixels(item):
    del item["pixel_values"]


@pytest.mark.parametrize(
    ("change", "move", "reason"),
    [
        (as_floats, (0, 0), "takes uint8 pixels"),
        (other_grid, (0, 0), "image_grid_thw"),
        (with_grid(lambda height, width: (1, -height, -width)), (0, 0), "image_grid_thw"),
        (with_grid(lambda height, width: (1, 1, height * width)), (0, 0), "image_grid_thw"),
        (with_grid(lambda height, width: (1, 2**62 + height, 4 * width)), (0, 0), "image_grid_thw"),
        (with_grid(lambda height, width: (1, float("nan"), width), "float32"), (0, 0), "image_grid_thw"),
        (no_pixels, (0, 0), "this model takes image_grid_thw, pixel_values"),
        (lambda item: None, (0, -1), "its tensors make"),
        (lambda item: None, (1, 0), "which stands for features"),
        (lambda item: item.clear(), (0, 0), "this model takes"),
    ],
)
def test_an_image_that_does_not_fit_its_prompt_is_refused_and_the_server_lives(
    tiny_server, renderer, change, move, reason
):
    answer = tiny_server.post(GENERATE, image_body(renderer, change, move))
    assert answer.status == 400
    assert reason in answer.json["error"]["message"]
    assert tiny_server.post(GENERATE, image_body(renderer)).status == 200


def test_a_name_cannot_stand_for_two_images(tiny_server, renderer):
    first = image_body(renderer)
    names = first["features"]["mm_hashes"]

    def inverted(item):
        dtype, shape, raw = item["pixel_values"]["data"]
        item["pixel_values"]["data"] = [dtype, shape, msgpack.ExtType(3, bytes(255 - value for value in raw.data))]

    second = image_body(renderer, inverted)
    second["features"]["mm_hashes"] = names
    assert tiny_server.post(GENERATE, first).status == 200
    answer = tiny_server.post(GENERATE, second)
    assert answer.status == 400
    assert "other tensors" in answer.json["error"]["message"]


def test_the_server_opens_no_address_that_a_request_names(tiny_server, renderer, tmp_path):
    marker = renderer.tokenizer.control_id("<|image_pad|>")
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"x")
    for url in ("http://127.0.0.1:1/a.png", f"file://{secret}", str(secret)):
        part = {"type": "image_url", "url": url}
        answer = tiny_server.post(GENERATE, body(token_ids=[5, marker], content_parts=[part]))
        assert answer.status == 400
        assert "policy" in answer.json["error"]["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/abort_requests"])
def test_a_large_body_is_parsed_on_a_thread_and_not_on_the_loop(tiny_server, monkeypatch, path):
    threads, loads = [], json_bodies._loads

    def recorded(data, max_values):
        threads.append(threading.current_thread().name)
        return loads(data, max_values)

    monkeypatch.setattr(json_bodies, "_loads", recorded)
    body = {"prompt": "a" * 300_000, "tokens": [5], "request_ids": []}
    assert tiny_server.post(path, body).status == 200
    assert threads
    assert all(name.startswith("asyncio_") for name in threads)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (GENERATE, b'{"token_ids": [%s5], "sampling_params": {}}' % (b"5," * (4096 + 2**20))),
        ("/detokenize", b'{"tokens": [%s5]}' % (b"5," * MAX_JSON_VALUES)),
        ("/inference/v1/abort_requests", b'{"request_ids": [%s""]}' % (b'"",' * MAX_JSON_VALUES)),
        ("/v1/chat/completions", b'{"messages": [%s{}]}' % (b"{}," * MAX_JSON_VALUES)),
    ],
)
def test_a_body_of_more_values_than_a_request_needs_is_refused_before_it_becomes_python_objects(
    gateway_server, monkeypatch, path, text
):
    parsed = []
    monkeypatch.setattr(json, "loads", lambda data, **options: parsed.append(len(data)) or {})
    refused = gateway_server.post(path, text)
    monkeypatch.undo()
    assert (refused.status, parsed) == (400, [])
    assert "commas" in refused.json["error"]["message"]


@pytest.mark.slow
def test_a_prompt_beyond_the_context_is_refused_with_its_length_as_long_as_it_is_parsed(gateway_server):
    answer = gateway_server.post(GENERATE, body(token_ids=[5] * 500_000))
    assert (answer.status, answer.json["error"]["type"]) == (400, "BadRequestError")
    assert "(length 500000)" in answer.json["error"]["message"]


@pytest.mark.parametrize("length", [10, 2**20 - 1, 2**20, 2**20 + 1, 2**21 + 5])
def test_the_values_of_a_text_are_counted_up_to_the_limit(length):
    text = b"[" + b"1," * length + b"1]"
    assert has_more_values(text, length)
    assert not has_more_values(text, length + 1)
