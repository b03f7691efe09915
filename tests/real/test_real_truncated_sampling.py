"""Episodes sampled with and without top_k and top_p, from servers that report raw and processed log-probabilities."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from make_checkpoint import make_checkpoint
from sglang_server import SGLangServer, sglang_venv
from test_real_training import TURNS, Gallery

from renderers import load_renderer
from rollouts import EpisodeSpec, SamplingParams, SGLangEngine, VLLMEngine, run_episodes
from rollouts.errors import TrajectoryError
from rollouts.models.loading import load_model
from rollouts.training import TrainingBatch, samples_from_trajectory, token_logprobs

#: By name: options with which a raw server's answers show the ids that were kept.
OPTIONS = {
    "whole": {},
    "top-k": {"top_k": 8, "top_logprobs": 8},
    "top-p": {"top_p": 0.5, "top_logprobs": 280},
    "min-p": {"extra": {"min_p": 0.5}, "top_logprobs": 280},
}


async def episodes(engine: Any, renderer: Any, options: dict[str, Any]) -> list[Any]:
    specs = [EpisodeSpec(seed, sampling_seed=seed) for seed in range(4)]
    sampling = SamplingParams(max_tokens=12, **options)
    async with engine:
        found = await run_episodes(
            lambda: Gallery(True), specs, engine=engine, renderer=renderer, sampling=sampling, max_turns=TURNS
        )
    # A sampled placeholder token cannot be sent to SGLang.
    found = [trajectory for trajectory in found if not trajectory.error]
    assert found
    return found


def check(model_dir: Path, renderer: Any, found: list[Any], *, is_cut: bool) -> None:
    """The mismatch among the kept ids is below 1e-5, and among all ids above 1e-2 where ids were left out."""
    samples = [
        sample
        for trajectory in found
        for sample in samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
    ]
    model = load_model(model_dir).eval()
    for layout in ("padded", "packed"):
        batch = TrainingBatch.from_samples(samples, pad_id=0, layout=layout)
        without = TrainingBatch.from_samples(
            [replace(sample, sampling_mask=None) for sample in samples], pad_id=0, layout=layout
        )
        with torch.no_grad():
            after, before = (
                float((token_logprobs(model, each) - each.logprobs)[each.loss_mask].abs().max())
                for each in (batch, without)
            )
        print(f"{layout}: {before:.1e} among all ids, {after:.1e} among those that were kept")
        assert after < 1e-5
        assert (before > 1e-2) is is_cut


@pytest.mark.parametrize(
    ("vllm_server", "name"),
    [
        *(("float32", name) for name in ("whole", "top-k")),
        *(("processed", name) for name in ("whole", "top-k", "top-p", "min-p")),
    ],
    indirect=["vllm_server"],
    scope="session",
)
async def test_the_trainer_computes_what_vllm_sampled_from(vllm_server: Any, renderer: Any, name: str) -> None:
    found = await episodes(VLLMEngine(vllm_server.base_url), renderer, OPTIONS[name])
    check(vllm_server.model_dir, renderer, found, is_cut=name != "whole")


@pytest.mark.parametrize("vllm_server", ["float32", "processed"], indirect=True)
async def test_episodes_of_vllm_without_the_kept_ids_are_refused(vllm_server: Any, renderer: Any) -> None:
    (trajectory, *_) = await episodes(VLLMEngine(vllm_server.base_url), renderer, {"top_p": 0.5})
    with pytest.raises(TrajectoryError, match="which ids were kept is not known"):
        samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)


@pytest.fixture(scope="module", params=["raw", "processed"])
def sglang(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """Processed: log-probabilities are those after the temperature, and before top-k and top-p."""
    sglang_venv()
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    variables = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"} if request.param == "raw" else {}
    server = SGLangServer(checkpoint, tmp_path_factory.mktemp("sglang") / "log", variables=variables)
    server.until_healthy()
    yield server
    server.stop()


@pytest.mark.parametrize("name", ["whole", "top-k", "top-p"])
async def test_the_trainer_computes_what_sglang_sampled_from(sglang: SGLangServer, name: str) -> None:
    renderer = load_renderer(sglang.model_dir)
    found = await episodes(SGLangEngine(sglang.base_url), renderer, OPTIONS[name])
    check(sglang.model_dir, renderer, found, is_cut=name != "whole")
