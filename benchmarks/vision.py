"""Time and memory of image processing: ours, transformers' Qwen3-VL processor, and the PyPI package `renderers`.

    python benchmarks/vision.py [--check]

The first run installs the other package, with torch, into a virtual environment under the cache directory. The sides
alternate, image by image, on the same images; before that, their tokens and pixels must be equal. Times
are medians of wall-clock time, since all sides may use threads; files of many sizes are also compared in processor time
with one thread each. Linux only: memory is read from /proc.
"""

import argparse
import base64
import importlib
import io
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image
from render import Report, milliseconds
from render_sides import Worker, install_peer

from renderers import MediaStore, load_renderer

SIDE = 1024
SIZES = ((200, 150), (400, 300), (640, 480), (1000, 750), (1920, 1080), (4000, 3000))
FORMATS: Mapping[str, Mapping[str, int]] = {
    "JPEG": {"quality": 90},
    "PNG": {"compress_level": 1},
    "WEBP": {"method": 0},
}
ROUNDS = 15
STORE = 256 * 2**20
IMAGES_THROUGH_STORE = 10_000
# torchvision's build for CUDA beside torch's for CPU; does nothing elsewhere.
_TORCHVISION_FIX = Path(__file__).parents[1] / ".ci" / "torchvision_on_cpu.py"


def photograph(seed: int, width: int = SIDE, height: int = SIDE) -> Image.Image:
    """An image like a photograph: smooth shapes and a little noise."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (height // 32, width // 32, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = smooth + random.integers(-6, 7, smooth.shape, dtype=np.int16)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, format: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **FORMATS[format])
    return buffer.getvalue()


def data_url(data: bytes, format: str) -> str:
    return f"data:image/{format.lower()};base64,{base64.b64encode(data).decode()}"


def as_message(image: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}]}]


class Sides:
    """Ours and transformers' processors in this process."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoImageProcessor, Qwen2VLImageProcessorPil

        self.renderer = load_renderer(model_dir)
        # Integer pixels, as on our side: neither side computes floats, which a server does not take.
        options = {"do_rescale": False, "do_normalize": False}
        self._torchvision = AutoImageProcessor.from_pretrained(model_dir, **options)
        self._pillow = Qwen2VLImageProcessorPil.from_pretrained(model_dir, **options)
        assert self._torchvision.backend == "torchvision"

    def ours(self, image: Any) -> np.ndarray:
        media = self.renderer.render(as_message(image)).multi_modal_data
        assert media is not None
        return media.media_items["image"][0]["pixel_values"]

    def torchvision(self, image: Any) -> np.ndarray:
        return np.asarray(self._torchvision(images=[opened(image)], return_tensors="np")["pixel_values"])

    def pillow(self, image: Any) -> np.ndarray:
        return np.asarray(self._pillow(images=[opened(image)], return_tensors="np")["pixel_values"])


def opened(image: Any) -> Image.Image:
    """Opens the bytes of a file as a user of transformers does."""
    return Image.open(io.BytesIO(image)).convert("RGB") if isinstance(image, bytes) else image


def timed(call: Callable[[Any], Any], argument: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    call(argument)
    return clock() - started


FORMS: Mapping[str, Callable[[int], Any]] = {
    f"{SIDE}x{SIDE} in memory": photograph,
    f"{SIDE}x{SIDE}, JPEG file": lambda seed: encoded(photograph(seed), "JPEG"),
    f"{SIDE}x{SIDE}, PNG file": lambda seed: encoded(photograph(seed), "PNG"),
}


def compare_new(report: Report, sides: Sides, peer: Worker) -> None:
    columns = ("mmrollouts", "torchvision", "Pillow", "renderers", "ours/faster")
    with report.table("A new image to uint8 patches (renderers: to float32, its only form)", *columns) as table:
        for name, make in FORMS.items():
            seconds: dict[str, list[float]] = {"ours": [], "torchvision": [], "pillow": [], "peer": []}
            for turn in range(-2, ROUNDS):  # the first two warm up
                image = make(hash((name, turn)) % 2**32)
                np.testing.assert_array_equal(sides.ours(image), sides.torchvision(image))
                image = make(hash((name, turn, "timed")) % 2**32)
                taken = {
                    "ours": timed(sides.ours, image),
                    "torchvision": timed(sides.torchvision, image),
                    "pillow": timed(sides.pillow, image),
                }
                if isinstance(image, bytes):
                    url = data_url(image, "JPEG" if "JPEG" in name else "PNG")
                    taken["peer"] = peer.seconds("render", [{"urls": [url]}])[0]
                for column, value in taken.items():
                    if turn >= 0:
                        seconds[column].append(value)
            medians = {column: median(values) for column, values in seconds.items() if values}
            others = [value for column, value in medians.items() if column != "ours"]
            ratio = medians["ours"] / min(others)
            cells = [milliseconds(medians[column]) if column in medians else "" for column in seconds]
            table.add_row(name, *cells, f"{ratio:.2f}x", *report.check(ratio, 1.0, "<= 1x"))


def compare_sizes(report: Report, sides: Sides) -> None:
    """With the threads that torch takes by default, and in processor time with one thread each."""
    import torch

    threads = torch.get_num_threads()
    modes = {"wall": (threads, time.perf_counter), "one thread": (1, time.process_time)}
    columns = ("mmrollouts", "torchvision", "ours/torchvision", "processor time, one thread each")
    with report.table(f"A file to uint8 patches; torch with {threads} threads", *columns) as table:
        for format, (width, height) in itertools.product(FORMATS, SIZES):
            medians: dict[str, tuple[float, float]] = {}
            for mode, (count, clock) in modes.items():
                torch.set_num_threads(count)
                seconds = []
                for turn in range(-1, ROUNDS if width < 4000 else 3):
                    image = encoded(photograph(hash((width, format, mode, turn)) % 2**32, width, height), format)
                    if turn < 0:
                        np.testing.assert_array_equal(sides.ours(image), sides.torchvision(image))
                    else:
                        seconds.append((timed(sides.ours, image, clock), timed(sides.torchvision, image, clock)))
                ours, theirs = zip(*seconds, strict=True)
                medians[mode] = median(ours), median(theirs)
            torch.set_num_threads(threads)
            ours_wall, theirs_wall = medians["wall"]
            one_thread = medians["one thread"][0] / medians["one thread"][1]
            table.add_row(
                f"{width}x{height} {format}",
                milliseconds(ours_wall),
                milliseconds(theirs_wall),
                f"{ours_wall / theirs_wall:.2f}x",
                f"{one_thread:.2f}x",
                *report.check(ours_wall / theirs_wall, 1.0, "<= 1x"),
            )


def compare_seen(report: Report, ours: Worker, peer: Worker) -> None:
    with report.table("A prompt whose images were seen before", "mmrollouts", "renderers", "peer/ours") as table:
        for count in (1, 8):
            for format in ("JPEG", "PNG"):
                job = {"urls": [data_url(encoded(photograph(seed), format), format) for seed in range(count)]}
                if ours.answer("render", job) != peer.answer("render", job):
                    raise SystemExit(f"the sides do not agree on the tokens of {count} {format} images")
                seconds: dict[str, list[float]] = {"ours": [], "peer": []}
                for _ in range(ROUNDS):
                    seconds["ours"] += ours.seconds("render", [job])
                    seconds["peer"] += peer.seconds("render", [job])
                mine, theirs = median(seconds["ours"]), median(seconds["peer"])
                target_cells = report.check(mine / theirs, 1 / 50, ">= 50x")
                name = f"{count} {format} image{'s' * (count > 1)} as data URLs"
                table.add_row(name, milliseconds(mine), milliseconds(theirs), f"{theirs / mine:,.0f}x", *target_cells)


def compare_held(report: Report, ours: Worker, peer: Worker) -> None:
    with report.table(f"Bytes held for a {SIDE}x{SIDE} image", "mmrollouts", "renderers") as table:
        for format in ("JPEG", "PNG"):
            job = {"urls": [data_url(encoded(photograph(99), format), format)]}
            mine, theirs = ours.answer("held", job), peer.answer("held", job)
            target_cells = report.check(mine, 6.4e6, "<= 6.4 MB")
            table.add_row(f"{format}, its file included in ours", megabytes(mine), megabytes(theirs), *target_cells)


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def memory_bytes() -> int:
    """Resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no VmRSS in /proc/self/status")


def grow(model_dir: Path) -> Iterator[str]:
    """Send images through a store and print the growth of memory; run in a separate process."""
    store = MediaStore(STORE)
    renderer = load_renderer(model_dir, media_store=store)
    for seed in range(50):
        renderer.render(as_message(small_image(seed)))
    before, most = memory_bytes(), 0
    for seed in range(IMAGES_THROUGH_STORE):
        renderer.render(as_message(small_image(seed)))
        if seed % 100 == 0:
            most = max(most, memory_bytes())
    yield str(max(most, memory_bytes()) - before)


def small_image(seed: int) -> str:
    """A data URL; every seed has a different size, so that freed blocks do not fit the next image."""
    side = 192 + seed % 31 * 8
    random = np.random.default_rng(seed)
    return data_url(encoded(Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8)), "PNG"), "PNG")


def measure_growth(report: Report, model_dir: Path) -> None:
    command = [sys.executable, __file__, "--grow", str(model_dir)]
    growth = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    with report.table(f"{IMAGES_THROUGH_STORE:,} images through a store of 256 MB", "growth of the process") as table:
        table.add_row("mmrollouts", f"{growth / 2**20:,.0f} MB", *report.check(growth, 320 * 2**20, "<= 320 MB"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    parser.add_argument("--grow", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.grow:
        print(*grow(arguments.grow))
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "renderers"))
    model_dir: Path = importlib.import_module("vision_models").vision_model_dir("qwen3-vl")
    python = install_peer("torch", "torchvision", "pillow")
    subprocess.run([python, _TORCHVISION_FIX], check=True)
    report = Report()
    script = Path(__file__).with_name("vision_sides.py")
    with (
        Worker("ours", Path(sys.executable), model_dir, script=script) as ours,
        Worker("peer", python, model_dir, script=script) as peer,
    ):
        sides = Sides(model_dir)
        compare_new(report, sides, peer)
        compare_sizes(report, sides)
        compare_seen(report, ours, peer)
        compare_held(report, ours, peer)
    measure_growth(report, model_dir)
    if arguments.check and report.missed:
        raise SystemExit(f"{report.missed} target(s) missed")


if __name__ == "__main__":
    main()
