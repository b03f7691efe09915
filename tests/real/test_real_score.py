"""`score` of given tokens on a real server, against the log-probabilities that the trainer computes of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from make_adapter import make_adapter, merged_checkpoint
from run_config_files import FOURS, write_run

from renderers import build_training_sample, load_renderer
from rollouts import VLLMEngine
from rollouts.models.loading import load_model
from rollouts.run_config.config_file import read_config
from rollouts.run_config.engines import connect
from rollouts.run_config.errors import RunConfigError
from rollouts.run_config.run_parts import make_parts
from rollouts.training import TrainingBatch, candidate_logprobs, sample_from_rendered, score, token_logprobs

CLOSE, FAR = 1e-4, 1e-2
TOP_K = 5


def pictures(seed, count):
    rng = np.random.default_rng(7_000_000 + seed)
    return [{"type": "image", "image": rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)} for _ in range(count)]


def sound(seed):
    times = np.arange(8000) / 16000
    tone = 0.4 * np.sin(2 * np.pi * (300 + 70 * seed) * times).astype(np.float32)
    return {"type": "audio", "audio": tone, "sampling_rate": 16000}


def sample_of(renderer, parts, text):
    """A conversation, of which every token but the first and those of media is trained."""
    question = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    answer = {"role": "assistant", "content": f"The answer to {text!r} is 42."}
    sample = sample_from_rendered(build_training_sample(renderer, [question, answer]), name=text)
    mask = np.arange(len(sample)) > 0
    for _, placeholder in sample.media:
        mask[placeholder.offset : placeholder.end] = False
    return replace(sample, loss_mask=mask)


@pytest.mark.parametrize("vllm_server", ["float32", "internvl3", "qwen3", "qwen2-audio"], indirect=True)
async def test_scores_of_a_server_are_the_trainers_log_probabilities(vllm_server):
    renderer = load_renderer(vllm_server.model_dir)
    media = {"image": lambda seed: pictures(seed, seed), "audio": lambda seed: [sound(seed)]}
    kinds = [make for modality, make in media.items() if modality in renderer.processors]
    samples = [sample_of(renderer, [], "only text?")]
    samples += [sample_of(renderer, make(seed), f"which, {seed}?") for make in kinds for seed in (1, 2)]
    async with VLLMEngine(vllm_server.base_url) as engine:
        scores = await score(samples, engine, top_k=TOP_K, renderer=renderer, teacher=renderer)
        again = await score(samples, engine, renderer=renderer)  # of media that the server has already
        sent = engine.media_cache_counts
    model = load_model(vllm_server.model_dir)
    for sample, found, second in zip(samples, scores, again, strict=True):
        batch, mask = TrainingBatch.from_samples([sample], pad_id=0), sample.loss_mask
        ids = torch.from_numpy(np.maximum(found.top.token_ids, 0).astype(np.int64))[None]
        with torch.no_grad():
            expected = token_logprobs(model, batch)[0].numpy()[mask]
            likeliest = candidate_logprobs(model, batch, ids)[0].numpy()[mask]
        assert np.isnan(found.logprobs[0])
        np.testing.assert_allclose(found.logprobs[mask], expected, atol=CLOSE)
        np.testing.assert_allclose(second.logprobs[mask], expected, atol=CLOSE)
        np.testing.assert_allclose(found.top.logprobs[mask], likeliest, atol=CLOSE)
        # The planted fault: the trainer's values of the tokens beside them.
        assert np.abs(found.logprobs[mask][1:] - expected[:-1]).max() > FAR
    if vllm_server.mode == "float32":
        assert sent.included_items == 3  # three pictures in two samples, twice each


@pytest.mark.parametrize("vllm_server", ["lora"], indirect=True)
async def test_an_adapter_scores_as_the_model_that_it_is_merged_into_and_a_run_finds_what_the_server_does_not_give(
    vllm_server, tmp_path
):
    renderer = load_renderer(vllm_server.model_dir)
    sample = sample_of(renderer, pictures(1, 1), "which?")
    directory = make_adapter(tmp_path / "adapter", vllm_server.model_dir, seed=1)
    merged = load_model(merged_checkpoint(tmp_path / "merged", vllm_server.model_dir, directory))
    with torch.no_grad():
        expected = token_logprobs(merged, TrainingBatch.from_samples([sample], pad_id=0))[0].numpy()
    async with VLLMEngine(vllm_server.base_url) as engine:
        await engine.load_adapter("teacher", directory)
        try:
            (of_adapter,), (of_model,) = [
                await score([sample], engine, renderer=renderer, adapter=name) for name in ("teacher", None)
            ]
            taken = 'adapter = "teacher"\ntop_k = 20'  # of a server without --max-logprobs
            await check_teacher_of_run(tmp_path, vllm_server, taken)
            refused = {"adapter": taken.replace("teacher", "other"), "top_k": taken.replace("20", "21")}
            found = {}
            for key, keys in refused.items():
                with pytest.raises(RunConfigError) as caught:
                    await check_teacher_of_run(tmp_path, vllm_server, keys)
                (found[key],) = caught.value.problems
        finally:
            await engine.unload_adapter("teacher")
    assert of_adapter.version == "teacher"
    mask = sample.loss_mask
    np.testing.assert_allclose(of_adapter.logprobs[mask], expected[mask], atol=CLOSE)
    assert np.abs(of_adapter.logprobs[mask] - of_model.logprobs[mask]).max() > FAR
    assert {key: problem.key for key, problem in found.items()} == {
        "adapter": "teacher.adapter",
        "top_k": "teacher.top_k",
    }
    assert "the adapter 'other' is not loaded (loaded: 'teacher')" in found["adapter"].reason
    assert "greater than max allowed: 20" in found["top_k"].reason


async def check_teacher_of_run(directory, server, keys):
    """The check at the start of a run whose teacher is on the server."""
    engine = f'[teacher]\nengine = {{ kind = "vllm", base_url = "{server.base_url}" }}\n{keys}\n'
    of_renderer = f'[teacher.renderer]\nmodel = "{server.model_dir}"\n'
    config = FOURS.replace('model = "model"', f'model = "{server.model_dir}"')
    path = write_run(directory / "run", config + engine + of_renderer, model=False)
    file = read_config(path)
    teacher = make_parts(file, offline=True).teacher
    engine = teacher.make_engine()
    try:
        await connect(teacher.file, engine)
        await teacher.check(engine, None)
    finally:
        await engine.close()
