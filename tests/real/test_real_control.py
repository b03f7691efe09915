"""`ServerControl` against a real server: the effects of each call, and the damage that refused calls would do."""

import asyncio
import itertools
import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from vllm_server import GENERATED, LONGEST_SECONDS

from renderers import load_renderer
from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.vllm.capabilities import probe
from rollouts.engines.vllm.control import ServerControl
from rollouts.engines.vllm.feature_encoding import encode_features
from rollouts.engines.weight_deltas import write_weight_delta
from rollouts.errors import EngineError, ServerError, WeightUpdateError

_made = itertools.count()
GENERATE = "/inference/v1/generate"


@pytest.fixture
async def connection(vllm_server):
    connection = ServerConnection(vllm_server.base_url)
    yield connection
    await connection.close()


@pytest.fixture
async def control(connection):
    known = await probe(connection)

    async def capabilities():
        return known

    return ServerControl(connection, capabilities)


@pytest.fixture
def image(vllm_server):
    """A prompt with an image that no other test uses."""
    pixels = np.random.default_rng(5_000_000 + next(_made)).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    parts = [{"type": "image", "image": pixels}, {"type": "text", "text": "What is it?"}]
    return load_renderer(vllm_server.model_dir).render([{"role": "user", "content": parts}], add_generation_prompt=True)


def body_of(ids, tokens, request_id=None, features=b"null"):
    sampling = b'{"temperature":0,"logprobs":0,"ignore_eos":true,"max_tokens":%d}' % tokens
    name = b"" if request_id is None else b'"request_id":"%b",' % request_id.encode()
    listed = ",".join(map(str, ids)).encode()
    return [b'{%b"token_ids":[%b],"sampling_params":%b,"features":' % (name, listed, sampling), *features, b"}"]


async def generated(connection, ids=(5, 6, 7), tokens=6, request_id=None):
    """The single choice of the response."""
    body = body_of(ids, tokens, request_id, [b"null"])
    reply = await connection.request("POST", GENERATE, name="test", body=body)
    assert reply.status == 200, reply.body
    (choice,) = reply.json()["choices"]
    return choice


async def request_image(connection, rendered, *, data):
    """Status and log-probabilities of a request with an image, sent with its data or by its hash."""
    features = encode_features(rendered.multi_modal_data, pixel_dtype="uint8", include=lambda mm_hash: data)
    body = body_of(rendered.token_ids, 4, None, features)
    reply = await connection.request("POST", GENERATE, name="test", body=body)
    return reply.status, logprobs(reply.json()["choices"][0]) if reply.status == 200 else None


def logprobs(choice):
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


async def in_flight(connection, tokens=3500, request_id=None):
    """A request that has begun to generate: a task with its single choice.

    It is long, because the engine of a tiny model generates many tokens before the server receives the next call.
    """
    begun = asyncio.Event()
    task = asyncio.ensure_future(streamed(connection, begun, tokens, request_id))
    await asyncio.wait_for(begun.wait(), LONGEST_SECONDS)
    return task


async def streamed(connection, begun, tokens, request_id):
    whole = {"token_ids": [], "logprobs": {"content": []}}
    opening = body_of((5, 6, 7), tokens, request_id)[0][1:].replace(
        b'"logprobs"', b'"stream_interval":100000,"logprobs"'
    )
    body = [b'{"stream":true,', opening, b"null}"]
    async with connection.stream(GENERATE, name="test", body=body) as events:
        async for event in events:
            (choice,) = json.loads(event)["choices"]
            whole["token_ids"] += choice.pop("token_ids")
            whole["logprobs"]["content"] += choice.pop("logprobs")["content"]
            whole |= choice
            begun.set()
    return whole


# Caches.


async def pause_and_resume(control, mode, clear_cache=None):
    await control.pause(mode, clear_cache=clear_cache)
    await control.resume()


async def sleep_and_wake(control, level):
    await control.sleep(level)
    if level == 2:
        await control.wake_up(["weights"])
        await control.update_weights(control.model_dir, "default")
    await control.wake_up()


async def reload(control):
    await control.pause("keep", clear_cache=False)
    await control.update_weights(control.model_dir, "default")
    await control.resume()


async def label(control):
    await control.update_weight_version("x")
    await control.update_weight_version("default")


async def reset_encoder_cache(control):
    await control.pause("keep", clear_cache=False)
    await control.reset_encoder_cache()
    await control.resume()


CALLS = {
    # name: (call, whether pixels are still known by name, whether prompts are still in the prefix cache)
    "pause abort": (lambda c: pause_and_resume(c, "abort"), False, False),
    "pause wait": (lambda c: pause_and_resume(c, "wait"), False, False),
    "pause keep": (lambda c: pause_and_resume(c, "keep"), True, True),
    "pause abort, caches kept": (lambda c: pause_and_resume(c, "abort", False), True, True),
    "sleep 0": (lambda c: sleep_and_wake(c, 0), True, True),
    "sleep 1": (lambda c: sleep_and_wake(c, 1), False, False),
    "sleep 2": (lambda c: sleep_and_wake(c, 2), False, False),
    "reset_mm_cache": (lambda c: c.reset_mm_cache(), False, True),
    "reset_encoder_cache": (reset_encoder_cache, True, True),
    "reset_prefix_cache": (lambda c: c.reset_prefix_cache(), True, False),
    "reload": (reload, False, False),
    "label": (label, True, True),
    "abort all": (lambda c: c.abort_all(), True, True),
}


@pytest.mark.parametrize("name", CALLS)
async def test_which_caches_a_call_empties(connection, control, vllm_server, image, name):
    """The table of `caches`'s docstring."""
    call, keeps_pixels, keeps_prompts = CALLS[name]
    control.model_dir = vllm_server.model_dir
    prompt = np.random.default_rng(next(_made)).integers(0, 250, 300).tolist()  # two blocks of 128, and more

    assert (await request_image(connection, image, data=True))[0] == 200
    expected = await request_image(connection, image, data=False)
    assert expected[0] == 200
    await generated(connection, prompt)
    await call(control)

    hits = (await control.metrics()).total("vllm:prefix_cache_hits_total")
    await generated(connection, prompt)
    assert ((await control.metrics()).total("vllm:prefix_cache_hits_total") > hits) == keeps_prompts
    status, after = await request_image(connection, image, data=False)
    assert status == (200 if keeps_pixels else 500)
    if not keeps_pixels:
        status, after = await request_image(connection, image, data=True)
    assert status == 200
    np.testing.assert_allclose(after, expected[1], atol=1e-5)


async def test_a_prefix_cache_in_use_is_not_reset_and_that_is_an_error(connection, control):
    running = await in_flight(connection, tokens=3500)
    with pytest.raises(ServerError, match="requests hold blocks"):
        await control.reset_prefix_cache()
    with pytest.raises(EngineError, match="pause first"):
        await control.reset_encoder_cache()
    with pytest.raises(EngineError, match="requests run"):
        await control.reset_prefix_cache(preempt=True)
    assert len((await running)["token_ids"]) == 3500
    await control.reset_prefix_cache()


# Pauses.


async def test_pause_abort_ends_running_requests_with_the_tokens_they_have(connection, control, vllm_server):
    running = await in_flight(connection)
    await control.pause("abort")
    ended = await asyncio.wait_for(running, LONGEST_SECONDS)
    assert ended["finish_reason"] == "abort"
    assert 0 < len(ended["token_ids"]) < 3500
    assert await control.is_paused()
    assert not await control.is_sleeping()  # vLLM's own route returns true
    assert vllm_server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    await control.resume()
    assert not await control.is_paused()


async def test_pause_wait_returns_when_running_requests_are_finished(connection, control):
    running = await in_flight(connection, tokens=1500)
    await control.pause("wait")
    ended = await asyncio.wait_for(running, LONGEST_SECONDS)
    assert (ended["finish_reason"], len(ended["token_ids"])) == ("length", 1500)
    await control.resume()


@pytest.mark.parametrize(
    ("vllm_server", "clear_cache"),
    [("float32", None), ("text", None), ("text", True)],
    indirect=["vllm_server"],
    scope="session",  # else pytest stops the server after this test
)
async def test_pause_keep_freezes_requests_and_their_tokens_are_labelled_with_their_weights(
    connection, control, vllm_server, restored, clear_cache
):
    undisturbed = await generated(connection, tokens=1500)
    running = await in_flight(connection, tokens=1500)
    await control.pause("keep", clear_cache=clear_cache)
    await control.update_weight_version("later")
    assert await control.served_version() == "later"
    await vllm_server.generates_nothing(running)
    await control.resume()
    ended = await running
    first, then = ended["weight_versions"]
    assert (first["version"], first["start"], then["version"], then["end"]) == ("default", 0, "later", 1500)
    assert first["end"] == then["start"]
    assert ended["token_ids"] == undisturbed["token_ids"]
    np.testing.assert_allclose(logprobs(ended), logprobs(undisturbed), atol=1e-4)


async def test_a_request_to_a_paused_server_waits(connection, control, vllm_server):
    await control.pause()
    waiting = asyncio.ensure_future(generated(connection))
    await vllm_server.generates_nothing(waiting)
    await control.resume()
    assert (await waiting)["finish_reason"] == "length"


# Sleep. On a CPU no memory is freed, but the server keeps the same state.


async def test_a_sleeping_server_is_woken_and_not_resumed(connection, control, vllm_server):
    await control.sleep(1)
    assert await control.is_sleeping()
    with pytest.raises(EngineError, match="level 1"):
        await control.resume()
    waiting = asyncio.ensure_future(generated(connection))
    await vllm_server.generates_nothing(waiting)
    await control.wake_up()
    await waiting
    assert not await control.is_sleeping()


async def test_another_process_sees_that_the_weights_were_dropped(connection, control, vllm_server):
    await control.sleep(2)
    stranger = ServerControl(connection, control._capabilities)
    try:
        with pytest.raises(EngineError, match="weights were dropped"):
            await stranger.wake_up()
        await stranger.wake_up(["weights"])
        await stranger.update_weights(vllm_server.model_dir, "default")
        await stranger.wake_up(["kv_cache"])
        assert not await stranger.is_sleeping()
    finally:
        vllm_server.http.post("/wake_up")


# Aborts.


async def test_an_abort_ends_the_named_request_and_no_other(connection, control, vllm_server):
    running = await in_flight(connection, request_id="named")
    beside = asyncio.ensure_future(generated(connection, tokens=1500, request_id="beside"))
    await control.abort([])
    await control.abort(["nobody"])
    before = (await vllm_server.metrics()).total(GENERATED)
    await vllm_server.until(lambda now: now.running == 2 and now.total(GENERATED) > before, during=beside)
    assert not running.done()
    await control.abort(["named"])
    assert (await asyncio.wait_for(running, LONGEST_SECONDS))["finish_reason"] == "abort"
    assert (await beside)["finish_reason"] == "length"


async def test_abort_all_returns_the_number_of_requests(connection, control):
    running = [await in_flight(connection, request_id=f"r{each}") for each in range(2)]
    await control.abort_all()
    assert {(await request)["finish_reason"] for request in running} == {"abort"}


# Weights.


async def test_new_weights_change_log_probabilities_and_the_first_weights_restore_them_exactly(
    connection, control, vllm_server, image, other, restored
):
    before = await generated(connection, tokens=12), await request_image(connection, image, data=True)
    await control.update_weights(other, "other")
    during = await generated(connection, tokens=12), await request_image(connection, image, data=True)
    assert not await control.is_paused()
    await control.update_weights(vllm_server.model_dir, "default")
    after = await generated(connection, tokens=12), await request_image(connection, image, data=True)

    assert during[0]["weight_versions"] == [{"version": "other", "start": 0, "end": 12}]
    assert not np.allclose(logprobs(before[0]), logprobs(during[0]), atol=1e-2)
    assert not np.allclose(before[1][1], during[1][1], atol=1e-2)
    assert (after[0]["token_ids"], logprobs(after[0])) == (before[0]["token_ids"], logprobs(before[0]))
    assert after[1] == before[1]


async def test_a_delta_and_one_that_changes_it_give_the_log_probabilities_of_the_whole_checkpoint(
    connection, control, vllm_server, image, tmp_path, restored
):
    """Of a layer a projection, of another the vision tower's; the embeddings, which are the output layer too."""
    base = origin = vllm_server.model_dir
    version = "default"
    for number, changed in enumerate(
        (
            r"layers\.1\.self_attn\.k_proj|blocks\.0\.attn\.qkv\.weight|embed_tokens|lm_head",
            r"layers\.1\.(self_attn\.[kq]_proj|mlp)|layers\.0\.mlp",
        )
    ):
        whole, new = tmp_path / f"whole-{number}", {}
        shutil.copytree(base if number == 0 else tmp_path / "whole-0", whole)
        for path in whole.glob("*.safetensors"):
            tensors = load_file(path)
            for name in filter(re.compile(changed).search, tensors):
                tensors[name][number::7] *= 1.5
                new[name] = tensors[name]
            save_file(tensors, path, metadata={"format": "pt"})
        assert len(new) > 3
        write_weight_delta(new, tmp_path / f"delta-{number}", base=version, base_directory=origin)
        version = f"delta-{number}"
        origin = tmp_path / version
    seen = {}
    for name in ("default", "delta-0", "delta-1", "whole-0", "whole-1", "default"):
        await control.update_weights(base if name == "default" else tmp_path / name, name)
        seen[name] = (await request_image(connection, image, data=True))[1], logprobs(await generated(connection))
    assert seen["delta-0"] == seen["whole-0"] != seen["default"]
    assert seen["delta-1"] == seen["whole-1"] != seen["delta-0"]


@pytest.mark.parametrize("vllm_server", ["text"], indirect=True)
async def test_preempt_puts_a_running_request_of_text_back_into_the_queue(connection, control):
    running = await in_flight(connection, tokens=1500)
    await control.reset_prefix_cache(preempt=True)
    assert len((await running)["token_ids"]) == 1500


@pytest.mark.parametrize("vllm_server", ["text"], indirect=True)
async def test_an_update_under_a_kept_request_computes_its_cache_again(
    connection, control, vllm_server, other, restored
):
    """Otherwise its later tokens would come from new weights with the cache of old weights: from no policy."""
    running = await in_flight(connection, tokens=1500)
    await control.update_weights(other, "other", "keep")
    ended = await running
    split = ended["weight_versions"][0]["end"]
    assert [span["version"] for span in ended["weight_versions"]] == ["default", "other"]
    again = await generated(connection, ids=[5, 6, 7, *ended["token_ids"][:split]], tokens=1500 - split)
    await control.update_weights(vllm_server.model_dir, "default")
    assert again["token_ids"] == ended["token_ids"][split:]
    np.testing.assert_allclose(logprobs(again), logprobs(ended)[split:], atol=1e-4)


async def test_the_planted_fault_vllm_loads_a_checkpoint_that_lacks_a_tensor_without_an_error(
    connection, control, vllm_server, tmp_path
):
    """The reason for the check of the files: vLLM returns 200 and generates garbage from then on."""
    vllm_server.restartable()
    before = await generated(connection)
    bad = shutil.copytree(vllm_server.model_dir, tmp_path / "bad")
    weights = load_file(bad / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.0.mlp.gate_proj.weight"))
    save_file({n: t for n, t in weights.items() if n != name}, bad / "model.safetensors", metadata={"format": "pt"})
    await control.update_weights(bad, "bad", check=False)
    assert not np.allclose(logprobs(await generated(connection)), logprobs(before), atol=0.1)
    # The memory of the missing tensor may hold NaN, which then stays in the memory of the KV cache, also under the
    # right weights: only another process is sound.
    await asyncio.to_thread(vllm_server.restart)
    await control.update_weights(vllm_server.model_dir, "default")
    assert logprobs(await generated(connection)) == logprobs(before)


async def test_after_a_directory_that_cannot_be_read_the_previous_weights_are_loaded_again(connection, control):
    before = await generated(connection)
    with pytest.raises(WeightUpdateError, match="loaded again; the server runs with them"):
        await control.update_weights("/no/such/directory", "never", check=False)
    assert await generated(connection) == before
    assert await control.served_version() == "default"


async def test_partly_loaded_weights_leave_a_paused_server_and_would_have_killed_it(
    connection, control, vllm_server, tmp_path
):
    vllm_server.restartable()
    bad = shutil.copytree(vllm_server.model_dir, tmp_path / "bad")
    weights = load_file(bad / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.0.input_layernorm.weight"))
    save_file({**weights, name: weights[name][:-1].copy()}, bad / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightUpdateError, match="left paused"):
        await control.update_weights(bad, "bad", check=False)
    assert await control.is_paused()
    assert await control.health()  # vLLM reports that it is healthy
    with pytest.raises(EngineError, match="kill the server"):
        await control.resume()
    # What a bare /resume would have done:
    vllm_server.http.post("/resume")
    reply = vllm_server.http.post(GENERATE, json={"token_ids": [5], "sampling_params": {"max_tokens": 1}})
    assert reply.status_code == 500
    await vllm_server.until_dead()
    assert not await control.health()
    await asyncio.to_thread(vllm_server.restart)
    assert (await generated(connection))["finish_reason"] == "length"
    await control.update_weights(vllm_server.model_dir, "default")  # allowed: it is another process


async def test_the_bare_reload_route_makes_vllm_die_of_the_next_known_image(connection, control, vllm_server, image):
    vllm_server.restartable()
    expected = await request_image(connection, image, data=True)
    await reload_through(control, vllm_server.model_dir)
    assert await request_image(connection, image, data=True) == expected
    arguments = {"weights_path": str(vllm_server.model_dir)}
    reply = vllm_server.http.post("/collective_rpc", json={"method": "reload_weights", "kwargs": arguments})
    assert reply.status_code == 200
    status, _ = await request_image(connection, image, data=False)
    assert status == 500
    await vllm_server.until_dead()
    await asyncio.to_thread(vllm_server.restart)


async def reload_through(control, directory):
    await control.pause()
    await control.update_weights(directory, "default")
    await control.resume()


# Monitoring.


async def test_a_running_request_is_counted(connection, control, vllm_server):
    assert await control.health()
    before = await control.metrics()
    assert (before.running, before.waiting) == (0, 0)
    running = await in_flight(connection, tokens=3500)
    await vllm_server.until(lambda metrics: metrics.running == 1, during=running)  # the count lags
    during = await control.metrics()
    assert 0 < during.total("vllm:kv_cache_usage_perc") < 1
    await running
    after = await control.metrics()
    for name, tokens in (("vllm:generation_tokens_total", 3500), ("vllm:prompt_tokens_total", 3)):
        assert after.total(name) - before.total(name) == tokens
    assert after.sleep_level == 0
