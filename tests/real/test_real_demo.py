"""The digits demonstration with a real server as sampler: weights are saved, reloaded, and equal to the trainer's."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

from rollouts.demo.process import TrainerProcess
from rollouts.demo.recipe import RECIPE
from rollouts.demo.run import Demo, Progress
from rollouts.demo.trainer import ServerPolicy

SHORT = replace(
    RECIPE,
    rl_steps=4,
    groups=12,
    rl_warmup=1,
    evaluate_every=4,
    sft_max_steps=44,
    sft_first_check=40,
    probe_digits=20,
    held_out_digits=40,
)


@pytest.fixture
def learned(vllm_server, restored, tmp_path):
    progress = Progress(Console(file=io.StringIO()), SHORT)
    with TrainerProcess(tmp_path / "model", SHORT, 0) as trainer, progress:
        demo = Demo(
            recipe=SHORT,
            seed=0,
            out=tmp_path,
            trainer=trainer,
            progress=progress,
            make_policy=partial(ServerPolicy, vllm_server.base_url, None),
        )
        yield demo.run()


def test_the_mismatch_is_zero_right_after_every_reload_and_large_just_before_it(learned):
    assert len(learned.steps) == len(learned.stale_mismatches) == SHORT.rl_steps
    assert all(0 < step.max_mismatch < 1e-4 for step in learned.steps)
    assert min(learned.stale_mismatches) > 100 * learned.max_mismatch
    assert min(learned.stale_mismatches) > 1e-3
