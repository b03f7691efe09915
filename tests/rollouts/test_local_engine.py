"""The embedded engine against transformers' own forward pass."""

import asyncio
import math
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

from renderers import MultiModalData, PlaceholderRange
from rollouts import FinishReason, GenerateRequest, SamplingParams
from rollouts.engines.local import LocalEngine
from rollouts.errors import (
    ArgumentError,
    EngineClosedError,
    EngineError,
    EngineFailedError,
    InvalidRequestError,
    OverlongPromptError,
    UnsupportedModelError,
    WeightUpdateError,
)
from rollouts.models import qwen3_vl

# An argument that a release of transformers calls deprecated is missing from a later one.
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")


@pytest.fixture
def engine(tiny_model_dir):
    return LocalEngine.from_pretrained(tiny_model_dir)


@pytest.fixture(scope="module")
def reference(tiny_model_dir):
    return AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


def test_loading_prints_no_progress_bar_and_leaves_the_setting_of_the_program(tiny_model_dir, capsys):
    enabled = logging.is_progress_bar_enabled()
    try:
        logging.enable_progress_bar()
        AutoModelForImageTextToText.from_pretrained(tiny_model_dir)
        assert "Loading weights" in capsys.readouterr().err  # what is turned off
        LocalEngine.from_pretrained(tiny_model_dir)
        assert capsys.readouterr().err == ""
        assert logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        LocalEngine.from_pretrained(tiny_model_dir)
        assert not logging.is_progress_bar_enabled()
    finally:
        (logging.enable_progress_bar if enabled else logging.disable_progress_bar)()


def noise(seed: int, height: int = 32, width: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def prompt(renderer, text="Which?", images=()):
    parts = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": text}]
    return renderer.render([{"role": "user", "content": parts}], add_generation_prompt=True)


def request(rendered, **sampling):
    sampling = {"max_tokens": 8, "seed": 0, **sampling}
    return GenerateRequest(rendered.token_ids, SamplingParams(**sampling), rendered.multi_modal_data)


def generate(engine, *requests):
    async def together():
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return asyncio.run(together())


def reference_logprobs(model, rendered, completion_ids):
    """log p of a completion by transformers' own forward, pixels by its own processor's arithmetic."""
    ids = torch.tensor([[*rendered.token_ids, *completion_ids]])
    types = torch.zeros_like(ids)
    inputs = {}
    placed = rendered.multi_modal_data.items_with_ranges()
    if placed:
        for _, where in placed:
            types[0, where.offset : where.end] = 1
        pixels = np.concatenate([item["pixel_values"] for item, _ in placed]).astype(np.float64) * (1 / 255)
        inputs["pixel_values"] = torch.from_numpy((pixels.astype(np.float32) - np.float32(0.5)) / np.float32(0.5))
        inputs["image_grid_thw"] = torch.from_numpy(np.stack([item["image_grid_thw"] for item, _ in placed]))
    with torch.inference_mode():
        logits = model(input_ids=ids, mm_token_type_ids=types, use_cache=False, **inputs).logits[0]
    start = len(rendered.token_ids)
    scored = torch.log_softmax(logits[start - 1 : -1], -1)
    return scored.gather(-1, ids[0, start:, None])[:, 0].numpy()


@pytest.mark.parametrize("sizes", [[], [(32, 32)], [(32, 32), (48, 80), (32, 32)]])
def test_reported_logprobs_are_those_of_transformers_own_forward(engine, renderer, reference, sizes):
    rendered = prompt(renderer, images=[noise(i, *size) for i, size in enumerate(sizes)])
    (result,) = generate(engine, request(rendered, max_tokens=24))
    (completion,) = result.completions

    expected = reference_logprobs(reference, rendered, completion.token_ids.tolist())
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
    assert completion.logprobs.dtype == np.float32
    assert completion.token_ids.dtype == np.int32


def test_logprobs_stay_right_in_a_batch_of_prompts_of_different_lengths(engine, renderer, reference):
    prompts = [
        prompt(renderer, "a"),
        prompt(renderer, "a much longer question than the others have", [noise(1, 64, 48)]),
        prompt(renderer, "b", [noise(2), noise(3)]),
    ]
    results = generate(engine, *(request(p, seed=i, max_tokens=12, n=2) for i, p in enumerate(prompts)))
    for rendered, result in zip(prompts, results, strict=True):
        for completion in result.completions:
            expected = reference_logprobs(reference, rendered, completion.token_ids.tolist())
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


def test_another_image_changes_the_logprobs(engine, renderer, reference):
    """The planted fault: scored with the wrong pixels, the comparison above must fail."""
    rendered, other = prompt(renderer, images=[noise(1)]), prompt(renderer, images=[noise(2)])
    (result,) = generate(engine, request(rendered))
    (completion,) = result.completions
    wrong = reference_logprobs(reference, other, completion.token_ids.tolist())
    assert np.abs(completion.logprobs - wrong).max() > 1e-3


def test_logprobs_are_raw_whatever_the_temperature(engine, renderer, reference):
    rendered = prompt(renderer)
    (result,) = generate(engine, request(rendered, temperature=0.3, top_k=5, top_p=0.9))
    (completion,) = result.completions
    expected = reference_logprobs(reference, rendered, completion.token_ids.tolist())
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


def test_a_seed_decides_a_completion_whatever_shares_the_batch(engine, renderer):
    rendered = prompt(renderer, images=[noise(1)])
    (alone,) = generate(engine, request(rendered, seed=5, n=2))
    together = generate(
        engine, *(request(prompt(renderer, "x" * i), seed=i) for i in range(6)), request(rendered, seed=5, n=2)
    )[-1]
    for one, other in zip(alone.completions, together.completions, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()


def test_temperature_zero_and_top_k_one_are_greedy(engine, renderer, reference):
    rendered = prompt(renderer)
    greedy, top_one = generate(engine, request(rendered, temperature=0), request(rendered, top_k=1, seed=9))
    ids = greedy.completions[0].token_ids.tolist()
    assert top_one.completions[0].token_ids.tolist() == ids
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([[*rendered.token_ids, *ids]]), use_cache=False).logits[0]
    assert logits[len(rendered.token_ids) - 1 : -1].argmax(-1).tolist() == ids


def test_generation_ends_behind_a_stop_token_which_is_part_of_the_ids(engine, renderer):
    rendered = prompt(renderer)
    (free,) = generate(engine, request(rendered, max_tokens=12))
    ids = free.completions[0].token_ids.tolist()
    assert free.completions[0].finish_reason is FinishReason.LENGTH
    stop = ids[4]
    (stopped,) = generate(engine, request(rendered, max_tokens=12, stop_token_ids=(stop, 2)))
    completion = stopped.completions[0]
    assert completion.token_ids.tolist() == ids[: ids.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_token_id) == (FinishReason.STOP, stop)


def test_a_batch_is_bounded_and_the_remaining_requests_wait(tiny_model_dir, renderer, monkeypatch):
    engine = LocalEngine.from_pretrained(tiny_model_dir, max_batch_rows=6)
    sizes = []
    run = engine._run
    monkeypatch.setattr(engine, "_run", lambda requests: (sizes.append(len(requests)), run(requests))[1])
    results = generate(engine, *(request(prompt(renderer), seed=i, n=2) for i in range(7)))
    assert sizes == [3, 3, 1]
    assert all(len(result.completions) == 2 for result in results)


def test_an_image_is_encoded_once_and_again_after_a_weight_update(engine, renderer, monkeypatch):
    encoded = []
    encode = qwen3_vl.vision_features
    monkeypatch.setattr(
        qwen3_vl, "vision_features", lambda model, items: (encoded.append(len(items)), encode(model, items))[1]
    )
    asked = [request(prompt(renderer, f"{i}", [noise(1), noise(2)]), seed=i) for i in range(4)]
    generate(engine, *asked)
    generate(engine, *asked)
    assert encoded == [2]
    weights = {name: p.detach().numpy().copy() for name, p in engine._model.named_parameters()}
    asyncio.run(engine.update_weights(weights, "1"))
    generate(engine, asked[0])
    assert encoded == [2, 2]


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit_change_nothing(engine, renderer, fault):
    rendered = prompt(renderer)
    (before,) = generate(engine, request(rendered))
    weights = {name: np.zeros(p.shape, np.float32) for name, p in engine._model.named_parameters()}
    last = list(weights)[-1]
    if fault == "shape":
        weights[last] = np.zeros((1, 2, 3), np.float32)
    else:
        value = weights.pop(last)
        if fault == "unknown":
            weights["no.such.parameter"] = value
    with pytest.raises(WeightUpdateError, match="nothing was changed"):
        asyncio.run(engine.update_weights(weights, "bad"))
    (after,) = generate(engine, request(rendered))
    assert before.completions[0].logprobs.tolist() == after.completions[0].logprobs.tolist()
    assert engine.weight_version == "0"


def test_the_state_dict_of_a_model_with_tied_weights_is_accepted(engine, renderer):
    state = {name: value.clone() for name, value in engine._model.state_dict().items()}
    assert {"lm_head.weight", "model.language_model.embed_tokens.weight"} <= state.keys(), "tied in this model"
    rendered = prompt(renderer)
    (before,) = generate(engine, request(rendered))
    asyncio.run(engine.update_weights({name: 2 * value for name, value in state.items()}, "doubled"))
    (doubled,) = generate(engine, request(rendered))
    asyncio.run(engine.update_weights(state, "as it was"))
    (after,) = generate(engine, request(rendered))
    assert doubled.completions[0].logprobs.tolist() != before.completions[0].logprobs.tolist()
    assert after.completions[0].logprobs.tolist() == before.completions[0].logprobs.tolist()


@pytest.mark.parametrize("name", ["lm_head.weight", "model.language_model.embed_tokens.weight"])
@pytest.mark.parametrize("convert", [lambda t: t.clone(), lambda t: t.numpy().copy()], ids=["tensors", "arrays"])
def test_one_name_of_a_tied_tensor_is_enough(engine, name, convert):
    state = {key: convert(value) for key, value in engine._model.state_dict().items() if key != name}
    asyncio.run(engine.update_weights(state, "1"))
    assert engine.weight_version == "1"


@pytest.mark.parametrize("convert", [lambda t: t.clone(), lambda t: t.numpy().copy()], ids=["tensors", "arrays"])
def test_tied_names_that_differ_are_refused_and_change_nothing(engine, renderer, convert):
    rendered = prompt(renderer)
    (before,) = generate(engine, request(rendered))
    state = {key: 2 * convert(value) for key, value in engine._model.state_dict().items()}
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(WeightUpdateError, match=r"lm_head.weight .*differ.*nothing was changed"):
        asyncio.run(engine.update_weights(state, "bad"))
    (after,) = generate(engine, request(rendered))
    assert after.completions[0].logprobs.tolist() == before.completions[0].logprobs.tolist()


@pytest.mark.parametrize("value", [None, [1.0], "x", np.array(["x"]), np.array([None])])
def test_weights_that_are_not_numbers_are_refused(engine, value):
    state = dict(engine._model.state_dict())
    state[next(reversed(state))] = value
    with pytest.raises(WeightUpdateError, match="nothing was changed"):
        asyncio.run(engine.update_weights(state, "bad"))


@pytest.mark.parametrize("convert", [lambda t: t.clone(), lambda t: t.numpy().copy()], ids=["tensors", "arrays"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.language_model.layers.0.mlp.up_proj.weight"])
def test_weights_of_a_training_that_failed_are_refused_and_change_nothing(engine, renderer, convert, value, name):
    rendered = prompt(renderer)
    (before,) = generate(engine, request(rendered))
    state = {key: 2 * convert(weight) for key, weight in engine._model.state_dict().items()}
    state[name][1, 2:4] = value
    with pytest.raises(WeightUpdateError, match=rf"{name} has 2 values that are NaN or infinite.*nothing was changed"):
        asyncio.run(engine.update_weights(state, "bad"))
    (after,) = generate(engine, request(rendered))
    assert after.completions[0].logprobs.tolist() == before.completions[0].logprobs.tolist()


@pytest.mark.parametrize("version", [3, "", None, "\ud800"], ids=repr)
def test_a_first_version_that_is_no_name_is_refused(tiny_model_dir, version):
    with pytest.raises(ArgumentError, match=r"^weight_version is "):
        LocalEngine.from_pretrained(tiny_model_dir, weight_version=version)


# What one request may ask for.


@pytest.mark.parametrize(("field", "words"), [("n", "at most 1024"), ("max_tokens", "at most 1048576")])
def test_a_request_for_a_billion_tokens_or_samples_is_refused_at_once(engine, renderer, field, words):
    with pytest.raises(InvalidRequestError, match=rf"{field} is 1000000000 .*{words}"):
        generate(engine, request(prompt(renderer), **{field: 10**9}))


def test_tokens_that_are_not_sampled_take_no_memory(engine, renderer):
    """As many tokens as a request may ask for, of which a stop token leaves few."""
    rendered = prompt(renderer)
    (free,) = generate(engine, request(rendered, max_tokens=3))
    stop = int(free.completions[0].token_ids[-1])
    tracemalloc.start()
    generate(engine, request(rendered, max_tokens=2**20, stop_token_ids=(stop,)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 2**20


def test_a_seed_below_zero_is_refused_and_does_not_fail_the_others_of_its_batch(engine, renderer):
    async def together():
        asked = [request(prompt(renderer), seed=-5), request(prompt(renderer), seed=5)]
        return await asyncio.gather(*(engine.generate(r) for r in asked), return_exceptions=True)

    refused, drawn = asyncio.run(together())
    assert isinstance(refused, InvalidRequestError)
    assert "seed is -5" in str(refused)
    assert drawn.completions


# Announced requests.


def test_a_batch_waits_for_requests_that_are_being_prepared_on_threads(engine, renderer, monkeypatch):
    sizes = []
    run = engine._run
    monkeypatch.setattr(engine, "_run", lambda requests: (sizes.append(len(requests)), run(requests))[1])

    async def prepare(seed):
        with engine.expecting_request():
            await asyncio.to_thread(time.sleep, 0.01 * seed)
            made = request(prompt(renderer), seed=seed)
        return await engine.generate(made)

    async def together():
        await asyncio.gather(*map(prepare, range(8)))

    asyncio.run(together())
    assert sizes == [8]


@pytest.mark.slow
def test_a_batch_does_not_wait_forever(engine, renderer):
    async def scenario():
        with engine.expecting_request():  # and it never comes
            return await asyncio.wait_for(engine.generate(request(prompt(renderer))), 60)

    assert asyncio.run(scenario()).completions


def test_the_rows_of_a_batch_do_not_depend_on_the_order_in_which_requests_came(engine, renderer, monkeypatch):
    rows = []
    run = engine._run
    monkeypatch.setattr(
        engine, "_run", lambda running: (rows.append([each.request.sampling.seed for each in running]), run(running))[1]
    )
    asked = [request(prompt(renderer, images=[noise(seed % 3)]), seed=seed) for seed in range(8)]
    generate(engine, *asked)
    generate(engine, *reversed(asked))
    assert rows[0] == rows[1]


def test_cancelling_one_call_does_not_affect_the_others(engine, renderer):
    async def scenario():
        tasks = [asyncio.create_task(engine.generate(request(prompt(renderer), seed=i))) for i in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    first, second, third = asyncio.run(scenario())
    assert isinstance(second, asyncio.CancelledError)
    assert first.completions
    assert third.completions


def test_a_failing_batch_fails_its_callers_and_not_the_engine(engine, renderer, monkeypatch):
    def broken(requests):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_run", broken)
        with pytest.raises(EngineFailedError, match=r"MemoryError.*no room") as raised:
            generate(engine, request(prompt(renderer)))
        assert isinstance(raised.value.__cause__, MemoryError)
    (result,) = generate(engine, request(prompt(renderer)))
    assert result.completions


@pytest.mark.parametrize("step", [0, 3])
def test_a_model_that_fails_on_one_request_of_a_batch_fails_that_request_alone(engine, renderer, monkeypatch, step):
    """At its prompt, or after its third token, when the others have tokens too, which their listeners have received."""
    forward = engine._forward
    culprit = replace(request(prompt(renderer, "two"), seed=2), request_id="culprit")
    bad, streamed = len(culprit.prompt_ids), []

    def fail_on_the_culprit(lengths):
        if bad + step in lengths:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    prefill, next_hidden_states = forward.prefill, forward.next_hidden_states

    def checked_prefill(rows, *arguments):
        fail_on_the_culprit(rows.attention_mask.sum(1).tolist())
        return prefill(rows, *arguments)

    def checked_step(ids, positions, mask, cache):
        fail_on_the_culprit(mask.sum(1).tolist())
        return next_hidden_states(ids, positions, mask, cache)

    monkeypatch.setattr(forward, "prefill", checked_prefill)
    monkeypatch.setattr(forward, "next_hidden_states", checked_step)

    async def together():
        others = [request(prompt(renderer, text * 40), seed=3) for text in ("a ", "b c ")]
        return await asyncio.gather(
            engine.generate_streamed(others[0], streamed.append),
            engine.generate(culprit),
            engine.generate(others[1]),
            return_exceptions=True,
        )

    first, failed, last = asyncio.run(together())
    assert isinstance(failed, EngineFailedError)
    assert failed.request_id.startswith("culprit")
    assert "shapes cannot be multiplied" in str(failed)
    for result in (first, last):
        (completion,) = result.completions
        assert completion.finish_reason is not FinishReason.ABORT
        assert len(completion.token_ids) > step
    reported = np.concatenate([delta.token_ids for delta in streamed])
    np.testing.assert_array_equal(reported, first.completions[0].token_ids)
    monkeypatch.undo()
    (result,) = generate(engine, culprit)
    assert result.completions


def test_the_engine_refuses_another_event_loop_while_its_own_is_open(engine, renderer):
    async def scenario():
        await engine.generate(request(prompt(renderer)))
        with pytest.raises(EngineError, match="the engine belongs to another event loop"):
            await asyncio.to_thread(generate, engine, request(prompt(renderer)))
        return await engine.generate(request(prompt(renderer)))

    assert asyncio.run(scenario()).completions


def test_a_closed_engine_refuses(engine, renderer):
    asyncio.run(engine.close())
    with pytest.raises(EngineClosedError):
        generate(engine, request(prompt(renderer)))


def test_closing_fails_the_waiting_requests(engine, renderer):
    async def scenario():
        waiting = [asyncio.create_task(engine.generate(request(prompt(renderer), seed=i))) for i in range(3)]
        await asyncio.sleep(0)
        await engine.close()
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)

    assert [type(outcome) for outcome in asyncio.run(scenario())] == [EngineClosedError] * 3


def test_a_batch_whose_calls_were_all_cancelled_does_not_run(engine, renderer, monkeypatch):
    sizes = []
    run = engine._run
    monkeypatch.setattr(engine, "_run", lambda requests: (sizes.append(len(requests)), run(requests))[1])

    async def scenario():
        cancelled = asyncio.create_task(engine.generate(request(prompt(renderer))))
        await asyncio.sleep(0)
        cancelled.cancel()
        queue = engine._queue
        assert queue._task is not None
        await asyncio.wait_for(queue._task, 60)
        return await asyncio.wait_for(engine.generate(request(prompt(renderer))), 60)

    assert asyncio.run(scenario()).completions
    assert sizes == [1]


def test_malformed_requests_are_refused_before_the_model_sees_them(engine, renderer):
    rendered = prompt(renderer, images=[noise(1)])
    media = rendered.multi_modal_data
    (item,), (where,) = media.media_items["image"], media.mm_placeholders["image"]

    def moved(by: int) -> MultiModalData:
        return MultiModalData.from_items([(item, PlaceholderRange(where.offset + by, where.length))])

    bad = {
        "empty": ([], None),
        "vocabulary": ([1, 2, 999], None),
        "token 1 of the prompt is -1": ([1, -1], None),
        "not all the image placeholder": (rendered.token_ids, moved(1)),
        "outside of": (rendered.token_ids, moved(1000)),
        "before the end of the previous": (
            rendered.token_ids,
            MultiModalData.from_items([(item, where), (item, where)]),
        ),
    }
    for words, (ids, given) in bad.items():
        with pytest.raises(InvalidRequestError, match=words):
            generate(engine, GenerateRequest(ids, SamplingParams(), given))


def test_the_error_of_a_prompt_without_room_for_a_token_has_both_numbers(engine):
    with pytest.raises(OverlongPromptError, match=r"4096 tokens .* 4096") as caught:
        generate(engine, GenerateRequest([65] * 4096, SamplingParams()))
    assert (caught.value.prompt_tokens, caught.value.limit) == (4096, 4096)


def test_generation_stops_at_the_end_of_the_context(engine):
    (result,) = generate(engine, GenerateRequest([65] * 4094, SamplingParams(max_tokens=50, seed=1)))
    assert len(result.completions[0].token_ids) == 2
    assert result.completions[0].finish_reason is FinishReason.LENGTH


def test_the_error_of_an_unsupported_model_names_the_engine_to_use():
    with pytest.raises(
        UnsupportedModelError, match=r"'Linear': it is no model of transformers .* VLLMEngine"
    ) as caught:
        LocalEngine(torch.nn.Linear(1, 1))
    assert caught.value.model_type == "Linear"
