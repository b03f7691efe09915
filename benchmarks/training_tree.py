"""Prefix trees beside the same samples in padded rows and in one packed row: time, memory, equality.

    python benchmarks/training_tree.py [--hidden 256] [--layers 4] [--rounds 3] [--groups 1,2,4,8,16,32,64]

A step is the log-probabilities of all completions of a group, and the gradients of all parameters of a random Qwen3-VL
in float32. The prompt has 1,224 tokens, 256 of which are four images; every completion has 100 tokens. Sides of a line
alternate in one process on one thread, and the shortest CPU time of each counts. Peak memory is the growth of the peak
resident set over the model and the samples in a process of its own, gradients included. Linux, CPU.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from training_memory import peak_megabytes

from renderers import MediaItem, MediaSource, PlaceholderRange
from renderers.media.item import TensorField
from rollouts.models.placed_rows import Layout
from rollouts.training import TrainingBatch, TrainingSample, token_logprobs

PROMPT, IMAGES, COMPLETION, TEXT_IDS, IMAGE_ID = 1224, 4, 100, 990, 995
SIDES: dict[str, tuple[Layout, bool]] = {
    "tree": ("padded", True),
    "padded": ("padded", False),
    "packed": ("packed", False),
}


def model(hidden: int, layers: int) -> Any:
    """About 3 M parameters a layer for 512; the vocabulary has 1,000 tokens."""
    text = {
        "vocab_size": 1000,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [12, 10, 10]},
    }
    vision = {
        "depth": 2,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": hidden // 64,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0],
    }
    ids = {name: IMAGE_ID + number for number, name in enumerate(("image_token_id", "video_token_id"))}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    torch.manual_seed(0)
    return transformers.Qwen3VLForConditionalGeneration(config).float().eval()


def sample(ids: np.ndarray, trained: int, media: Sequence[tuple[MediaItem, PlaceholderRange]] = ()) -> TrainingSample:
    zeros = np.zeros(len(ids), np.float32)
    return TrainingSample(ids.astype(np.int32), np.arange(len(ids)) >= trained, zeros, zeros, tuple(media), name="s")


def image(seed: int) -> MediaItem:
    """An image of 256 x 256 pixels: 256 patches, 64 tokens."""
    patches = np.random.default_rng(seed).standard_normal((256, 1536), dtype=np.float32)
    tensors = {"pixel_values": patches, "image_grid_thw": np.array([1, 16, 16])}
    fields = {"pixel_values": TensorField("flat"), "image_grid_thw": TensorField("batched")}
    return MediaItem("image", str(seed), MediaSource.of(b"%d" % seed), tensors, 64, None, fields)


def group(size: int, seed: int = 0) -> list[TrainingSample]:
    """One prompt with images, and `size` random completions."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, TEXT_IDS, PROMPT)
    media = []
    for number in range(IMAGES):
        item = image(number + IMAGES * seed)
        media.append((item, PlaceholderRange(100 + number * 300, item.num_tokens)))
        prompt[100 + number * 300 :][: item.num_tokens] = IMAGE_ID
    completions = random.integers(0, TEXT_IDS, (size, COMPLETION))
    return [sample(np.concatenate([prompt, completion]), PROMPT, media) for completion in completions]


def conversations(episodes: int = 8, turns: int = 4, forks: int = 2) -> list[TrainingSample]:
    """Episodes of one prompt of 300 tokens, each of 4 turns of 60 tokens, with 2 further branches after its second."""
    random = np.random.default_rng(3)
    prompt = random.integers(0, TEXT_IDS, 300)
    samples = []
    for _ in range(episodes):
        begin = np.concatenate([prompt, random.integers(0, TEXT_IDS, turns // 2 * 60)])
        rests = random.integers(0, TEXT_IDS, (1 + forks, turns // 2 * 60))
        samples += [sample(np.concatenate([begin, rest]), len(prompt)) for rest in rests]
    return samples


def unshared(size: int) -> list[TrainingSample]:
    random = np.random.default_rng(4)
    return [sample(random.integers(0, TEXT_IDS, 400), 300) for _ in range(size)]


def step(of: Any, batch: TrainingBatch, share: bool) -> torch.Tensor:
    of.zero_grad()
    logprobs = token_logprobs(of, batch, share_prefixes=share)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return logprobs.detach()[batch.loss_mask]


def gradients(of: Any) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in of.parameters() if each.grad is not None])


def line(table: Table, name: str, of: Any, samples: list[TrainingSample], sides: Sequence[str], rounds: int) -> None:
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for side in sides:
        layout, share = SIDES[side]
        calls[side] = partial(step, of, TrainingBatch.from_samples(samples, pad_id=0, layout=layout), share)
    taken: dict[str, float] = dict.fromkeys(sides, float("inf"))

    def timed(side: str) -> torch.Tensor:
        started = time.process_time()
        values = calls[side]()
        taken[side] = min(taken[side], time.process_time() - started)
        return values

    found = {side: (timed(side), gradients(of)) for side in sides}
    values, grads = found["padded"]
    differences = (found["tree"][0] - values).abs().max(), (found["tree"][1] - grads).norm() / grads.norm()
    for _ in range(rounds):
        for side in sides:
            if side != "packed":  # attention over one long row takes a minute
                timed(side)
    times = [f"{taken[side]:.2f} s" if side in taken else "-" for side in SIDES]
    ratio = min(taken[side] for side in sides if side != "tree") / taken["tree"]
    table.add_row(name, *times, f"{ratio:.2f}", *(f"{float(each):.0e}" for each in differences))


def peak_of(side: str, options: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--side", side, "--hidden", str(options.hidden)]
    run = subprocess.run([*command, "--layers", str(options.layers)], stdout=subprocess.PIPE, check=True)
    return float(json.loads(run.stdout))


def measure(side: str, of: Any) -> None:
    """Print the growth of the peak resident set over one step of a group of 8."""
    samples = group(8)
    layout, share = SIDES[side]
    step(of, TrainingBatch.from_samples([sample(np.arange(20), 2)] * 2, pad_id=0, layout=layout), share)
    batch = TrainingBatch.from_samples(samples, pad_id=0, layout=layout)
    before = peak_megabytes()
    step(of, batch, share)
    print(json.dumps(peak_megabytes() - before))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", default="1,2,4,8,16,32,64")
    parser.add_argument("--side", choices=SIDES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    of = model(options.hidden, options.layers)
    if options.side:
        measure(options.side, of)
        return
    title = f"forward and backward, {options.layers} layers of {options.hidden}, one thread"
    table = Table(title=title, title_justify="left")
    for column in ("", *SIDES, "fastest other / tree", "log-probs differ", "gradients differ"):
        table.add_column(column, justify="left" if not column else "right")
    tell = partial(line, table, of=of, rounds=options.rounds)
    tell("group of 8, 1,224 + 100 tokens, 4 images", samples=group(8), sides=list(SIDES))
    tell("8 episodes of 4 turns, 2 forks each", samples=conversations(), sides=list(SIDES))
    tell("nothing shared, 16 texts of 400", samples=unshared(16), sides=["tree", "padded"])
    for size in map(int, options.groups.split(",")):
        tell(f"group of {size}", samples=group(size), sides=["tree", "padded"])
    console = Console(width=150)
    console.print(table)
    peaks = {side: peak_of(side, options) for side in SIDES}
    console.print("peak memory of a group of 8: " + ", ".join(f"{side} {peak:,.0f} MB" for side, peak in peaks.items()))


if __name__ == "__main__":
    main()
