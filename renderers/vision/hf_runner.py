"""Calls a model's own processor in transformers: media -> tensors and placeholder text."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from renderers.media.item import ExpansionPiece
from renderers.messages import Modality
from renderers.process.fork_reset import ProcessLock, register_fork_reset
from renderers.tokens.added_tokens import AddedToken, ControlPattern

#: What can be done for a model whose own processor cannot be run.
WITHOUT_PROCESSOR = (
    "let the inference server render (docs/vllm.md), or pass a processor of your own: "
    "load_renderer(..., processors=...) (docs/media.md)"
)
# The errors that processors raise for a configuration or an image that they cannot handle.
PROCESSOR_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
# Tensors made of the text, not of the media.
_TEXT_TENSORS = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "special_tokens_mask", "position_ids"}
)


class _Threads:
    """Those with which torch computes. A forked process lacks them, and would wait for ever."""

    def __init__(self) -> None:
        self._is_forked = False
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        self._is_forked = True

    def prepare(self) -> None:
        """In a forked process, let torch compute without them."""
        if self._is_forked:
            import torch

            torch.set_num_threads(1)
            self._is_forked = False


_threads = _Threads()


class Clip(NamedTuple):
    """A video: all its frames, uint8 (frames, height, width, 3), and frames per second (None: unknown)."""

    frames: np.ndarray
    fps: float | None


class Sound(NamedTuple):
    """Mono samples, float32 (samples,), at the sampling rate of the processor."""

    samples: np.ndarray


class ClipWithSound(NamedTuple):
    """A video, and the sound inside of it."""

    clip: Clip
    sound: Sound


Medium = Image.Image | Clip | Sound | ClipWithSound


class ProcessorOutput(NamedTuple):
    """The output for samples of one medium each: the batch's tensors, and a replacement text for each."""

    tensors: Mapping[str, np.ndarray]
    replacements: Sequence[str]


class ProcessorRunner:
    """A loaded processor of transformers and one modality of it. Safe to share between threads.

    `processor` is a `ProcessorMixin`; `marker` the token that it replaces; `lock` is held while it runs: tokenizers
    change their padding during a call ("Already borrowed"), and processors may keep state.
    """

    def __init__(self, processor: Any, modality: Modality, marker: str, lock: ProcessLock) -> None:
        self.name = type(processor).__name__
        self.modality = modality
        self.marker = marker
        self._processor = processor
        self._lock = lock
        self._text_tensors = _TEXT_TENSORS | frozenset(processor.tokenizer.model_input_names)
        added = [
            AddedToken(
                int(token_id),
                str(token.content),
                {flag: getattr(token, flag) for flag in ("special", "lstrip", "rstrip", "single_word")},
            )
            for token_id, token in processor.tokenizer.added_tokens_decoder.items()
        ]
        self._controls = ControlPattern([token for token in added if token.is_control])

    @property
    def part(self) -> Any:
        """The processor of this modality alone, with the settings for scaling pixels."""
        return part_of(self._processor, self.modality)

    @property
    def sampling_rate(self) -> int:
        """The rate of the processor of sounds, in hertz."""
        return int(part_of(self._processor, "audio").sampling_rate)

    def run(self, media: Sequence[Medium], *, text: str = "{}", raw: bool = False) -> ProcessorOutput:
        """Process media as a batch of samples, one medium and the text (`{}` is the marker) each.

        `raw` skips rescale and normalise and gives the pixels before them, uint8 where the class supports it.

        Raises one of `PROCESSOR_ERRORS`; errors of the processor itself pass unchanged.
        """
        options: dict[str, Any] = {"text_kwargs": {"return_tensors": None, "padding": False}}
        if self.modality == "image":
            # A list of lists: processors that nest images by sample would read a flat list as one sample.
            options |= {"images": [[image] for image in media], "images_kwargs": {"return_tensors": "pt"}}
        elif self.modality == "audio":
            sounds = [medium.samples for medium in media if isinstance(medium, Sound)]
            options |= self._audio_options(sounds)
            options["text_kwargs"]["return_tensors"] = "pt"  # some processors of sounds refuse anything else
        else:
            if both := [medium for medium in media if isinstance(medium, ClipWithSound)]:
                # The sound of each video is given, so that transformers does not decode it with torchcodec.
                options |= self._audio_options([medium.sound.samples for medium in both])
                options |= {"load_audio_from_video": True, "audio_from_video_indices": list(range(len(both)))}
            clips = [medium.clip for medium in both] or [medium for medium in media if isinstance(medium, Clip)]
            metadata = []  # `VideoMetadata` of transformers
            for frames, fps in clips:
                count, height, width, _ = frames.shape
                duration = None if fps is None else count / fps
                known = {"total_num_frames": count, "fps": fps, "width": width, "height": height, "duration": duration}
                metadata.append({**known, "frames_indices": list(range(count))})
            options |= {
                "videos": [clip.frames for clip in clips],
                "videos_kwargs": {"return_tensors": "pt", "video_metadata": metadata},
            }
        if raw:
            options[f"{self.modality}s_kwargs"] |= {"do_rescale": False, "do_normalize": False}
        texts = [text.format(self.marker) for _ in media]
        with self._lock, self._recorded_replacements() as offsets:
            _threads.prepare()
            output = self._processor(text=texts, **options)
        replaced = [[(each["type"], each["text"]) for each in sample] for sample in offsets]
        if replaced != [[(self.modality, self.marker)]] * len(media):
            raise NotImplementedError(
                f"{self.name} does not replace {self.marker!r} by get_text_with_replacements of transformers, so the "
                f"text that it puts there is not known. A newer transformers may do so; else {WITHOUT_PROCESSOR}"
            )
        return ProcessorOutput(
            {name: _array(value) for name, value in output.items() if name not in self._text_tensors},
            [str(sample[0]["replacement"]) for sample in offsets],
        )

    def _audio_options(self, sounds: Sequence[np.ndarray]) -> dict[str, Any]:
        return {"audio": sounds, "audio_kwargs": {"sampling_rate": self.sampling_rate, "return_tensors": "pt"}}

    @contextmanager
    def _recorded_replacements(self) -> Iterator[list[Sequence[Mapping[str, Any]]]]:
        """While it is open, the processor's replacements are recorded, one list a sample.

        Those of sounds are not made: texts without them are of one length, as some processors of sounds need it for the
        ids of a batch.
        """
        offsets: list[Sequence[Mapping[str, Any]]] = []
        replace = self._processor.get_text_with_replacements

        def record(text: list[str], *replacements: Any, **named: Any) -> tuple[list[str], list[Any]]:
            replaced, made = replace(list(text), *replacements, **named)  # it changes the list
            offsets.extend(made)
            return (text if self.modality == "audio" else replaced), made

        self._processor.get_text_with_replacements = record
        try:
            yield offsets
        finally:
            del self._processor.get_text_with_replacements

    def pieces(self, replacement: str) -> list[ExpansionPiece]:
        """Split at control tokens; runs of one token become one piece. No piece has `embed` yet."""
        pieces: list[ExpansionPiece] = []
        position = 0
        while (found := self._controls.find(replacement, position, len(replacement))) is not None:
            start, end = found.text_range
            if start > position:
                pieces.append(ExpansionPiece(replacement[position:start]))
            token = replacement[start:end]
            if start == position and pieces and pieces[-1].text == token:
                pieces[-1] = ExpansionPiece(token, pieces[-1].times + 1)
            else:
                pieces.append(ExpansionPiece(token))
            position = end
        if position < len(replacement):
            pieces.append(ExpansionPiece(replacement[position:]))
        return pieces

    def is_control(self, text: str) -> bool:
        return text in self._controls.id_of

    def control_token(self, token_id: int) -> str | None:
        """The text of a control token of the tokenizer, or None for another id."""
        return next((token for token, known in self._controls.id_of.items() if known == token_id), None)


def part_of(processor: Any, modality: Modality) -> Any:
    """The processor of one modality alone, None where there is none; that of sounds may have either name."""
    part = getattr(processor, f"{modality}_processor", None)
    return getattr(processor, "feature_extractor", None) if part is None and modality == "audio" else part


def _array(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list) and value and all(type(number) in (int, float) for number in value):
        # One number for each medium (the seconds of a frame in Omni models): int64 or float32, as torch reads it.
        return np.asarray(value, np.int64 if all(type(number) is int for number in value) else np.float32)
    # numpy has no bfloat16; float32 represents each of its values.
    tensor = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(tensor.numpy())
