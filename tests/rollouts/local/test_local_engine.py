"""The embedded engine against transformers' own forward pass."""

import asyncio
import copy
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from renderers import MultiModalData, PlaceholderRange
from rollouts import FinishReason, GenerateRequest, SamplingParams
from rollouts.engines.local import LocalEngine
from rollouts.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineError,
    EngineFailedError,
    InvalidRequestError,
    UnsupportedModelError,
    WeightUpdateError,
)

# An argument that a release of transformers calls deprecated is missing from a later one.
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")


@pytest.fixture
def engine(tiny_model_dir):
    return LocalEngine.from_pretrained(tiny_model_dir)


@pytest.fixture(scope="module")
def reference(tiny_model_dir):
    return AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


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


def test_logprobs_of_prompts_of_different_lengths_are_those_of_transformers_own_forward(engine, renderer, reference):
    prompts = [
        prompt(renderer, "a"),
        prompt(renderer, "a much longer question than the others have", [noise(1, 64, 48)]),
        prompt(renderer, "b", [noise(2), noise(3)]),
    ]
    sampling = {"max_tokens": 12, "n": 2, "temperature": 0.3, "top_k": 5, "top_p": 0.9}  # of which they are free
    results = generate(engine, *(request(p, seed=i, **sampling) for i, p in enumerate(prompts)))
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


def test_a_seed_decides_a_completion_whatever_shares_the_batch(engine, renderer):
    rendered = prompt(renderer, images=[noise(1)])
    (alone,) = generate(engine, request(rendered, seed=5, n=2))
    together = generate(
        engine, *(request(prompt(renderer, "x" * i), seed=i) for i in range(6)), request(rendered, seed=5, n=2)
    )[-1]
    for one, other in zip(alone.completions, together.completions, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()


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
    tower = engine._model.model.visual
    tower.register_forward_hook(lambda module, args, output: encoded.append(len(output.pooler_output)))
    asked = [request(prompt(renderer, f"{i}", [noise(1), noise(2)]), seed=i) for i in range(4)]
    generate(engine, *asked)
    generate(engine, *asked)
    assert len(encoded) == 1
    weights = {name: p.detach().numpy().copy() for name, p in engine._model.named_parameters()}
    asyncio.run(engine.update_weights(weights, "1"))
    generate(engine, asked[0])
    assert encoded == [encoded[0]] * 2  # two images each


HEAD, LAYER = "lm_head.weight", "model.language_model.layers.0.mlp.up_proj.weight"


def with_values(name, value):
    def change(weights):
        weights[name][1, 2:4] = value

    return change


WRONG_WEIGHTS = {
    "a missing one": (lambda weights: weights.pop(LAYER), f"missing, among them '{LAYER}'"),
    "an unknown one": (lambda weights: weights.update(other=weights[LAYER]), "unexpected keys"),
    "another shape": (lambda weights: weights.update({LAYER: weights[LAYER][:1]}), "has shape"),
    "tied ones that differ": (lambda weights: weights.update({HEAD: weights[HEAD] + 1}), f"{HEAD} .*differ"),
    # As a training that failed leaves them.
    "NaN": (with_values(LAYER, math.nan), f"{LAYER} has 2 values that are NaN or infinite"),
    "infinite": (with_values(HEAD, -math.inf), f"{HEAD} has 2 values that are NaN or infinite"),
    **{
        f"no numbers: {value!r}": (lambda weights, value=value: weights.update({LAYER: value}), LAYER)
        for value in (None, [1.0], "x", np.array(["x"]), np.array([None]))
    },
}


@pytest.mark.parametrize("convert", [lambda t: t.clone(), lambda t: t.numpy().copy()], ids=["tensors", "arrays"])
@pytest.mark.parametrize("fault", WRONG_WEIGHTS)
def test_weights_that_do_not_fit_change_nothing(engine, renderer, fault, convert):
    change, words = WRONG_WEIGHTS[fault]
    rendered = prompt(renderer)
    (before,) = generate(engine, request(rendered))
    weights = {name: 2 * convert(value) for name, value in engine._model.state_dict().items()}
    change(weights)
    with pytest.raises(WeightUpdateError, match=f"{words}.*nothing was changed"):
        asyncio.run(engine.update_weights(weights, "bad"))
    (after,) = generate(engine, request(rendered))
    assert before.completions[0].logprobs.tolist() == after.completions[0].logprobs.tolist()
    assert engine.weight_version == "0"


@pytest.mark.parametrize("convert", [lambda t: t.float(), lambda t: t.float().numpy()], ids=["tensors", "arrays"])
def test_weights_that_the_dtype_of_the_model_cannot_hold_are_refused(engine, convert):
    half = LocalEngine(copy.deepcopy(engine._model).half())
    weights = {name: convert(value) for name, value in half._model.state_dict().items()}
    weights[LAYER][1, 2:4] = 1e5
    with pytest.raises(WeightUpdateError, match=f"{LAYER} has 2 values"):
        asyncio.run(half.update_weights(weights, "1"))


@pytest.mark.parametrize("left_out", [None, HEAD, "model.language_model.embed_tokens.weight"])
def test_tied_tensors_are_given_under_all_of_their_names_or_one(engine, renderer, left_out):
    state = {name: value.clone() for name, value in engine._model.state_dict().items()}
    assert left_out is None or left_out in state
    (before,) = generate(engine, request(prompt(renderer)))
    for factor, version in ((2, "doubled"), (1, "as it was")):
        asyncio.run(
            engine.update_weights({key: factor * value for key, value in state.items() if key != left_out}, version)
        )
        (after,) = generate(engine, request(prompt(renderer)))
        assert (after.completions[0].logprobs.tolist() == before.completions[0].logprobs.tolist()) == (factor == 1)


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
            engine.generate(others[0], streamed.append),
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


def test_closing_fails_the_waiting_requests_and_those_after_it(engine, renderer):
    async def scenario():
        waiting = [asyncio.create_task(engine.generate(request(prompt(renderer), seed=i))) for i in range(3)]
        await asyncio.sleep(0)
        await engine.close()
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)

    assert [type(outcome) for outcome in asyncio.run(scenario())] == [EngineClosedError] * 3
    with pytest.raises(EngineClosedError):
        generate(engine, request(prompt(renderer)))


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
        "seed is -5": ([1], SamplingParams(seed=-5)),
        "n is 1000000000 .*at most 1024": ([1], SamplingParams(n=10**9)),
        "max_tokens is 1000000000 .*at most 1048576": ([1], SamplingParams(max_tokens=10**9)),
    }

    for words, (ids, given) in bad.items():
        sampling, given = (given, None) if isinstance(given, SamplingParams) else (SamplingParams(), given)
        with pytest.raises(InvalidRequestError, match=words):
            generate(engine, GenerateRequest(ids, sampling, given))


def test_generation_stops_at_the_end_of_the_context_and_a_prompt_without_room_is_refused(engine):
    (result,) = generate(engine, GenerateRequest([65] * 4094, SamplingParams(max_tokens=50, seed=1)))
    assert len(result.completions[0].token_ids) == 2
    assert result.completions[0].finish_reason is FinishReason.LENGTH
    with pytest.raises(ContextLengthError, match=r"4096 tokens .* 4096") as caught:
        generate(engine, GenerateRequest([65] * 4096, SamplingParams()))
    assert (caught.value.prompt_tokens, caught.value.limit) == (4096, 4096)


def test_the_error_of_an_unsupported_model_names_the_engine_to_use():
    with pytest.raises(
        UnsupportedModelError, match=r"'Linear': it is no model of transformers .* VLLMEngine"
    ) as caught:
        LocalEngine(torch.nn.Linear(1, 1))
    assert caught.value.model_type == "Linear"
