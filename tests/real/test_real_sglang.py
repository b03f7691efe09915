"""`SGLangEngine` against a real SGLang, whose forward runs in float32 on the CPU."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from images import png
from make_checkpoint import make_checkpoint
from PIL import Image
from reference import Reference
from sglang_server import SGLangServer, sglang_venv

from renderers import MultiModalData, RenderedTokens, load_renderer
from rollouts import FinishReason, GenerateRequest, GenerateResult, SamplingParams, SGLangEngine, WeightSpan
from rollouts.cli.doctor.command import run_checks
from rollouts.engines.protocol import TokenDelta
from rollouts.errors import CapabilityError, InvalidRequestError
from rollouts.observability.engine_load import server_load

_LONG = SamplingParams(max_tokens=400, extra={"ignore_eos": True})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sglang_venv()
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    server = SGLangServer(checkpoint, tmp_path_factory.mktemp("sglang") / "log")
    server.until_healthy()
    yield server
    server.stop()


@pytest.fixture
async def engine(server: SGLangServer) -> AsyncIterator[SGLangEngine]:
    async with SGLangEngine(server.base_url) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def rendered(checkpoint: Path) -> RenderedTokens:
    """Two images, and text that a tokenizer would not write as these ids: `<think>` in single bytes."""
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in ((48, 64), (32, 96))]
    content = [
        {"type": "text", "text": "look "},
        {"type": "image", "image": images[0]},
        {"type": "text", "text": " and <think>"},
        {"type": "image", "image": images[1]},
    ]
    return load_renderer(checkpoint).render([{"role": "user", "content": content}], add_generation_prompt=True)


def _request(rendered: RenderedTokens, sampling: SamplingParams, **options: object) -> GenerateRequest:
    return GenerateRequest(
        rendered.token_ids,
        sampling,
        rendered.multi_modal_data,
        placeholder_token_ids=rendered.placeholder_token_ids,
        **options,  # type: ignore[arg-type]
    )


def _mismatch(reference: Reference, rendered: RenderedTokens, result: GenerateResult) -> float:
    """Up to the first sampled placeholder, which transformers' own forward takes for an image; SGLang has no seeds."""
    found, media_tokens = [0.0], set(rendered.placeholder_token_ids.values())
    for each in result.completions:
        sampled = each.token_ids.tolist()
        placeholders = [place for place, token in enumerate(sampled) if token in media_tokens]
        if count := min([len(sampled), *placeholders]):
            difference = reference.logprobs(rendered, sampled[:count]) - each.logprobs[:count]
            found.append(float(np.abs(difference).max()))
    return max(found)


async def test_a_prompt_with_images_keeps_its_ids_and_its_log_probabilities(
    engine: SGLangEngine, reference: Reference, rendered: RenderedTokens
) -> None:
    result = await engine.generate(_request(rendered, SamplingParams(max_tokens=8, n=3), prompt_logprobs=True))
    assert _mismatch(reference, rendered, result) < 1e-4
    assert result.prompt_logprobs is not None
    text = len(rendered.token_ids) - 10  # behind the images
    expected = reference.logprobs(_cut(rendered, text), rendered.token_ids[text:])
    np.testing.assert_allclose(result.prompt_logprobs[text:], expected, atol=1e-4)
    sampling = SamplingParams(max_tokens=4, temperature=0, top_logprobs=3)
    greedy = await engine.generate(_request(rendered, sampling, prompt_top_logprobs=2))
    assert _mismatch(reference, rendered, greedy) < 1e-4
    (completion,), top = greedy.completions, greedy.prompt_top_logprobs
    assert completion.top_logprobs is not None
    assert top is not None
    np.testing.assert_array_equal(completion.top_logprobs.token_ids[:, 0], completion.token_ids)
    likeliest = reference.logprobs(_cut(rendered, text), [*rendered.token_ids[text:-1], top.token_ids[-1, 0]])[-1]
    assert abs(top.logprobs[-1, 0] - likeliest) < 1e-4


def _cut(rendered: RenderedTokens, end: int) -> RenderedTokens:
    return replace(rendered, token_ids=rendered.token_ids[:end])


async def test_a_stream_reports_the_tokens_of_its_result(
    engine: SGLangEngine, reference: Reference, rendered: RenderedTokens
) -> None:
    heard: list[TokenDelta] = []
    request = _request(rendered, SamplingParams(max_tokens=12, n=2, top_logprobs=2))
    result = await engine.generate(request, heard.append)
    assert len(heard) > len(result.completions)
    assert _mismatch(reference, rendered, result) < 1e-4
    for completion in result.completions:
        np.testing.assert_array_equal(_joined(heard, completion.index), completion.token_ids)
        assert completion.top_logprobs is not None
        assert completion.top_logprobs.token_ids.shape == (len(completion.token_ids), 2)


async def test_the_ids_that_top_k_with_top_p_kept_are_known(engine: SGLangEngine, rendered: RenderedTokens) -> None:
    sampling = SamplingParams(max_tokens=12, top_k=8, top_p=0.03, top_logprobs=8)
    for listen in (None, lambda delta: None):
        (completion,) = (await engine.generate(_request(rendered, sampling), listen)).completions
        assert completion.sampling_masks is not None
        assert completion.top_logprobs is not None
        assert any(len(mask) < sampling.top_k for mask in completion.sampling_masks)
        for token, mask, top in zip(
            completion.token_ids, completion.sampling_masks, completion.top_logprobs.token_ids, strict=True
        ):
            assert token in mask
            assert set(mask) == set(top[: len(mask)])


async def test_another_image_gives_other_log_probabilities(
    engine: SGLangEngine, reference: Reference, rendered: RenderedTokens, checkpoint: Path
) -> None:
    other = load_renderer(checkpoint).render(
        [{"role": "user", "content": [{"type": "image", "image": png("black", (64, 48))}]}], add_generation_prompt=True
    )
    result = await engine.generate(_request(other, SamplingParams(max_tokens=4)))
    assert _mismatch(reference, other, result) < 1e-4
    media = (rendered.multi_modal_data, other.multi_modal_data)
    (first, _), (_, placeholder) = (each.items_with_ranges()[0] for each in media if each is not None)
    shown = replace(other, multi_modal_data=MultiModalData.from_items([(first, placeholder)]))
    assert _mismatch(reference, shown, result) > 1e-3


async def test_a_stop_token_ends_a_completion_and_is_part_of_it(engine: SGLangEngine, rendered: RenderedTokens) -> None:
    stops = tuple(range(100))
    result = await engine.generate(
        GenerateRequest(rendered.token_ids[:8], SamplingParams(max_tokens=200, stop_token_ids=stops))
    )
    (completion,) = result.completions
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_token_id == completion.token_ids[-1]
    assert completion.stop_token_id in {*stops, 256, 258}  # the model's ends of a text and of a message stop, too


async def test_the_context_ends_a_completion_by_its_length(engine: SGLangEngine, rendered: RenderedTokens) -> None:
    ids = (rendered.token_ids[:8] * 512)[:4080]
    (completion,) = (await engine.generate(GenerateRequest(ids, _LONG))).completions
    assert completion.finish_reason is FinishReason.LENGTH
    assert 1 <= len(completion.token_ids) <= 4096 - 4080  # SGLang keeps a few tokens for itself


async def test_a_completion_that_a_pause_cuts_off_is_continued_with_the_new_weights(
    engine: SGLangEngine, server: SGLangServer, rendered: RenderedTokens
) -> None:
    def request() -> GenerateRequest:
        """Without images, because a model with random weights may sample their token, which could not be continued."""
        return GenerateRequest(rendered.token_ids[:8], _LONG)

    for in_flight in ("abort", "keep"):
        before = await engine.served_version()
        heard: list[TokenDelta] = []
        sampling = asyncio.create_task(engine.generate(request(), heard.append))
        while not heard and not sampling.done():
            await asyncio.sleep(0.02)
        await engine.update_weights(server.model_dir, f"by {in_flight}", in_flight=in_flight)  # type: ignore[arg-type]
        (completion,) = (await sampling).completions
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(completion.token_ids) == _LONG.max_tokens
        np.testing.assert_array_equal(_joined(heard), completion.token_ids)
        assert completion.weight_spans[-1].version == f"by {in_flight}"
        assert {span.version for span in completion.weight_spans} <= {before, f"by {in_flight}"}
    running = asyncio.create_task(engine.generate(request()))
    await _until_running(engine, running)
    await engine.update_weights(server.model_dir, "by wait", in_flight="wait")
    assert (await running).completions[0].weight_spans == (WeightSpan("by keep", 0, _LONG.max_tokens),)
    assert await engine.served_version() == engine.weight_version == "by wait"


def _joined(heard: list[TokenDelta], index: int = 0) -> np.ndarray:
    return np.concatenate([delta.token_ids for delta in heard if delta.index == index])


async def _until_running(engine: SGLangEngine, call: asyncio.Task[GenerateResult]) -> None:
    """Also until the call has ended: a server that is asked on a busy machine may never show it as running."""
    while not call.done() and not (await engine.control.metrics()).total("sglang:num_running_reqs"):
        await asyncio.sleep(0.02)


async def test_aborted_and_cancelled_requests_end_on_the_server(engine: SGLangEngine, rendered: RenderedTokens) -> None:
    sampling = replace(_LONG, max_tokens=3000, n=2)
    aborted = asyncio.create_task(engine.generate(_request(rendered, sampling, request_id="aborted")))
    await _until_running(engine, aborted)
    await engine.abort(["aborted"])
    assert {each.finish_reason for each in (await aborted).completions} == {FinishReason.ABORT}
    cancelled = asyncio.create_task(engine.generate(_request(rendered, sampling)))
    await _until_running(engine, cancelled)
    cancelled.cancel()
    while (await engine.control.metrics()).total("sglang:num_running_reqs"):
        await asyncio.sleep(0.02)


async def test_what_the_probe_finds_out(engine: SGLangEngine, rendered: RenderedTokens) -> None:
    capabilities = await engine.capabilities()
    assert (capabilities.vocab_size, capabilities.max_model_len) == (288, 4096)
    assert capabilities.takes_images
    assert capabilities.returns_prompt
    assert capabilities.raw_logprobs is False
    with pytest.raises(CapabilityError, match="SGLANG_RETURN_ORIGINAL_LOGPROB=1"):
        await engine.generate(_request(rendered, SamplingParams(temperature=0.7)))
    with pytest.raises(CapabilityError, match="--enable-memory-saver"):
        await engine.control.sleep()
    with pytest.raises(CapabilityError, match="--enable-lora"):
        await engine.generate(_request(rendered, SamplingParams(), adapter="policy"))


async def test_an_image_token_in_text_is_refused_where_images_are(
    engine: SGLangEngine, server: SGLangServer, rendered: RenderedTokens
) -> None:
    """Without the check the server answers HTTP 500. In a prompt without images the token is text."""
    count = len(rendered.token_ids)
    sampled = replace(_request(rendered, SamplingParams(max_tokens=2)), prompt_ids=[*rendered.token_ids, 268])
    with pytest.raises(InvalidRequestError, match="sampled as text"):
        await engine.generate(replace(sampled, sampled=[(count, count + 1)]))
    text = GenerateRequest([*rendered.token_ids[:8], 268], SamplingParams(max_tokens=2), sampled=[(8, 9)])
    assert len((await engine.generate(text)).completions[0].token_ids) == 2
    assert server.is_healthy()


async def test_the_doctor_finds_no_failure(server: SGLangServer, checkpoint: Path) -> None:
    found = await run_checks(server.base_url, checkpoint)
    assert {name: each.seen for name, each in found.items() if each.outcome == "failed"} == {}
    for check in ("image request", "mismatch"):
        assert found[check].outcome == "ok", found[check]
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB=1" in found["log-probabilities"].cure


async def test_the_load_of_the_server_is_read(engine: SGLangEngine, rendered: RenderedTokens) -> None:
    await engine.generate(_request(rendered, SamplingParams(max_tokens=2)))
    load = server_load(await engine.control.metrics())
    assert load["engine_prefix_cache_queries"] >= len(rendered.token_ids)
    assert {"engine_requests_running", "engine_requests_waiting", "engine_kv_cache_usage_ratio"} <= load.keys()
