"""Log-probabilities, and packed against padded rows, on a CUDA device in bfloat16.

    python benchmarks/training_gpu.py

Memory is the peak of torch's allocator beyond hidden states, weight, targets and the gradients of the first two.
Times are the fastest of three, between two synchronisations.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config

from rollouts.training import (
    TrainingBatch,
    TrainingSample,
    micro_batches,
    pack_samples,
    sequence_logprobs,
    token_logprobs,
)

HIDDEN, VOCABULARY = 2048, 151_936
LONGEST = 8192


def fastest(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and megabytes of the peak beyond what was allocated after a first call, its gradients included."""
    seconds = []
    call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds), (torch.cuda.max_memory_allocated() - before) / 2**20


def all_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scored = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    return scored.gather(-1, targets[:, None])[:, 0], -(scored.exp() * scored).sum(dim=-1)


def score_and_differentiate(
    score: Callable[..., tuple[torch.Tensor, torch.Tensor]], hidden: torch.Tensor, weight: torch.Tensor, *targets: Any
) -> None:
    hidden.grad = weight.grad = None
    logprobs, entropy = score(hidden, weight, *targets)
    (logprobs.mean() + entropy.mean()).backward()  # type: ignore[no-untyped-call]


def logprobs_table() -> Table:
    table = Table("positions", "", "ms", "MB beyond gradients", title=f"{VOCABULARY:,} words, hidden size {HIDDEN}")
    for positions in (4096, 32_768):
        hidden = torch.randn(positions, HIDDEN, device="cuda").bfloat16().requires_grad_()
        weight = (torch.randn(VOCABULARY, HIDDEN, device="cuda") / HIDDEN**0.5).bfloat16().requires_grad_()
        targets = torch.randint(0, VOCABULARY, (positions,), device="cuda")
        for name, score in (("all logits", all_logits), ("sequence_logprobs", sequence_logprobs)):
            try:
                seconds, megabytes = fastest(partial(score_and_differentiate, score, hidden, weight, targets))
            except torch.OutOfMemoryError:
                table.add_row(f"{positions:,}", name, "out of memory", "")
                continue
            table.add_row(f"{positions:,}", name, f"{seconds * 1e3:,.0f}", f"{megabytes:,.0f}")
    return table


def packing_table() -> Table:
    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=8
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
    rng = np.random.default_rng(0)
    samples = []
    for length in rng.lognormal(np.log(700), 1.0, 128).astype(int).clip(64, LONGEST):
        zeros = np.zeros(length, np.float32)
        ids = rng.integers(0, VOCABULARY, length).astype(np.int32)
        samples.append(TrainingSample(ids, np.arange(length) >= length // 4, zeros, zeros))
    plan = pack_samples(samples, max_tokens=LONGEST, hidden_size=config.hidden_size)
    sides: dict[str, list[TrainingBatch]] = {
        "packed": list(plan.batches(0, pad_id=0)),
        "padded, in order": list(micro_batches(samples, rows=8, pad_id=0)),
        "padded, by length": list(micro_batches(sorted(samples, key=len), rows=8, pad_id=0)),
    }
    tokens = sum(map(len, samples))
    table = Table("", "s", "tokens/s", "filled", title=f"{len(samples)} samples, {tokens:,} tokens, gradients")
    for name, batches in sides.items():
        moved = [batch.pin_memory().to("cuda") for batch in batches]

        def step(moved: list[TrainingBatch] = moved) -> None:
            model.zero_grad()
            for batch in moved:
                token_logprobs(model, batch).sum().backward()  # type: ignore[no-untyped-call]

        seconds, _ = fastest(step)
        columns = sum(batch.input_ids.numel() for batch in batches)
        table.add_row(name, f"{seconds:.2f}", f"{tokens / seconds:,.0f}", f"{tokens / columns:.0%}")
    return table


if __name__ == "__main__":
    console = Console(width=110)
    console.print(torch.cuda.get_device_name())
    console.print(logprobs_table())
    console.print(packing_table())
