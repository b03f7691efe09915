"""`VLLMEngine` against a real server: media sent once, cleared caches, pauses, aborts, new weights, a killed server."""

import asyncio

import numpy as np
import pytest
from make_checkpoint import make_checkpoint
from vllm_server import GENERATED, LONGEST_SECONDS

from rollouts import FinishReason, GenerateRequest, SamplingParams
from rollouts.engines.vllm import HttpLimits, VLLMEngine
from rollouts.errors import ServerUnreachableError, WeightUpdateError

LONG = 3500  # tokens: several seconds, more than the server takes for the call that follows
EVERY_FRONTEND = pytest.mark.parametrize("vllm_server", ["float32", "rust", "rust-closed"], indirect=True)
_made = iter(range(10**6))


@pytest.fixture
async def labelled_back(engine):
    """Restore the weight version that the server was started with."""
    yield
    await engine.control.update_weight_version("default")


def image(seed=None):
    """Noise that no other test uses, unless a seed is given."""
    seed = 1_000_000 + next(_made) if seed is None else seed
    return np.random.default_rng(seed).integers(0, 256, (64, 80, 3), dtype=np.uint8)


def prompt(renderer, *images, text="What is it?"):
    parts = [{"type": "image", "image": pixels} for pixels in images]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return renderer.render([message], add_generation_prompt=True)


def request_for(rendered, **sampling):
    more = {name: sampling.pop(name) for name in ("prompt_logprobs", "session_id", "request_id") if name in sampling}
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return GenerateRequest(
        rendered.token_ids,
        params,
        rendered.multi_modal_data,
        placeholder_token_ids=rendered.placeholder_token_ids,
        **more,
    )


def long_request(rendered, **more):
    """A request that runs for seconds, long enough to pause or abort it."""
    return request_for(rendered, max_tokens=LONG, temperature=1.0, seed=1, extra={"ignore_eos": True}, **more)


class Wire:
    """Counts the bytes of the generate requests that an engine sends."""

    def __init__(self, engine, monkeypatch):
        self.bodies = []
        connection = engine._connection
        request, stream = connection.request, connection.stream

        async def counted_request(method, path, *, body=None, **more):
            self._count(path, body)
            return await request(method, path, body=body, **more)

        def counted_stream(path, *, body, **more):
            self._count(path, body)
            return stream(path, body=body, **more)

        monkeypatch.setattr(connection, "request", counted_request)
        monkeypatch.setattr(connection, "stream", counted_stream)

    def _count(self, path, body):
        if path.endswith("/generate") and body:
            self.bodies.append(sum(memoryview(segment).nbytes for segment in body))

    @property
    def with_pixels(self):
        return sum(size > 20_000 for size in self.bodies)


async def test_an_image_travels_once_and_then_by_name_with_the_same_answer(engine, renderer, monkeypatch):
    rendered = prompt(renderer, image())
    wire = Wire(engine, monkeypatch)
    first, second = [(await engine.generate(request_for(rendered))).completions[0] for _ in range(2)]
    assert wire.with_pixels == 1
    assert wire.bodies[1] < 2_000
    assert first.token_ids.tolist() == second.token_ids.tolist()
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-5)


async def test_of_eight_concurrent_first_uses_one_carries_the_image(engine, renderer, monkeypatch):
    rendered = prompt(renderer, image())
    wire = Wire(engine, monkeypatch)
    results = await asyncio.gather(*(engine.generate(request_for(rendered)) for _ in range(8)))
    assert wire.with_pixels == 1
    assert len(wire.bodies) == 8
    assert len({tuple(result.completions[0].token_ids.tolist()) for result in results}) == 1


@pytest.mark.parametrize("route", ["/reset_mm_cache", "/pause?mode=abort"])
async def test_an_image_is_sent_again_after_another_client_made_the_server_drop_it(
    engine, renderer, vllm_server, monkeypatch, route
):
    rendered = prompt(renderer, image())
    before = await engine.generate(request_for(rendered))
    for call in (route, *(["/resume"] if "pause" in route else []), "/reset_prefix_cache"):
        vllm_server.http.post(call).raise_for_status()
    wire = Wire(engine, monkeypatch)
    after = await engine.generate(request_for(rendered))
    assert after.completions[0].token_ids.tolist() == before.completions[0].token_ids.tolist()
    assert wire.with_pixels <= 1


async def test_content_parts_and_features_give_the_same_log_probabilities(vllm_server, renderer):
    rendered = prompt(renderer, image(), image())
    logprobs = []
    for media in ("features", "content_parts"):
        async with VLLMEngine(vllm_server.base_url, media=media) as engine:
            # With the data, and by name.
            results = [await engine.generate(request_for(rendered)) for _ in range(2)]
            logprobs += [result.completions[0].logprobs for result in results]
    for others in logprobs[1:]:
        np.testing.assert_allclose(logprobs[0], others, atol=1e-5)


@EVERY_FRONTEND
async def test_n_samples_are_those_of_n_requests_with_following_seeds(engine, renderer):
    rendered = prompt(renderer, image())
    drawn = (await engine.generate(request_for(rendered, n=3, temperature=1.0, seed=3))).completions
    assert [completion.index for completion in drawn] == [0, 1, 2]
    singles = [await engine.generate(request_for(rendered, temperature=1.0, seed=3 + index)) for index in range(3)]
    assert [each.token_ids.tolist() for each in drawn] == [
        single.completions[0].token_ids.tolist() for single in singles
    ]
    assert len({tuple(each.token_ids.tolist()) for each in drawn}) == 3


@EVERY_FRONTEND
async def test_prompt_log_probabilities_belong_to_the_tokens_of_the_prompt(engine, renderer):
    rendered = prompt(renderer, text="abcabcabc")
    result = await engine.generate(request_for(rendered, n=2, temperature=1.0, prompt_logprobs=True))
    assert result.prompt_logprobs.shape == (len(rendered),)
    assert np.isnan(result.prompt_logprobs[0])
    assert np.all(result.prompt_logprobs[1:] < 0)


async def test_streamed_tokens_are_the_tokens_of_the_whole_response(engine, renderer):
    rendered = prompt(renderer, image())
    options = {"max_tokens": 300, "extra": {"ignore_eos": True}}
    whole = (await engine.generate(request_for(rendered, **options))).completions[0]
    deltas = []
    await engine.generate(request_for(rendered, **options), deltas.append)
    assert len(deltas) > 5  # the server joins tokens that it has not sent yet
    assert np.concatenate([delta.token_ids for delta in deltas]).tolist() == whole.token_ids.tolist()
    np.testing.assert_allclose(np.concatenate([delta.logprobs for delta in deltas]), whole.logprobs, atol=1e-5)


async def test_a_sampled_placeholder_token_is_text_to_the_server_too(engine, renderer):
    """After an image, a sampled placeholder token changes the next tokens as any text token does."""
    rendered = prompt(renderer, image())
    pad = rendered.placeholder_token_ids["image"]
    ids = [*rendered.token_ids, pad, pad]
    request = GenerateRequest(
        ids,
        SamplingParams(max_tokens=4, temperature=0.0),
        rendered.multi_modal_data,
        sampled=[(len(rendered), len(ids))],
    )
    (completion,) = (await engine.generate(request)).completions
    assert np.allclose(
        completion.logprobs, reference_logprobs(ids, rendered, completion, renderer.tokenizer.model), atol=1e-4
    )


def reference_logprobs(ids, rendered, completion, model_dir):
    """Log-probabilities of a completion by transformers, with placeholders given by range."""
    import torch
    from transformers import AutoModelForImageTextToText

    from rollouts.training import TrainingBatch, TrainingSample, token_logprobs

    tokens = np.array([*ids, *completion.token_ids.tolist()], dtype=np.int32)
    mask = np.arange(len(tokens)) >= len(ids)
    sample = TrainingSample(
        tokens,
        mask,
        np.where(mask, -1.0, 0.0).astype(np.float32),
        np.zeros(len(tokens), np.float32),
        tuple(rendered.multi_modal_data.items_with_ranges()),
    )
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        logprobs = token_logprobs(model, TrainingBatch.from_samples([sample], pad_id=0))
    return logprobs[0].numpy()[mask]


# Cancelling, pausing, aborting.


async def in_flight(server, engine, request):
    """Start a call and return it once the server has generated a token of each sample."""
    # The Rust frontend counts the tokens that it receives: after the first one, all others at the end.
    return await server.in_flight(lambda: engine.generate(request), request.sampling.n, tokens_each=1)


@EVERY_FRONTEND
@pytest.mark.parametrize("n", [1, 2])
async def test_cancelling_a_call_frees_its_place_on_the_server(engine, renderer, vllm_server, n):
    before = (await vllm_server.metrics()).total(GENERATED)
    call = await in_flight(vllm_server, engine, long_request(prompt(renderer, image()), n=n))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await vllm_server.until(lambda metrics: metrics.running == 0)
    assert (await vllm_server.metrics()).total(GENERATED) - before < n * LONG  # it was not generated to the end


@EVERY_FRONTEND
@pytest.mark.parametrize("n", [1, 2])
async def test_an_aborted_request_returns_the_tokens_it_has_and_runs_no_longer(engine, renderer, vllm_server, n):
    request = long_request(prompt(renderer, image()), n=n)
    call = await in_flight(vllm_server, engine, request)
    await engine.abort([request.request_id])
    for completion in (await call).completions:
        assert completion.finish_reason is FinishReason.ABORT
        assert 0 < len(completion.token_ids) < LONG
    await vllm_server.until(lambda metrics: metrics.running == 0)


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_a_completion_cut_by_a_pause_continues_after_it_with_the_version_that_was_set_meanwhile(
    engine, renderer, vllm_server, labelled_back, mode
):
    request = request_for(prompt(renderer, image()), max_tokens=LONG, extra={"ignore_eos": True})
    (undisturbed,) = (await engine.generate(request)).completions
    deltas = []
    started = asyncio.Event()

    def listen(delta):
        deltas.append(delta)
        if len(deltas) > 20:
            started.set()

    playing = asyncio.ensure_future(engine.generate(request, listen))
    await started.wait()
    await engine.control.pause(mode)
    await engine.control.update_weight_version("newer")
    await vllm_server.generates_nothing(playing)
    await engine.control.resume()
    (completion,) = (await playing).completions
    ids = np.concatenate([delta.token_ids for delta in deltas])
    assert ids.tolist() == completion.token_ids.tolist() == undisturbed.token_ids.tolist()
    logprobs = np.concatenate([delta.logprobs for delta in deltas])
    np.testing.assert_allclose(logprobs, undisturbed.logprobs, atol=1e-4)
    old, new = completion.weight_spans
    assert (old.version, new.version) == ("default", "newer")
    assert (old.start, old.end, new.end) == (0, new.start, LONG)
    assert old.end > 0


async def test_the_planted_fault_vllm_loads_a_tied_checkpoint_without_its_output_layer_wrongly(
    engine, renderer, vllm_server, tmp_path
):
    other = make_checkpoint(tmp_path / "other", "float32", seed=8)
    (other / "lm_head.safetensors").unlink()
    with pytest.raises(WeightUpdateError, match="write_tied_head"):
        await engine.control.update_weights(other, "other")
    await engine.control.update_weights(other, "other", check=False)
    rendered = prompt(renderer, image())
    (completion,) = (await engine.generate(request_for(rendered))).completions
    expected = reference_logprobs(rendered.token_ids, rendered, completion, other)
    assert np.abs(completion.logprobs - expected).max() > 0.1  # HTTP 200 from a model that was never trained
    await engine.control.update_weights(vllm_server.model_dir, "default")


async def test_killing_a_server_ends_the_call_with_a_typed_error(vllm_server, renderer):
    limits = HttpLimits(retries=2, backoff_seconds=0.05, longest_backoff_seconds=0.1)
    async with VLLMEngine(vllm_server.base_url, limits=limits) as engine:
        call = await in_flight(vllm_server, engine, long_request(prompt(renderer, image())))
        await asyncio.to_thread(vllm_server.kill)
        with pytest.raises(ServerUnreachableError):
            async with asyncio.timeout(LONGEST_SECONDS):
                await call


async def test_a_call_is_completed_after_its_server_was_killed_and_restarted(vllm_server, renderer):
    if not vllm_server.ours:
        pytest.skip("the server is not ours to kill")
    limits = HttpLimits(retries=300, backoff_seconds=0.5, longest_backoff_seconds=2)
    async with VLLMEngine(vllm_server.base_url, limits=limits) as engine:
        rendered = prompt(renderer, image())
        await engine.generate(request_for(rendered))  # the server has the image, and loses it when it is killed
        call = await in_flight(vllm_server, engine, long_request(rendered))
        await asyncio.to_thread(vllm_server.kill)
        await asyncio.to_thread(vllm_server.restart)
        async with asyncio.timeout(LONGEST_SECONDS):
            (completion,) = (await call).completions
    assert len(completion.token_ids) == LONG
