"""examples/grpo_multiturn.py with a real server as sampler."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from pathlib import Path

import pytest

from rollouts.engines.vllm import VLLMEngine

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "grpo_multiturn.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("grpo_multiturn", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def put_back(server):
    async with VLLMEngine(server.base_url) as engine:
        await engine.control.update_weights(server.model_dir, "default")


def test_grpo_trains_on_what_a_server_samples_from_each_steps_weights(vllm_server, example, tmp_path):
    directory = shutil.copytree(vllm_server.model_dir, tmp_path / "model")  # new weights are written below it
    try:
        rewards, mismatches = example.main(
            ["--quick", "--steps", "3", "--model", str(directory), "--base-url", vllm_server.base_url]
        )
    finally:
        asyncio.run(put_back(vllm_server))
    assert len(rewards) == len(mismatches) == 3
    assert max(mismatches) < 1e-4
    assert sorted(path.name for path in (directory / "updates").iterdir()) == ["0", "1", "2"]
