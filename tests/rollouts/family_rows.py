"""Conversations with media as training samples, and their log-probabilities by a plain forward pass."""

import functools
import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from audio_models import AUDIO_MODELS, ONE_SOUND, PADDING_CHANGES, SEEING, audio_family
from model_families import VIDEO_FAMILIES, save, save_family
from PIL import Image

from renderers import load_renderer
from rollouts.training import TrainingSample

RATE = 16000
COMPLETION = [65, 66, 67, 70]
_TYPES = ("token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class Row:
    """A conversation of one user message with media, and the sample of it with a completion."""

    text: str
    images: tuple[np.ndarray, ...]
    videos: tuple[np.ndarray, ...]
    sounds: tuple[np.ndarray, ...]
    sample: TrainingSample

    @property
    def placeholder_id(self) -> int:
        """The id of a token that stands for features of the last medium."""
        return int(self.sample.token_ids[self.sample.media[-1][1].runs[0][0]])


class LoadedFamily:
    """A tiny model with its renderer and its processor."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        hears = name in AUDIO_MODELS
        model_class = AUDIO_MODELS[name][0] if hears else transformers.AutoModelForImageTextToText
        self.directory = save(*audio_family(name), model_class, directory) if hears else save_family(name, directory)
        self.renderer = load_renderer(directory)
        self.processor = transformers.AutoProcessor.from_pretrained(directory)
        self.model = model_class.from_pretrained(directory, dtype=torch.float32).eval()
        self.restart()

    def restart(self) -> None:
        """Make the same pictures and sounds again."""
        self._seeds = itertools.count()

    def keep(self, directory: tempfile.TemporaryDirectory[str]) -> None:
        self._kept = directory

    def pixels(self, *shape: int) -> np.ndarray:
        return np.random.default_rng(next(self._seeds)).integers(0, 256, (*shape, 3), dtype=np.uint8)

    def sound(self, seconds: float) -> np.ndarray:
        """A tone with noise at the processor's rate, float32."""
        rng = np.random.default_rng(next(self._seeds))
        times = np.arange(round(seconds * RATE)) / RATE
        tone = np.sin(2 * np.pi * rng.uniform(200, 2000) * times)
        return (0.3 * tone + rng.uniform(-0.05, 0.05, len(times))).astype(np.float32)

    def row(self, text: str, images: Any = (), videos: Any = (), completion: Any = COMPLETION, sounds: Any = ()) -> Row:
        parts = [{"type": "image", "image": image} for image in images]
        parts += [{"type": "video", "video": video, "fps": 2.0} for video in videos]
        parts += [{"type": "audio", "audio": sound, "sampling_rate": RATE} for sound in sounds]
        rendered = self.renderer.render(
            _conversation([*parts, {"type": "text", "text": text}]), add_generation_prompt=True
        )
        media = rendered.multi_modal_data.items_with_ranges() if rendered.multi_modal_data else []
        ids = np.array([*rendered.token_ids, *completion], np.int32)
        mask = np.arange(len(ids)) >= len(rendered)
        zeros = np.zeros(len(ids), np.float32)
        sample = TrainingSample(ids, mask, zeros, zeros, tuple(media), name=text)
        return Row(text, tuple(images), tuple(videos), tuple(sounds), sample)

    def rows(self) -> list[Row]:
        """Text, one image, several images; where the processor takes videos, one video, and an image beside a video."""
        rows = [
            self.row("only text"),
            self.row("one", [self.pixels(32, 48)]),
            self.row("two", [self.pixels(40, 40), self.pixels(24, 64)]),
        ]
        if self.name in VIDEO_FAMILIES:
            rows.append(self.row("moving", videos=[self.pixels(4, 32, 32)]))
            rows.append(self.row("both", [self.pixels(32, 32)], [self.pixels(6, 32, 48)]))
        return rows

    def rows_with_sounds(self) -> list[Row]:
        """Text, a short sound, two sounds; where the model sees, a picture, and a sound beside a picture or a video."""
        rows = [
            self.row("only text"),
            self.row("short", sounds=[self.sound(0.3)]),
            self.row("two", sounds=[self.sound(2.5), self.sound(2.5 if self.name in PADDING_CHANGES else 0.8)]),
        ]
        if self.name in SEEING:
            picture = self.pixels(56, 84)
            rows += [self.row("seen", [picture]), self.row("both", [picture], sounds=[self.sound(1.0)])]
        if self.name in SEEING and "video" in self.renderer.processors:
            rows.append(self.row("moving", [picture], [self.pixels(4, 56, 84)], sounds=[self.sound(0.6)]))
        return rows

    def plain_logprobs(self, row: Row) -> torch.Tensor:
        """float32 (completion,): by `model(**processor(...))` with the completion appended; checks the prompt's ids."""
        parts: list[dict[str, Any]] = [{"type": "image"} for _ in row.images] + [{"type": "video"} for _ in row.videos]
        parts += [{"type": "audio"} for _ in row.sounds]
        messages = _conversation([*parts, {"type": "text", "text": row.text}])
        # A processor may have lost the template that its tokenizer has.
        template = self.processor if self.processor.chat_template else self.processor.tokenizer
        text = template.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        media: dict[str, Any] = {}
        if row.images:
            media["images"] = [[Image.fromarray(image) for image in row.images]]
        if row.videos:
            known = [_metadata(video) for video in row.videos]
            media |= {"videos": list(row.videos), "videos_kwargs": {"video_metadata": known}}
        if row.sounds:
            media |= {"audio": list(row.sounds), "audio_kwargs": {"sampling_rate": RATE}}
        bos = self.processor.tokenizer.bos_token
        own = {"return_tensors": "pt", "add_special_tokens": bos is None or not text.startswith(bos)}
        prompt = row.sample.token_ids[~row.sample.loss_mask]
        if self.name in ONE_SOUND and len(row.sounds) > 1:  # the processor takes one sound a text
            single = messages[0]["content"][-2:]
            text = template.apply_chat_template(_conversation(single), add_generation_prompt=True, tokenize=False)
            inputs = dict(self.processor(text=[text] * len(row.sounds), text_kwargs={"padding": True}, **own, **media))
            inputs["input_ids"] = torch.from_numpy(prompt.astype(np.int64))[None]
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        else:
            inputs = dict((self.processor if media else self.processor.tokenizer)(text=[text], **own, **media))
        completion = torch.from_numpy(row.sample.token_ids[row.sample.loss_mask].astype(np.int64))[None]
        assert inputs["input_ids"][0].tolist() == prompt.tolist()
        fill = {"input_ids": completion, "attention_mask": torch.ones_like(completion)}
        fill |= dict.fromkeys(_TYPES, torch.zeros_like(completion))
        inputs |= {name: torch.cat([inputs[name], fill[name]], dim=1) for name in fill.keys() & inputs.keys()}
        if (pixels := inputs.get("pixel_values")) is not None:
            inputs["pixel_values"] = pixels.float()  # bfloat16 of Llama 4's processor
        with torch.no_grad():
            logits = self.model(**inputs).logits[0, -len(completion[0]) - 1 : -1]
        return torch.log_softmax(logits.float(), -1).gather(1, completion.T)[:, 0]


def loaded_family(name: str) -> LoadedFamily:
    """One for all tests of a process, restarted: the pictures of a test do not depend on the tests before it."""
    family = _kept_family(name)
    family.restart()
    return family


@functools.cache
def _kept_family(name: str) -> LoadedFamily:
    """Its directory is removed at the end of the process."""
    directory = tempfile.TemporaryDirectory(prefix=name)
    family = LoadedFamily(name, Path(directory.name))
    family.keep(directory)
    return family


def _conversation(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": parts}]


def _metadata(video: np.ndarray) -> dict[str, Any]:
    count, height, width, _ = video.shape
    sizes = {"total_num_frames": count, "width": width, "height": height}
    return {**sizes, "fps": 2.0, "duration": count / 2.0, "frames_indices": list(range(count))}
