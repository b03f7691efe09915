"""The cost of using a vLLM server: bytes per episode, encoding of images, requests.

    python benchmarks/engine.py [--vllm-venv DIR] [--check]

The bytes that a whole `VLLMEngine` sends are counted, with a server without a model that responds at once. They are
compared with the form that the PyPI package `renderers` 0.1.12 sends: in every turn the float32 pixels of all images so
far, in the same base64 of msgpack. With `--vllm-venv` (the directory that tests/real/setup_vllm.sh prints) vLLM's own
encoder is timed too.
"""

import argparse
import asyncio
import importlib
import sys
from pathlib import Path

import numpy as np
from engine_encoding import compare_encoding
from engine_requests import compare_requests
from render import Report

from renderers import MultiModalData, load_renderer
from rollouts import SamplingParams, StepResult, run_episode
from rollouts.engines.vllm import VLLMEngine
from rollouts.engines.vllm.feature_encoding import encode_features

TURNS = 20
SIDE = 512
MOST_BYTES = 1.1


class NewImageEveryTurn:
    """An environment of `TURNS` turns, each with a new image of noise."""

    def reset(self, seed: int) -> list[dict[str, object]]:
        self._random = np.random.default_rng(seed)
        self._turn = 0
        return self._show()

    def step(self, message: object) -> StepResult:
        self._turn += 1
        return StepResult(self._show(), done=self._turn == TURNS)

    def _show(self) -> list[dict[str, object]]:
        image = self._random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "What has changed?"}]
        return [{"role": "user", "content": parts}]


def compare_bytes(report: Report, model_dir: Path) -> None:
    """One table: the bytes that one episode sends in total."""
    sent, once, cumulative = asyncio.run(_episode(model_dir))
    with report.table(f"Bytes sent over {TURNS} turns, each with a new {SIDE}x{SIDE} image", "MB", "of once") as table:
        table.add_row("each image once, its features in base64", f"{once / 1e6:,.1f}", "1.00x", "", "")
        target_cells = report.check(sent / once, MOST_BYTES, f"<= {MOST_BYTES}x")
        table.add_row(
            "mmrollouts, everything in the requests", f"{sent / 1e6:,.1f}", f"{sent / once:.2f}x", *target_cells
        )
        row = ("form of renderers 0.1.12, images alone", f"{cumulative / 1e6:,.1f}", f"{cumulative / once:.0f}x")
        table.add_row(*row, "", "")


async def _episode(model_dir: Path) -> tuple[int, int, int]:
    """Returns the bytes of all requests, of each image's features once, and of the cumulative float32 form."""
    fake, fake_model = map(importlib.import_module, ("fake_server", "fake_model"))
    renderer = load_renderer(model_dir)
    fake_model.IMAGE_PAD = renderer.tokenizer.control_id("<|image_pad|>")
    async with fake.FakeVLLM(max_model_len=2**17) as server, VLLMEngine(server.base_url) as engine:
        trajectory = await run_episode(
            NewImageEveryTurn(),
            engine=engine,
            renderer=renderer,
            sampling=SamplingParams(max_tokens=64),
            max_turns=TURNS,
        )
        sent = sum(len(seen.body) for seen in server.generations)
    once = cumulative = 0
    for turn in trajectory.turns:
        media = trajectory.multi_modal_data(turn.node, renderer.processors)
        cumulative += _features_bytes(media, "float32")
        once = _features_bytes(media, "uint8")
    return sent, once, cumulative


def _features_bytes(media: MultiModalData, dtype: str) -> int:
    return sum(memoryview(segment).nbytes for segment in encode_features(media, pixel_dtype=dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description="What talking to a vLLM server costs.")
    parser.add_argument("--vllm-venv", type=Path, help="an environment with vLLM, to time its encoder in")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "renderers"))
    model_dir: Path = importlib.import_module("vision_models").vision_model_dir("qwen3-vl")
    report = Report()
    compare_bytes(report, model_dir)
    compare_encoding(report, model_dir, options.vllm_venv)
    compare_requests(report)
    report.console.print(f"{report.missed} targets missed" if report.missed else "every target kept")
    if options.check and report.missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
