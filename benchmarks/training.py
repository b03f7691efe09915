"""The cost of training batches: collating, packing, packed rows beside padded rows.

    python benchmarks/training.py

The sides of a row are measured alternately in one process. Collating makes all tensors of a batch, pixels included,
from 64 samples of 4,096 tokens with 4 images each; memcpy copies the same tensors. Packing is compared, on 4,096
lengths of a realistic mix, with first-fit in order of arrival and with a division that only balances: each sample goes
to the row with the lowest cost so far, with as many rows as the token budget then needs. prime-rl fills rows of text by
first-fit decreasing, gives each sample with images a row of its own ("image samples alone"), and balances ranks after
that. The last row computes log-probabilities and gradients of samples of skewed lengths: packed rows of 512 tokens,
beside padded batches of 16 samples. Without a kernel for packed rows, attention of a packed row is masked, not skipped,
so that its cost grows with the square of the row. The lines on memory are those of `training_memory.py` (two minutes).
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from training_memory import report as report_memory
from transformers import AutoModelForImageTextToText

from renderers import MediaItem, MediaSource, PlaceholderRange
from renderers.vision.patches import StillPatches
from rollouts.models.placed_rows import Layout
from rollouts.testing import tiny_qwen3_vl
from rollouts.training import (
    TrainingBatch,
    TrainingSample,
    concatenated_media,
    micro_batches,
    pack_samples,
    token_logprobs,
)
from rollouts.training.packing import token_cost

ROWS, TOKENS, IMAGES, PATCHES = 64, 4096, 4, 256
SAMPLES, BUDGET, PATCH_BUDGET, RANKS, HIDDEN = 4096, 32_768, 16_384, 8, 4096
LONGEST = 512


def fastest(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The shortest time of each side in seconds; calls alternate so that noise of the machine affects all."""
    taken = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, call in sides.items():
            started = time.perf_counter()
            call()
            taken[name] = min(taken[name], time.perf_counter() - started)
    return taken


def sample(
    length: int, media: tuple[tuple[MediaItem, PlaceholderRange], ...] = (), trained: int = 1, seed: int = 0
) -> TrainingSample:
    random = np.random.default_rng(seed)
    mask = np.arange(length) >= max(1, length - trained)
    return TrainingSample(
        token_ids=random.integers(0, 256, length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.full(length, -1, np.float32),
        advantages=np.ones(length, np.float32),
        media=media,
        name=str(length),
    )


def image(seed: int) -> MediaItem:
    side = int(PATCHES**0.5)
    patches = np.random.default_rng(seed).integers(0, 256, (PATCHES, 3, 256), dtype=np.uint8)
    tensors = {"pixel_values": StillPatches(patches, 2), "image_grid_thw": np.array([1, side, side])}
    return MediaItem("image", str(seed), MediaSource.of(b"%d" % seed), tensors, PATCHES // 4, None)


def with_images(text: TrainingSample, images: list[MediaItem]) -> TrainingSample:
    count = min(1 + len(text) % IMAGES, (len(text) - 2) // (PATCHES // 4))
    ranges = [PlaceholderRange(1 + number * PATCHES // 4, PATCHES // 4) for number in range(count)]
    return replace(text, media=tuple(zip(images, ranges, strict=False)))


def collating(table: Table) -> None:
    starts = [100 + number * 900 for number in range(IMAGES)]
    samples = []
    for row in range(ROWS):
        media = tuple(
            (image(row * IMAGES + n), PlaceholderRange(start, PATCHES // 4)) for n, start in enumerate(starts)
        )
        samples.append(sample(TOKENS, media, trained=500))

    for layout in get_args(Layout):
        collate = partial(TrainingBatch.from_samples, samples, pad_id=0, layout=layout)
        tokens = token_tensors(collate())
        tensors = [*tokens, *pixel_tensors(collate())]
        name = f"collate {ROWS} x {TOKENS:,} tokens, {IMAGES} images each, {layout} ({megabytes(tensors):.0f} MB)"
        add(table, name, fastest({"": lambda: pixel_tensors(collate()), "memcpy": partial(copy, tensors)}, 15))  # noqa: B023
        name = f"the same without pixels ({megabytes(tokens):.1f} MB)"
        add(table, name, fastest({"": collate, "memcpy": partial(copy, tokens)}, 15))


def token_tensors(batch: TrainingBatch) -> list[torch.Tensor]:
    names = ("input_ids", "attention_mask", "loss_mask", "logprobs", "advantages", "position_ids", "sequence_ids")
    return [getattr(batch, name) for name in names]


def pixel_tensors(batch: TrainingBatch) -> list[torch.Tensor]:
    tensors = [concatenated_media(batch, name) for name in ("pixel_values", "image_grid_thw")]
    return [tensor for tensor in tensors if tensor is not None]


def copy(tensors: list[torch.Tensor]) -> list[np.ndarray]:
    return [tensor.numpy().copy() for tensor in tensors]


def megabytes(tensors: list[torch.Tensor]) -> float:
    return sum(tensor.nbytes for tensor in tensors) / 1e6


def realistic_lengths() -> np.ndarray:
    """Agent episodes: log-normal around 2,600 tokens, three in a hundred cut off by the limit."""
    lengths = np.random.default_rng(0).lognormal(np.log(2600), 0.9, SAMPLES).astype(np.int64)
    return np.clip(lengths, 64, BUDGET // 2)


def first_fit_in_order(lengths: np.ndarray) -> int:
    """The number of rows; each sample goes to the first row with room."""
    free = np.empty(len(lengths), dtype=np.int64)
    rows = 0
    for length in lengths.tolist():
        fits = free[:rows] >= length
        row = int(fits.argmax()) if rows else 0
        if not rows or not fits[row]:
            row, rows = rows, rows + 1
            free[row] = BUDGET
        free[row] -= length
    return rows


def balance_only(lengths: np.ndarray) -> int:
    """The number of rows; each sample goes to the row with the lowest cost, with the fewest rows that hold all."""
    costs = token_cost(lengths, HIDDEN)
    order = np.argsort(-lengths).tolist()
    rows = -(-int(lengths.sum()) // BUDGET)
    while True:
        rows = -(-rows // RANKS) * RANKS
        tokens, sums = np.zeros(rows), np.zeros(rows)
        for item in order:
            row = int(sums.argmin())
            tokens[row] += lengths[item]
            sums[row] += costs[item]
        if tokens.max() <= BUDGET:
            return rows
        rows += 1


def packing(table: Table) -> None:
    lengths = realistic_lengths()
    texts = [sample(int(length)) for length in lengths]
    images = [image(number) for number in range(8)]
    mixed = [with_images(text, images) if number % 2 else text for number, text in enumerate(texts)]
    pack = partial(pack_samples, max_tokens=BUDGET, ranks=RANKS, hidden_size=HIDDEN)
    sides: dict[str, Callable[[], object]] = {
        "": lambda: pack(texts),
        "first-fit in order": lambda: first_fit_in_order(lengths),
        "balance only": lambda: balance_only(lengths),
    }
    add(table, f"pack {SAMPLES:,} texts for {RANKS} ranks, rows of {BUDGET:,} tokens", fastest(sides, 5))
    plan = pack(texts)

    def filled(rows: int) -> str:
        return f"{lengths.sum() / (BUDGET * (-(-rows // RANKS) * RANKS)):.1%}"

    others = [("first-fit in order", first_fit_in_order(lengths)), ("balance only", balance_only(lengths))]
    table.add_row(
        "filled (imbalance)",
        f"{plan.filled:.1%} ({plan.imbalance:.2%})",
        "\n".join(f"{name}: {filled(rows)}" for name, rows in others),
        "",
    )
    with_patches = partial(pack, mixed, max_patches=PATCH_BUDGET)
    uniform = partial(with_patches, uniform_modality=True)
    one_image_row = partial(first_fit_in_order, lengths[::2])
    rows = one_image_row() + int(np.count_nonzero(lengths[1::2]))
    times = fastest({"": with_patches, "uniform modality": uniform, "image samples alone": one_image_row}, 5)
    add(table, f"the same, every second one with 1 to {IMAGES} images, {PATCH_BUDGET:,} patches", times)
    table.add_row(
        "filled (imbalance)",
        f"{with_patches().filled:.1%} ({with_patches().imbalance:.2%})",
        f"uniform modality: {uniform().filled:.1%} ({uniform().imbalance:.2%})\nimage samples alone: {filled(rows)}",
        "",
    )


def padded_and_packed(table: Table) -> None:
    """Many short samples and a few long ones: packed rows as long as the longest, padded batches of 16 samples."""
    with tempfile.TemporaryDirectory() as directory:
        tiny_qwen3_vl(directory)
        model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    lengths = np.random.default_rng(0).lognormal(np.log(60), 1.0, 64).astype(int).clip(16, LONGEST)
    # Every sample has other tokens: equal samples of a padded batch are computed once.
    samples = [sample(int(length), trained=16, seed=number) for number, length in enumerate(lengths)]
    plan = pack_samples(samples, max_tokens=LONGEST, hidden_size=64)
    sides = {
        "": list(plan.batches(0, pad_id=0)),
        "padded, in order": list(micro_batches(samples, rows=16, pad_id=0)),
        "padded, by length": list(micro_batches(sorted(samples, key=len), rows=16, pad_id=0)),
    }

    def step(batches: list[TrainingBatch]) -> float:
        logprobs = [token_logprobs(model, batch) for batch in batches]
        total = torch.stack([each.sum() for each in logprobs]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return float(total.detach())

    totals = {name: step(batches) for name, batches in sides.items()}
    assert np.ptp(list(totals.values())) < 0.02, totals
    calls: dict[str, Callable[[], object]] = {name: partial(step, batches) for name, batches in sides.items()}
    name = (
        f"log-probabilities and gradients, {len(samples)} samples of {lengths.min()} to {lengths.max()} tokens, packed"
    )
    add(table, name, fastest(calls, 5))


def add(table: Table, name: str, seconds: dict[str, float]) -> None:
    ours = seconds.pop("")
    table.add_row(
        name,
        f"{ours * 1e3:,.1f} ms",
        "\n".join(f"{other}: {time * 1e3:,.1f} ms" for other, time in seconds.items()),
        "\n".join(f"{ours / time:.2f}" for time in seconds.values()),
    )


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title="training batches, one thread", title_justify="left")
    for column in ("", "mmrollouts", "other", "mmrollouts / other"):
        table.add_column(column, justify="left" if not column else "right")
    collating(table)
    packing(table)
    padded_and_packed(table)
    Console(width=150).print(table)
    report_memory(hidden_size=64)


if __name__ == "__main__":
    main()
