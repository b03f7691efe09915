"""The cost of encoding an image as vLLM's `features`, compared with vLLM's own encoder in its own environment.

Both begin with the processed image in memory, ours as the patches that a renderer stores, theirs as the tensor of its
processor; both end with base64. Times are medians of processor time; each side uses one thread. Memory is the peak of
the allocations, in multiples of the tensor's bytes, of which the base64 itself is 1.33. Called by `engine.py`.
"""

import json
import os
import subprocess
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import numpy as np
from render import Report, milliseconds

from renderers import MultiModalData, load_renderer
from rollouts.engines.vllm.feature_encoding import encode_features
from rollouts.engines.vllm.tensors import ITEM_BYTES, PixelDtype

SIDE = 1024
ROUNDS = 15
MOST_SECONDS = 0.015
MOST_COPIES = 2.2
DTYPES: tuple[PixelDtype, ...] = ("uint8", "bfloat16", "float32")

#: Prints the seconds of each round for each dtype; run by the Python of an environment in which vLLM is installed.
_THEIR_SIDE = """
import json, sys, time
import torch
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
from vllm.multimodal.inputs import (
    MultiModalBatchedField, MultiModalFieldElem, MultiModalFlatField, MultiModalKwargsItem,
)

rows, width, rounds, dtypes = json.loads(sys.argv[1])
seconds = {}
for dtype in dtypes:
    item = MultiModalKwargsItem({
        "image_grid_thw": MultiModalFieldElem(torch.tensor([1, 64, 64]), MultiModalBatchedField(keep_on_cpu=True)),
        "pixel_values": MultiModalFieldElem(
            torch.randint(0, 256, (rows, width)).to(getattr(torch, dtype)),
            MultiModalFlatField(slices=[(slice(0, rows),)]),
        ),
    })
    encode_mm_kwargs_item(item)
    seconds[dtype] = []
    for _ in range(rounds):
        start = time.process_time()
        encode_mm_kwargs_item(item)
        seconds[dtype].append(time.process_time() - start)
print(json.dumps(seconds))
"""


def compare_encoding(report: Report, model_dir: Path, vllm_venv: Path | None) -> None:
    """One table: a 1024x1024 image in every pixel type. Without `vllm_venv` only our side is measured."""
    media = _media(model_dir)
    (pixels,) = (item["pixel_values"] for item in media.media_items["image"])
    theirs = {} if vllm_venv is None else _their_seconds(vllm_venv, pixels.shape)
    columns = ("mmrollouts", "copies", "vLLM's encoder")
    with report.table(f"Features of a {SIDE}x{SIDE} image, from pixels in memory to base64", *columns) as table:
        for dtype in DTYPES:
            seconds, copies = _our_cost(media, dtype, pixels.size * ITEM_BYTES[dtype])
            other = milliseconds(median(theirs[dtype])) if dtype in theirs else "-"
            # A server's default dtype; floats are two and four times the bytes.
            if dtype == "uint8":
                target_cells = report.check(seconds, MOST_SECONDS, f"<= {MOST_SECONDS * 1e3:.0f} ms")
                table.add_row(f"{dtype}, time", milliseconds(seconds), "", other, *target_cells)
            else:
                table.add_row(f"{dtype}, time", milliseconds(seconds), "", other, "", "")
            target_cells = report.check(copies, MOST_COPIES, f"<= {MOST_COPIES} copies")
            table.add_row(f"{dtype}, memory", "", f"{copies:.2f}", "", *target_cells)


def _media(model_dir: Path) -> MultiModalData:
    image = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    message = {"role": "user", "content": [{"type": "image", "image": image}]}
    media = load_renderer(model_dir).render([message]).multi_modal_data
    assert media is not None
    return media


def _our_cost(media: MultiModalData, dtype: PixelDtype, nbytes: int) -> tuple[float, float]:
    """Returns seconds, and the peak memory in multiples of the tensor's bytes."""

    def encode() -> object:
        return encode_features(media, pixel_dtype=dtype)

    return _seconds(encode), _most_bytes(encode) / nbytes


def _seconds(work: Callable[[], object]) -> float:
    work()
    rounds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        rounds.append(time.process_time() - start)
    return median(rounds)


def _most_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _their_seconds(venv: Path, shape: tuple[int, ...]) -> Mapping[str, list[float]]:
    done = subprocess.run(
        [venv / "bin" / "python", "-c", _THEIR_SIDE, json.dumps([*shape, ROUNDS, DTYPES])],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
    )
    seconds: Mapping[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return seconds
