"""Memory and time of `sequence_logprobs`, forward and backward, beside a computation with all logits.

    python benchmarks/training_memory.py [--hidden 64] [--check]

Each line is a process of its own. Its memory is the growth of the peak resident set over hidden states, weight and
targets; their gradients (hidden and weight) are subtracted. All logits of the full row do not fit into most machines,
so that side runs on fewer positions, and its memory there times the number of positions is an estimate. Times are CPU
seconds of one thread. Linux only.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

POSITIONS, VOCABULARY = 32_768, 151_936
FEW_POSITIONS = 512
LIMIT_MB = 400


class Measured(NamedTuple):
    """Megabytes beyond the tensors and their gradients, and CPU seconds."""

    megabytes: float
    seconds: float


def measured_in_process(side: str, positions: int, hidden_size: int) -> Measured:
    run = subprocess.run(
        [sys.executable, __file__, "--side", side, "--positions", str(positions), "--hidden", str(hidden_size)],
        stdout=subprocess.PIPE,
        check=True,
    )
    return Measured(*json.loads(run.stdout))


def report(hidden_size: int) -> Measured:
    """Print the table; return the measurement of `sequence_logprobs` on the full row."""
    few_full = measured_in_process("full", FEW_POSITIONS, hidden_size)
    few_ours = measured_in_process("ours", FEW_POSITIONS, hidden_size)
    ours = measured_in_process("ours", POSITIONS, hidden_size)
    print(f"log-probabilities and entropy, {VOCABULARY:,} words, hidden size {hidden_size}, forward and backward")
    for name, positions, line in (
        ("all logits", FEW_POSITIONS, few_full),
        ("sequence_logprobs", FEW_POSITIONS, few_ours),
        ("sequence_logprobs", POSITIONS, ours),
    ):
        print(f"  {name:20} {positions:7,} positions {line.megabytes:9,.0f} MB {line.seconds:7.1f} s CPU")
    estimate = few_full.megabytes * POSITIONS / FEW_POSITIONS
    print(
        f"  {'all logits':20} {POSITIONS:7,} positions {estimate:9,.0f} MB (estimate: {FEW_POSITIONS} positions x 64)"
    )
    print(f"  time at {FEW_POSITIONS} positions: {few_ours.seconds / few_full.seconds:.2f} x all logits")
    return ours


def _measure(side: str, positions: int, hidden_size: int) -> Measured:
    import torch

    torch.set_num_threads(1)
    hidden = torch.randn(positions, hidden_size)
    weight = torch.randn(VOCABULARY, hidden_size) / hidden_size**0.5
    targets = torch.randint(0, VOCABULARY, (positions,))
    loss = {"full": _all_logits, "ours": _tiles}[side]
    gradient_step(loss, hidden[:2], weight[:1000], targets[:2] % 1000)  # loads what torch loads at first use
    before, started = peak_megabytes(), time.process_time()
    gradient_step(loss, hidden, weight, targets)
    seconds = time.process_time() - started
    gradients = 4 * (hidden.numel() + weight.numel()) / 2**20
    return Measured(peak_megabytes() - before - gradients, seconds)


def gradient_step(loss: Callable[..., object], hidden: object, weight: object, targets: object) -> None:
    hidden, weight = (tensor.detach().requires_grad_() for tensor in (hidden, weight))  # type: ignore[attr-defined]
    logprobs, entropy = loss(hidden, weight, targets)  # type: ignore[misc]
    (logprobs.mean() + entropy.mean()).backward()


def _all_logits(hidden, weight, targets):  # type: ignore[no-untyped-def]
    import torch

    log_probabilities = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=-1)
    return log_probabilities.gather(-1, targets[:, None])[:, 0], entropy


def _tiles(hidden, weight, targets):  # type: ignore[no-untyped-def]
    from rollouts.training import sequence_logprobs

    return sequence_logprobs(hidden, weight, targets)


def peak_megabytes() -> float:
    """Of this program alone: `ru_maxrss` of a new process begins with the peak of the process that started it."""
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64, help="the hidden size (default: 64)")
    parser.add_argument("--check", action="store_true", help=f"fail above {LIMIT_MB} MB on the full row")
    parser.add_argument("--side", choices=("full", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--positions", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(_measure(arguments.side, arguments.positions, arguments.hidden)))
        return
    ours = report(arguments.hidden)
    if arguments.check and ours.megabytes > LIMIT_MB:
        sys.exit(f"{ours.megabytes:.0f} MB, more than {LIMIT_MB}")


if __name__ == "__main__":
    main()
