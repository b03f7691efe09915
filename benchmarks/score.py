"""`score` of samples at a real vLLM, against a bare httpx client that sends the same prompts.

    python benchmarks/score.py [--vllm-venv DIR] [--base-url URL] [--samples 64] [--tokens 2048] [--check]

Both ask for the log-probabilities of the prompts (`prompt_logprobs`), and the server computes each prompt anew for
that. Rounds alternate, and the best round of each side counts. A server with a tiny model is started from the
environment that tests/real/setup_vllm.sh makes; `--base-url` names one that runs. `--check` fails if the rate of
`score` is below 0.9 of that of the bare client.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from render import Report

from rollouts.engines.vllm import VLLMEngine
from rollouts.training import TrainingSample, score

REAL = Path(__file__).parent.parent / "tests" / "real"
LEAST_RATE = 0.9
ROUNDS = 5


def samples_of(count: int, tokens: int) -> list[TrainingSample]:
    """Samples of random bytes, which are the first ids of the tiny model's vocabulary."""
    rng = np.random.default_rng(0)
    mask, zeros = np.arange(tokens) > 0, np.zeros(tokens, np.float32)
    return [
        TrainingSample(rng.integers(0, 256, tokens, dtype=np.int32), mask, zeros, zeros, name=f"sample {number}")
        for number in range(count)
    ]


async def bare_seconds(url: str, model: str, samples: list[TrainingSample], concurrency: int) -> float:
    """The prompts as JSON bodies; of the answers only the JSON is parsed."""
    sampling = {"n": 1, "max_tokens": 1, "temperature": 0.0, "logprobs": 0, "prompt_logprobs": 0, "detokenize": False}
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=3600, limits=limits) as client:

        async def send(sample: TrainingSample) -> None:
            body = {"model": model, "token_ids": sample.token_ids.tolist(), "sampling_params": sampling}
            answer = (await client.post("/inference/v1/generate", json=body)).raise_for_status().json()
            assert len(answer["prompt_logprobs"]) == len(sample)

        start = time.perf_counter()
        await asyncio.gather(*map(send, samples))
        return time.perf_counter() - start


async def score_seconds(url: str, samples: list[TrainingSample], concurrency: int) -> float:
    async with VLLMEngine(url) as engine:
        await engine.capabilities()
        start = time.perf_counter()
        scores = await score(samples, engine, concurrency=concurrency)
        seconds = time.perf_counter() - start
    assert all(len(found.logprobs) == len(sample) for found, sample in zip(scores, samples, strict=True))
    return seconds


async def measured(report: Report, url: str, count: int, tokens: int, concurrency: int) -> None:
    samples = samples_of(count, tokens)
    async with VLLMEngine(url) as engine:
        model = (await engine.capabilities()).model
    await bare_seconds(url, model, samples[:4], concurrency)  # the first requests of a server take longer
    bare, ours = [], []
    for _ in range(ROUNDS):
        bare.append(await bare_seconds(url, model, samples, concurrency))
        ours.append(await score_seconds(url, samples, concurrency))
    total = count * tokens
    title = f"{count} samples of {tokens:,} tokens, best of {ROUNDS} rounds"
    with report.table(title, "seconds", "tokens/s", "of the bare client") as table:
        table.add_row("httpx", f"{min(bare):.2f}", f"{total / min(bare):,.0f}", "1.00x", "", "")
        share = min(bare) / min(ours)
        target = report.check(-share, -LEAST_RATE, f">= {LEAST_RATE}x")
        table.add_row("score", f"{min(ours):.2f}", f"{total / min(ours):,.0f}", f"{share:.2f}x", *target)


@contextmanager
def served(venv: Path) -> Iterator[str]:
    """A server of the tests with a tiny model."""
    sys.path.insert(0, str(REAL))
    from make_checkpoint import make_checkpoint
    from vllm_server import VLLMServer

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "log").mkdir()
        server = VLLMServer.start(venv, make_checkpoint(root / "model"), "float32", root / "log")
        try:
            yield server.base_url
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmrollouts" / "vllm-0.32.0"
    venv = Path(os.environ.get("MMROLLOUTS_VLLM_VENV") or cache)
    parser.add_argument("--vllm-venv", type=Path, default=venv, help="the environment with vLLM")
    parser.add_argument("--base-url", help="a server that runs, in place of one that is started")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--concurrency", type=int, default=64, help="requests at a time, of both sides")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the target is missed")
    options = parser.parse_args()
    report = Report()
    sizes = (options.samples, options.tokens, options.concurrency)
    if options.base_url:
        asyncio.run(measured(report, options.base_url, *sizes))
    else:
        with served(options.vllm_venv) as url:
            asyncio.run(measured(report, url, *sizes))
    if options.check and report.missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
