"""New weights for the embedded engine while it samples, weights from a directory, and requests that are aborted."""

import asyncio
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from model_families import save_family
from safetensors.numpy import load_file, save_file

from renderers import RenderedTokens
from rollouts import FinishReason, GenerateRequest, SamplingParams
from rollouts.engines.local import LocalEngine
from rollouts.engines.result_checks import check_result
from rollouts.errors import ArgumentError, EngineClosedError, WeightUpdateError
from rollouts.training import TrainingBatch, TrainingSample, token_logprobs

SPLIT = 6  # tokens that a completion has when `held_batch` holds it
LENGTH = 16


def request(prompt, **sampling):
    sampling = {"max_tokens": LENGTH, "seed": 0, **sampling}
    return GenerateRequest(prompt.token_ids, SamplingParams(**sampling), prompt.multi_modal_data)


async def update_in_flight(engine, held_batch, mode, weights, *requests):
    """The results of requests during which the weights were replaced, in the order of the requests."""
    reached, released = held_batch
    running = [asyncio.ensure_future(engine.generate(each)) for each in requests]
    assert await asyncio.to_thread(reached.wait, 60)
    updating = asyncio.ensure_future(engine.update_weights(weights, "1", in_flight=mode))
    await asyncio.sleep(0)
    released.set()
    await updating
    return await asyncio.gather(*running)


def logprobs_by(directory, prompt: RenderedTokens, ids: np.ndarray) -> np.ndarray:
    """The log-probabilities of a completion by the model of a checkpoint, through the trainer's forward pass."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    count = len(prompt.token_ids)
    length = count + len(ids)
    sample = TrainingSample(
        token_ids=np.concatenate([prompt.token_ids, ids]).astype(np.int32),
        loss_mask=np.arange(length) >= count,
        logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        media=tuple(prompt.multi_modal_data.items_with_ranges()),
    )
    with torch.no_grad():
        return token_logprobs(model, TrainingBatch.from_samples([sample], pad_id=0))[0, count:].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_a_completion_in_flight_continues_with_the_new_weights(
    engine, held_batch, prompt, tiny_model_dir, other_model_dir, mode
):
    asked = replace(request(prompt, top_logprobs=engine.vocab_size), prompt_top_logprobs=1)
    (result,) = await update_in_flight(engine, held_batch, mode, other_model_dir, asked)
    (completion,) = result.completions
    spans = [(span.version, span.start, span.end) for span in completion.weight_spans]
    assert spans == [("0", 0, SPLIT), ("1", SPLIT, LENGTH)]
    check_result(asked, result)
    assert (len(completion.token_ids), completion.finish_reason) == (LENGTH, FinishReason.LENGTH)
    by_old = logprobs_by(tiny_model_dir, prompt, completion.token_ids)
    by_new = logprobs_by(other_model_dir, prompt, completion.token_ids)
    np.testing.assert_allclose(completion.logprobs[:SPLIT], by_old[:SPLIT], atol=1e-5)
    np.testing.assert_allclose(completion.logprobs[SPLIT:], by_new[SPLIT:], atol=1e-5)
    # Each row of all tokens has the sampled one with the log-probability of the weights that sampled it.
    top_ids, top_logprobs = completion.top_logprobs
    np.testing.assert_array_equal(top_logprobs[top_ids == completion.token_ids[:, None]], completion.logprobs)
    assert np.abs(by_old - by_new).max() > 0.1


async def test_with_wait_a_completion_in_flight_finishes_with_the_old_weights(
    engine, held_batch, prompt, other_model_dir
):
    (result,) = await update_in_flight(engine, held_batch, "wait", other_model_dir, request(prompt))
    assert [span.version for span in result.completions[0].weight_spans] == ["0"]
    (after,) = (await engine.generate(request(prompt))).completions
    assert [span.version for span in after.weight_spans] == ["1"]


async def test_all_samples_of_all_requests_of_a_batch_continue(engine, held_batch, prompt, other_model_dir):
    short = request(prompt, max_tokens=2)
    results = await update_in_flight(engine, held_batch, "abort", other_model_dir, request(prompt, n=3), short)
    assert [[c.index for c in result.completions] for result in results] == [[0, 1, 2], [0]]
    assert [len(c.token_ids) for c in results[0].completions] == [LENGTH] * 3
    assert len({tuple(c.token_ids.tolist()) for c in results[0].completions}) == 3, "each sample has its own seed"
    assert [span.version for span in results[1].completions[0].weight_spans] == ["0"]


@pytest.mark.slow
async def test_tensors_may_have_the_names_of_checkpoint_files(tmp_path):
    first = save_family("qwen2_5_vl", tmp_path / "first")
    weights = {name: value * 1.1 for name, value in load_file(first / "model.safetensors").items()}
    second = shutil.copytree(first, tmp_path / "second")
    save_file(weights, second / "model.safetensors", metadata={"format": "pt"})
    engine, expected = (LocalEngine.from_pretrained(directory) for directory in (first, second))
    assert not weights.keys() <= engine._model.state_dict().keys()  # transformers has other names in the model

    async def sampled(engine):
        request = GenerateRequest([5, 6, 7], SamplingParams(max_tokens=LENGTH, seed=0))
        return (await engine.generate(request)).completions[0].logprobs.tolist()

    before, name = await sampled(engine), min(weights)
    wrong = [{**weights, "other": weights[name]}, {each: weights[each] for each in weights if each != name}]
    for each in wrong:
        with pytest.raises(WeightUpdateError, match=r"the mapping of weights has 1 .*; nothing was changed"):
            await engine.update_weights(each, "1")
    assert await sampled(engine) == before
    await engine.update_weights(weights, "1")
    assert await sampled(engine) == await sampled(expected) != before
    await engine.close()
    await expected.close()


@pytest.mark.parametrize(
    "fault", ["absent", "lacks a tensor", "has another tensor", "has a wrong shape", "is torn", "is pickled"]
)
async def test_a_directory_that_is_no_checkpoint_of_the_model_changes_nothing(
    engine, prompt, other_model_dir, tmp_path, fault
):
    before = (await engine.generate(request(prompt))).completions[0]
    directory = tmp_path / "checkpoint"
    if fault != "absent":
        shutil.copytree(other_model_dir, directory)
        path = directory / "model.safetensors"
        weights = load_file(path)
        name = next(name for name in weights if name.endswith("layers.0.mlp.gate_proj.weight"))
        changed = {
            "lacks a tensor": {key: value for key, value in weights.items() if key != name},
            "has another tensor": {**weights, f"{name}.other": weights[name]},
            "has a wrong shape": {**weights, name: weights[name][:-1].copy()},
        }
        if fault == "is pickled":
            path.unlink()
            torch.save(
                {each: torch.from_numpy(value) for each, value in weights.items()}, directory / "pytorch_model.bin"
            )
        elif fault == "is torn":
            path.write_bytes(path.read_bytes()[:1000])
        else:
            save_file(changed[fault], path, metadata={"format": "pt"})
    with pytest.raises(WeightUpdateError, match=r"no directory|holds no|has 1 .*; nothing was changed"):
        await engine.update_weights(directory, "1")
    after = (await engine.generate(request(prompt))).completions[0]
    assert after.logprobs.tolist() == before.logprobs.tolist()
    assert engine.weight_version == "0"


@pytest.mark.parametrize(
    ("version", "in_flight", "words"),
    [("", "abort", "version is"), (1, "abort", "version is"), ("1", "stop", "in_flight is 'stop'; pass one of abort")],
)
async def test_other_arguments_are_refused_by_name(engine, version, in_flight, words):
    with pytest.raises(ArgumentError, match=f"^{words}"):
        await engine.update_weights({}, version, in_flight=in_flight)


async def test_a_closed_engine_takes_no_weights(tiny_model_dir):
    engine = LocalEngine.from_pretrained(tiny_model_dir)
    await engine.close()
    with pytest.raises(EngineClosedError):
        await engine.update_weights({}, "1")


async def test_a_relative_path_is_never_the_name_of_a_repository(engine, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(WeightUpdateError, match="there is no directory checkpoints/step-3; nothing was changed"):
        await engine.update_weights("checkpoints/step-3", "1")
    with pytest.raises(ArgumentError, match="there is no such directory"):
        LocalEngine.from_pretrained("checkpoints/step-3")


LONG = 300


def asked(name="r", prompt=(5, 6, 7), **sampling):
    return GenerateRequest(list(prompt), SamplingParams(**{"max_tokens": 8, "seed": 3, **sampling}), request_id=name)


@pytest.mark.slow
async def test_an_aborted_request_ends_and_the_others_of_its_batch_go_on(engine):
    begun = asyncio.Event()
    streamed = engine.generate(asked("long", max_tokens=LONG, n=2), lambda delta: begun.set())
    tasks = [asyncio.ensure_future(each) for each in (streamed, engine.generate(asked("other", max_tokens=LONG)))]
    await asyncio.wait_for(begun.wait(), 30)
    await engine.abort(["long", "unknown"])
    aborted, other = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    for completion in aborted.completions:
        assert completion.finish_reason is FinishReason.ABORT
        assert 0 < len(completion.token_ids) == len(completion.logprobs) < LONG
    assert len(other.completions[0].token_ids) == LONG
    (alone,) = (await engine.generate(asked("other", max_tokens=LONG))).completions
    np.testing.assert_array_equal(other.completions[0].token_ids, alone.token_ids)


@pytest.mark.slow
async def test_a_waiting_request_ends_without_tokens(engine):
    begun = asyncio.Event()
    first = asyncio.ensure_future(engine.generate(asked("first", max_tokens=LONG), lambda delta: begun.set()))
    await asyncio.wait_for(begun.wait(), 30)
    second = asyncio.ensure_future(engine.generate(asked("second", n=2)))
    await asyncio.sleep(0)
    await engine.abort(["second"])
    completions = (await asyncio.wait_for(second, 30)).completions
    assert [len(each.token_ids) for each in completions] == [0, 0]
    assert {each.finish_reason for each in completions} == {FinishReason.ABORT}
    assert len((await first).completions[0].token_ids) == LONG


async def test_an_abort_ends_what_an_update_of_the_weights_has_cut_off(engine):
    begun = asyncio.Event()
    task = asyncio.ensure_future(engine.generate(asked("long", max_tokens=2000), lambda delta: begun.set()))
    await asyncio.wait_for(begun.wait(), 30)
    weights = {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}
    await engine.update_weights(weights, "1")
    await engine.abort(["long"])
    (completion,) = (await asyncio.wait_for(task, 60)).completions
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.weight_spans[-1].end == len(completion.token_ids) < 2000


async def test_weights_can_get_another_label_without_being_replaced(engine):
    await engine.update_weight_version("seven")
    (completion,) = (await engine.generate(asked())).completions
    assert [span.version for span in completion.weight_spans] == ["seven"]
    with pytest.raises(ArgumentError, match="version"):
        await engine.update_weight_version("")
