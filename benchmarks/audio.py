"""Time, memory and wire of sounds: from a file to a model's features, ours beside transformers' own path.

    python benchmarks/audio.py [--check]

transformers' path is `load_audio` (soundfile and soxr) and the feature extractor of the model, on the same file. The
sides alternate, sound by sound; before that, their samples and features must be equal. Times are medians of processor
time, ratios medians over the rounds.
"""

import argparse
import base64
import io
import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import soundfile
from render import Report, milliseconds
from transformers.audio_utils import load_audio

from renderers import MediaItem, MediaPolicy, MediaSource, MediaStore, load_renderer
from renderers.media.audio_decoding import decode_audio
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.feature_decoding import decode_item
from rollouts.engines.vllm.feature_encoding import encode_features
from rollouts.engines.vllm.generate import request_body
from rollouts.engines.vllm.media_mode import MediaMode
from rollouts.engines.vllm.media_payload import media_payload
from rollouts.engines.vllm.request_checks import check_request
from rollouts.engines.vllm.sounds import sound_format

SECONDS = 30
ROUNDS = 11
# Family -> the arguments with which its processor calls the feature extractor.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_audio": {"return_attention_mask": True, "padding": "max_length"},
    "gemma3n": {},
}
NAMES = {"qwen2_audio": "Whisper log-mel, 128 bins", "gemma3n": "Gemma 3n log-mel"}
FILES = {
    "MP3, 48 kHz stereo": (48000, 2, "MP3", "MPEG_LAYER_III"),
    "WAV, 48 kHz stereo": (48000, 2, "WAV", "PCM_16"),
    "FLAC, 44.1 kHz stereo": (44100, 2, "FLAC", "PCM_16"),
    "OGG Opus, 48 kHz mono": (48000, 1, "OGG", "OPUS"),
    "WAV, 16 kHz mono": (16000, 1, "WAV", "PCM_16"),
}
TARGET_FILE = "MP3, 48 kHz stereo"


def sound_file(seed: int, rate: int, channels: int, format: str, subtype: str) -> bytes:
    """A sweep, its overtones and noise, as long as a model of speech hears."""
    times = np.arange(SECONDS * rate) / rate
    sweep = np.outer((200 + 20 * times) * times, 2 * np.pi * np.arange(1, channels + 1))
    noise = np.random.default_rng(seed).standard_normal((len(times), channels))
    buffer = io.BytesIO()
    soundfile.write(buffer, 0.4 * np.sin(sweep) + 0.05 * noise, rate, format=format, subtype=subtype)
    return buffer.getvalue()


def as_message(data: bytes | str) -> list[dict[str, Any]]:
    if isinstance(data, str):
        part: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": data, "format": "mp3"}}
    else:
        part = {"type": "audio", "audio": data}
    return [{"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}]


class Sides:
    """Ours and transformers' path for one family of models, in this process."""

    def __init__(self, family: str, directory: Path) -> None:
        import audio_families

        processor: Any = audio_families.FAMILIES[family]()
        processor.save_pretrained(directory)
        self.renderer = load_renderer(directory, media_store=MediaStore(max_bytes=2**30))
        self._extractor: Any = processor.feature_extractor
        self.rate: int = self._extractor.sampling_rate
        self._arguments = {"sampling_rate": self.rate, "return_tensors": "np", **FAMILIES[family]}

    def item(self, data: bytes | str) -> MediaItem:
        media = self.renderer.render(as_message(data)).multi_modal_data
        assert media is not None
        return media.media_items["audio"][0]

    def stock(self, path: Path) -> np.ndarray:
        samples = load_audio(str(path), self.rate, backend="soundfile")
        features: np.ndarray = self._extractor(samples, **self._arguments)["input_features"]
        return features


def processor_seconds(call: Callable[[], Any]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def compare_new(report: Report, family: str, directory: Path) -> None:
    sides, path = Sides(family, directory), directory / "sound"
    title = f"A new sound of {SECONDS} s to features: {NAMES[family]}"
    with report.table(title, "mmrollouts", "transformers", "ours/transformers") as table:
        for name, form in FILES.items():
            ours, stock = [], []
            for turn in range(-2, ROUNDS):  # the first two warm up
                data = sound_file(abs(hash((family, name, turn))), *form)
                path.write_bytes(data)
                if turn == -2:
                    np.testing.assert_array_equal(
                        decode_audio(MediaSource.of(data), MediaPolicy(), sides.rate),
                        load_audio(str(path), sides.rate, backend="soundfile"),
                    )
                    expected = sides.stock(path)
                    np.testing.assert_array_equal(sides.item(data)["input_features"].reshape(expected.shape), expected)
                    continue
                taken = (processor_seconds(lambda d=data: sides.item(d)), processor_seconds(lambda: sides.stock(path)))
                if turn >= 0:
                    ours.append(taken[0])
                    stock.append(taken[1])
            ratio = median(a / b for a, b in zip(ours, stock, strict=True))
            cells = report.check(ratio, 1.0, "<= 1.0x") if name == TARGET_FILE else ("", "")
            table.add_row(name, milliseconds(median(ours)), milliseconds(median(stock)), f"{ratio:.2f}x", *cells)


def compare_seen(report: Report, directory: Path) -> None:
    sides, path = Sides("qwen2_audio", directory), directory / "sound"
    data = sound_file(1, *FILES[TARGET_FILE])
    path.write_bytes(data)
    encoded = base64.b64encode(data).decode()
    with report.table("A prompt with a sound seen before", "mmrollouts", "transformers", "peer/ours") as table:
        for name, value in (("bytes of a file", data), ("input_audio (base64)", encoded)):
            sides.item(value)
            ours = median(processor_seconds(lambda v=value: sides.item(v)) for _ in range(10 * ROUNDS))
            stock = median(processor_seconds(lambda: sides.stock(path)) for _ in range(ROUNDS))
            cells = report.check(ours / stock, 1 / 50, ">= 50x")
            table.add_row(name, milliseconds(ours), milliseconds(stock), f"{stock / ours:,.0f}x", *cells)


def measure_memory(report: Report, directory: Path) -> None:
    sides, path = Sides("qwen2_audio", directory), directory / "sound"
    with report.table(
        "Memory of a sound of 30 s", "file", "features held", "decoding, most", "load_audio, most"
    ) as table:
        for name, form in FILES.items():
            data = sound_file(2, *form)
            path.write_bytes(data)
            item, source = sides.item(data), MediaSource.of(data)
            held = sum(item[tensor].nbytes for tensor in item)
            ours = most_bytes(lambda s=source: decode_audio(s, MediaPolicy(), sides.rate))
            stock = most_bytes(lambda: load_audio(str(path), sides.rate, backend="soundfile"))
            figures = (len(data), held, ours, stock)
            table.add_row(name, *(f"{figure / 1e6:,.1f} MB" for figure in figures), "", "")


def most_bytes(call: Callable[[], Any]) -> int:
    """The most memory that Python and numpy held at once during a call, its result included."""
    tracemalloc.start()
    call()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def compare_wire(report: Report, directory: Path) -> None:
    """Bytes of the requests of an episode of 20 turns with a new sound of 5 s each, as `VLLMEngine` makes them."""
    sides, rate = Sides("qwen2_audio", directory), 16_000
    second, *sounds = (
        {"type": "audio", "audio": np.random.default_rng(seed).standard_normal(count), "sampling_rate": rate}
        for seed, count in enumerate([rate, *[5 * rate] * 20])
    )
    rendered = sides.renderer.render([{"role": "user", "content": [second]}])
    assert rendered.multi_modal_data is not None
    ((item, placeholder),) = rendered.multi_modal_data.items_with_ranges()
    features = json.loads(b"".join(encode_features(rendered.multi_modal_data, pixel_dtype="float32")))
    server = ServerCapabilities(
        version="0.32.0",
        model="model",
        max_model_len=10**6,
        scale_out=True,
        pixel_dtype=None,
        placeholder_ids={"audio": rendered.token_ids[placeholder.offset]},
        merge_area=None,
        control=True,
        sounds=sound_format(decode_item(features["kwargs_data"]["audio"][0]), item.num_tokens),
    )
    modes: tuple[MediaMode, ...] = ("features", "content_parts")
    with report.table("Requests of 20 turns, a sound each", "bytes", "of the sounds, once", "ratio") as table:
        for mode in modes:
            messages: list[dict[str, Any]] = []
            held: set[str] = set()
            sent = once = 0
            for sound in sounds:
                messages.append({"role": "user", "content": [sound, {"type": "text", "text": "And this?"}]})
                prompt = sides.renderer.render(messages, add_generation_prompt=True)
                messages.append({"role": "assistant", "content": "A tone."})
                request = GenerateRequest(
                    prompt.token_ids,
                    SamplingParams(max_tokens=64),
                    prompt.multi_modal_data,
                    placeholder_token_ids=prompt.placeholder_token_ids,
                )
                check_request(request, server)
                payload = media_payload(request, mode, server)
                named, field = payload.body_field(()), payload.body_field(payload.names.keys() - held)
                held |= payload.names.keys()
                options = {"model": "model", "cache_salt": None, "chunks": None, "return_prompt": True}
                body = request_body(request, payload.prompt_ids, field, **options)  # type: ignore[arg-type]
                sent += sum(map(len, body))
                once += sum(map(len, field)) - sum(map(len, named))
            ratio = sent / once
            cells = report.check(ratio, 1.05, "<= 1.05x")
            table.add_row(mode, f"{sent / 1e6:,.1f} MB", f"{once / 1e6:,.1f} MB", f"{ratio:.3f}x", *cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "renderers"))
    report = Report()
    with tempfile.TemporaryDirectory() as directory:
        for family in FAMILIES:
            compare_new(report, family, Path(directory))
        compare_seen(report, Path(directory))
        measure_memory(report, Path(directory))
        compare_wire(report, Path(directory))
    if arguments.check and report.missed:
        raise SystemExit(f"{report.missed} target(s) missed")


if __name__ == "__main__":
    main()
