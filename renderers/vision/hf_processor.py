"""Media items from any processor of transformers, run on one image, video or sound at a time.

The model's own code decides pixels, tensors and placeholder text; nothing is imitated. Which tensors it returns, and
how those of several items become one, is found at load by running it on probes (`vision.hf_probing`). torch and
transformers (the extra `processors`) are imported only here, when a processor is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from PIL import Image

from renderers.errors import LoadError, MediaError, MissingExtraError, missing_token
from renderers.media.audio_decoding import audio_decoder_versions, decode_audio
from renderers.media.decoding import decode_image, decoder_versions
from renderers.media.item import ExpansionPiece, MediaItem, MediaSource, Modality, PackedArray, PixelScale, TensorField
from renderers.media.policy import MediaPolicy
from renderers.media.store import MediaStore
from renderers.media.video_decoding import decode_video, package_version, video_decoder_versions
from renderers.process.files import read_json
from renderers.process.fork_reset import ProcessLock
from renderers.tokens.added_tokens import AddedToken, ControlPattern
from renderers.vision.batching import combine, same_bits
from renderers.vision.patches import ScaledPixels
from renderers.vision.processor import StoringProcessor

# Calls a model's own processor in transformers: media -> tensors and placeholder text.


#: What can be done for a model whose own processor cannot be run.
WITHOUT_PROCESSOR = (
    "let the inference server render (ServerRenderer, docs/vllm.md), or pass a processor of your own: "
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


class Clip(NamedTuple):
    """A video: all its frames, uint8 (frames, height, width, 3), and frames per second (None: unknown)."""

    frames: np.ndarray
    fps: float | None


class Sound(NamedTuple):
    """Mono samples, float32 (samples,), at the sampling rate of the processor."""

    samples: np.ndarray


Medium = Image.Image | Clip | Sound


class ProcessorOutput(NamedTuple):
    """The output for samples of one medium each: tensors of the batch, and one replacement text per sample."""

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
            rate = self.part.sampling_rate
            options |= {"audio": sounds, "audio_kwargs": {"sampling_rate": rate, "return_tensors": "pt"}}
        else:
            clips = [medium for medium in media if isinstance(medium, Clip)]
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
        with self._lock:
            output = self._processor(text=texts, return_text_replacement_offsets=True, **options)
        tensors = dict(output)
        offsets = tensors.pop("text_replacement_offsets", None)
        if offsets is None:
            raise NotImplementedError(
                f"{self.name} does not report the replacement of {self.marker!r} (return_text_replacement_offsets). "
                f"A newer transformers may report it; else {WITHOUT_PROCESSOR}"
            )
        return ProcessorOutput(
            {name: _array(name, value) for name, value in tensors.items() if name not in self._text_tensors},
            [self._replacement(sample) for sample in offsets],
        )

    def _replacement(self, offsets: Sequence[Mapping[str, Any]]) -> str:
        if [(each["type"], each["text"]) for each in offsets] != [(self.modality, self.marker)]:
            raise ValueError(f"{self.name} replaces other text than one {self.marker!r}: {offsets}")
        return str(offsets[0]["replacement"])

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


def _array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "numpy"):
        raise TypeError(f"{name} is a {type(value).__name__}, not a tensor")
    # numpy has no bfloat16; float32 represents each of its values.
    tensor = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(tensor.numpy())


# (width, height): small, wide and tall, so that each image is larger than another in some direction and a processor
# that cuts images into tiles cuts them into different numbers.
_IMAGES = ((97, 61), (1031, 331), (317, 911))
_CLIPS = ((160, 96), (96, 176))
# At this speed, processors that sample two frames a second take every frame. The number of frames gives several chunks
# to processors that cut videos into chunks.
_CLIP_FPS = 2.0
_CLIP_FRAMES = 9
# Seconds: no multiples of each other, of a frame, or of the window of a model; two are longer than others' first.
_SOUNDS = (0.73, 3.1, 1.97)
# Text around the marker, which shows that no tensor depends on the text.
_TEXT = "one {} two three"


@dataclass(frozen=True)
class Layout:
    """How the tensors of single items become those of a batch, and which token stands for a row of features.

    `example` is the text that the processor puts in place of the marker of one probe. `scales` turn the processor's
    output without rescale and normalise into its floats, bit for bit, for the tensors that they name.
    """

    fields: Mapping[str, TensorField]
    embed_token: str
    example: str
    scales: Mapping[str, PixelScale]


def probe(runner: ProcessorRunner, *, min_frames: int, embed_tokens: Sequence[str]) -> Layout:
    """Find the layout of a processor. Raises a `LoadError` that names the tensor without a layout.

    `min_frames` is the number of frames that the processor needs; `embed_tokens` are those that config.json names.
    """
    media: list[Medium]
    if runner.modality == "image":
        media = [Image.fromarray(_noise(width, height)) for width, height in _IMAGES]
    elif runner.modality == "audio":
        media = [_sound(round(seconds * runner.part.sampling_rate)) for seconds in _SOUNDS]
    else:
        frames = max(min_frames, _CLIP_FRAMES)
        media = [_clip(width, height, frames + more) for more, (width, height) in enumerate(_CLIPS)]
    try:
        single = [runner.run([medium]) for medium in media]
        batch = runner.run(media, text=_TEXT)
    except PROCESSOR_ERRORS as error:
        raise LoadError(f"{runner.name} does not process {runner.modality}s one at a time: {error}") from error
    if list(batch.replacements) != [output.replacements[0] for output in single]:
        raise LoadError(
            f"{runner.name} puts other text in place of {runner.marker!r} when {runner.modality}s are processed "
            "together; items that were processed alone would be wrong for such a model"
        )
    fields = _fields(runner, single, batch)
    embed_token = _embed_token(runner, single, embed_tokens)
    return Layout(fields, embed_token, single[0].replacements[0], _scales(runner, media, single, fields))


def _scales(
    runner: ProcessorRunner,
    media: Sequence[Medium],
    single: Sequence[ProcessorOutput],
    fields: Mapping[str, TensorField],
) -> dict[str, PixelScale]:
    """By tensor, the scale that turns uint8 patches into exactly the processor's floats; empty where none does.

    The probes contain every value of every channel, and rescale and normalise treat each value by itself.
    """
    part = runner.part
    if not getattr(part, "do_rescale", False) or not getattr(part, "do_normalize", False):
        return {}
    try:
        factor, mean, std = (
            float(part.rescale_factor),
            tuple(map(float, part.image_mean)),
            tuple(map(float, part.image_std)),
        )
        raw = [runner.run([medium], raw=True) for medium in media]
    except PROCESSOR_ERRORS:  # the class has no such settings or no such option: its floats are kept
        return {}
    if not (len(mean) == len(std) == 3 and factor > 0 and all(std)):
        return {}
    if any(one.replacements != other.replacements for one, other in zip(raw, single, strict=True)):
        return {}
    for scale in (PixelScale(factor, mean, std, fused) for fused in (True, False)):
        names = [
            _scaled_names(scale, one.tensors, other.tensors, fields) for one, other in zip(raw, single, strict=True)
        ]
        if names[0] and all(each == names[0] for each in names):
            return dict.fromkeys(names[0], scale)
    return {}


def _scaled_names(
    scale: PixelScale,
    raw: Mapping[str, np.ndarray],
    floats: Mapping[str, np.ndarray],
    fields: Mapping[str, TensorField],
) -> list[str] | None:
    """The names of tensors whose floats the scale makes of uint8 patches; None where another tensor differs."""
    if raw.keys() != floats.keys():
        return None
    names = []
    for name, pixels in raw.items():
        if same_bits(pixels, floats[name]):
            continue
        if pixels.dtype != np.uint8 or fields[name].kind != "flat" or pixels.ndim < 2:
            return None
        # Rows are 3 * k values, channel by channel, or have an axis of channels.
        if pixels.shape[1] % 3 if pixels.ndim == 2 else pixels.shape[1] != 3:
            return None
        if not same_bits(ScaledPixels(pixels, scale).unpack(), floats[name]):
            return None
        names.append(name)
    return names


def _fields(
    runner: ProcessorRunner, single: Sequence[ProcessorOutput], batch: ProcessorOutput
) -> dict[str, TensorField]:
    names = batch.tensors.keys()
    for output in single:
        if output.tensors.keys() != names:
            raise LoadError(
                f"{runner.name} returns {', '.join(output.tensors)} for one {runner.modality} and "
                f"{', '.join(names)} for several; only processors that return the same tensors are supported"
            )
    return {
        name: _field(runner, name, [output.tensors[name] for output in single], batch.tensors[name]) for name in names
    }


def _field(runner: ProcessorRunner, name: str, single: Sequence[np.ndarray], batch: np.ndarray) -> TensorField:
    """The field that combines the tensors of single items into exactly the tensor of the batch."""
    for field in _candidates(single, batch):
        try:
            combined = combine([item_tensor(name, array, field) for array in single], field)
        except MediaError:
            continue
        if same_bits(combined, batch):
            return field
    shapes = ", ".join(str(array.shape) for array in single)
    raise LoadError(
        f"{runner.name} returns {name!r} in the shapes {shapes} for single {runner.modality}s and {batch.shape} for "
        "all together, which is neither their rows one after another nor stacked and padded: values or layout depend "
        "on the rest of the batch, so items that were processed alone would be wrong"
    )


def _candidates(single: Sequence[np.ndarray], batch: np.ndarray) -> list[TensorField]:
    """The fields that the shapes allow. One row per item may be flat or batched; models read it as batched."""
    if batch.ndim == 0 or any(array.ndim != batch.ndim for array in single):
        return [TensorField("shared")]
    candidates = [TensorField("flat"), TensorField("shared")]
    if len(batch) == len(single) and all(len(array) == 1 for array in single):
        padded = [row for row, array in zip(batch, single, strict=True) if row.shape != array.shape[1:]]
        candidates.insert(0, TensorField("batched", float(padded[0].flat[-1]) if padded else None))
    return candidates


def item_tensor(name: str, array: np.ndarray, field: TensorField) -> np.ndarray:
    """The tensor of one item from that of a batch of one: without the batch axis, where `field` has one."""
    if field.kind != "batched":
        return array
    if len(array) != 1:
        raise MediaError(
            f"the processor returned {len(array)} rows of {name!r}; when it was loaded it returned one row for every "
            "probe. How such rows of several items are combined is not known"
        )
    return np.asarray(array[0])


def _embed_token(runner: ProcessorRunner, single: Sequence[ProcessorOutput], named: Sequence[str]) -> str:
    """The most frequent control token. `named` are the tokens that config.json gives to the model."""
    counts: Counter[str] = Counter()
    for output in single:
        for piece in runner.pieces(output.replacements[0]):
            if runner.is_control(piece.text):
                counts[piece.text] += piece.times
    if not counts:
        raise LoadError(
            f"{runner.name} puts {single[0].replacements[0][:80]!r} in place of {runner.marker!r}, without a control "
            "token of its tokenizer: load the tokenizer that belongs to this processor"
        )
    (token, count), *others = counts.most_common(2)
    tied = bool(others) and others[0][1] == count
    if tied or (named and token not in named):
        raise LoadError(
            f"cannot tell which token stands for the features of a {runner.modality}: {runner.name} prints "
            f"{dict(counts)}, config.json names {', '.join(named) or 'none'}"
        )
    return token


def _clip(width: int, height: int, frames: int) -> Clip:
    return Clip(np.stack([_noise(width, height + index)[:height] for index in range(frames)]), _CLIP_FPS)


def _sound(count: int) -> Sound:
    return Sound(np.random.default_rng(count).uniform(-0.5, 0.5, count).astype(np.float32))


def _noise(width: int, height: int) -> np.ndarray:
    """uint8 (height, width, 3) of random values."""
    values = np.random.default_rng(width * 10_000 + height).integers(0, 256, (height, width, 3))
    return values.astype(np.uint8)


# Files that may name code of the repository, and the classes for which that code would be run.
_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "tokenizer_config.json",
    "config.json",
)
_CODE = ("AutoProcessor", "AutoImageProcessor", "AutoVideoProcessor", "AutoFeatureExtractor", "AutoTokenizer")
# Keys of the files that name a class for one modality.
_TYPE_KEYS = ("image_processor_type", "video_processor_type")
_EMBED_IDS = (
    "image_token_id",
    "image_token_index",
    "media_placeholder_token_id",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
)
# Settings of the processor that do not affect the tensors of any modality.
_NOT_MEDIA = frozenset({"auto_map", "name_or_path"})
# Those that affect the tensors of one modality only.
_OF_MODALITY: Mapping[Modality, frozenset[str]] = {
    "image": frozenset({"image_processor"}),
    "video": frozenset({"video_processor"}),
    "audio": frozenset({"audio_processor", "feature_extractor", "audio_seq_length", "audio_ms_per_token"}),
}


class HFProcessor(StoringProcessor):
    """Turns media sources into `MediaItem`s by running the model's own processor, each distinct image or video once.

    The tensors of an item are what the processor returns for it alone, except those of the text: numpy arrays of the
    same names and types (bfloat16 as the float32 of equal value), `scale` None. Where the floats are exactly uint8
    patches after rescale and normalise, the patches are kept (`ScaledPixels`) for servers that normalise.

    `layout` is the result of probing, or the error of a probing that failed, for which media are then refused.
    """

    def __init__(
        self,
        runner: ProcessorRunner,
        layout: Layout | LoadError,
        *,
        fingerprint: str,
        policy: MediaPolicy,
        store: MediaStore,
    ) -> None:
        super().__init__(fingerprint, policy, store)
        self.modality = runner.modality
        self.marker = runner.marker
        self.embed_token = runner.marker if isinstance(layout, LoadError) else layout.embed_token
        self._runner = runner
        self._layout = layout

    def make_item(self, source: MediaSource) -> MediaItem:
        layout = self._layout
        if isinstance(layout, LoadError):
            raise MediaError(
                f"this model's {self.modality}s cannot be processed: {layout}", digest=source.digest
            ) from layout
        fields = layout.fields
        medium: Medium
        if self.modality == "image":
            medium = decode_image(source, self.policy)
        elif self.modality == "audio":
            medium = Sound(decode_audio(source, self.policy, self._runner.part.sampling_rate))
        else:
            medium = Clip(*decode_video(source, self.policy))
        try:
            output = self._runner.run([medium], raw=bool(layout.scales))
        except PROCESSOR_ERRORS as error:
            raise MediaError(
                f"{self._runner.name} cannot process {self.modality} {source.digest[:12]}: {error}",
                digest=source.digest,
            ) from error
        if output.tensors.keys() != fields.keys():
            raise MediaError(
                f"{self._runner.name} returned the tensors {', '.join(output.tensors)} for {self.modality} "
                f"{source.digest[:12]}; when it was loaded it returned {', '.join(fields)} for every probe. Resize the "
                f"{self.modality} to a more usual size, or leave it out",
                digest=source.digest,
            )
        tensors: dict[str, np.ndarray | PackedArray] = {}
        for name, rows in output.tensors.items():
            array = item_tensor(name, rows, fields[name])
            array.setflags(write=False)
            scale = layout.scales.get(name)
            if scale is not None and array.dtype != np.uint8:
                raise MediaError(
                    f"before rescaling, {self._runner.name} returned {name} of {self.modality} {source.digest[:12]} as "
                    f"{array.dtype}; when it was loaded it returned uint8 for every probe. Convert the "
                    f"{self.modality} to 8-bit RGB, or leave it out",
                    digest=source.digest,
                )
            tensors[name] = array if scale is None else ScaledPixels(array, scale)
        pieces = tuple(
            piece._replace(embed=True) if piece.text == self.embed_token else piece
            for piece in self._runner.pieces(output.replacements[0])
        )
        num_tokens = sum(piece.times for piece in pieces if piece.embed)
        only_markers = pieces == (ExpansionPiece(self.marker, num_tokens, embed=True),)
        return MediaItem(
            self.modality,
            self.mm_hash(source),
            source,
            tensors,
            num_tokens,
            scale=None,
            fields=fields,
            expansion=None if only_markers else pieces,
        )


def load_hf_processors(directory: str | Path, *, policy: MediaPolicy, store: MediaStore) -> dict[Modality, HFProcessor]:
    """The processors for images, videos and sounds of a model directory, as far as its own processor accepts them.

    Only processor classes of transformers itself are run, never code of the directory, and nothing is fetched.
    Raises `MissingExtraError` where a package is missing, else a `LoadError` that names file or class and the cure.
    """
    directory = Path(directory)
    configs = {name: read_json(directory / name) for name in _FILES}
    for name, config in configs.items():
        _refuse_code(directory / name, config)
    processor = _load_processor(directory, configs)
    name = type(processor).__name__
    parts = {modality: part_of(processor, modality) for modality in get_args(Modality)}
    if not hasattr(processor, "tokenizer") or not any(parts.values()):
        named = sorted(_processor_classes(configs))
        cause = _foreign_code(configs)
        cure = "Correct processor_class in processor_config.json if transformers has the model's processor; else"
        raise LoadError(
            f"transformers {metadata.version('transformers')} loads {directory} as {name}, which is not a "
            f"processor of text and media; its files name {' and '.join(named) or 'no processor_class'}. "
            f"{cause or f'{cure} {WITHOUT_PROCESSOR}'}"
        )
    lock = ProcessLock()
    loaded: dict[Modality, HFProcessor] = {}
    for modality, part in parts.items():
        if part is None:
            continue
        marker = getattr(processor, f"{modality}_token", None)
        if not isinstance(marker, str):
            raise LoadError(
                f"{name} names no {modality}_token, the token that a template prints for each {modality}. "
                "Without it the items cannot be located in the text. A newer transformers may name it; else "
                f"{WITHOUT_PROCESSOR}"
            )
        runner = ProcessorRunner(processor, modality, marker, lock)
        if not runner.is_control(marker):
            raise missing_token(marker, str(directory), name)
        layout = _layout(runner, part, configs["config.json"])
        fingerprint = _fingerprint(processor, part, runner, layout)
        loaded[modality] = HFProcessor(runner, layout, fingerprint=fingerprint, policy=policy, store=store)
    return loaded


def _layout(runner: ProcessorRunner, part: Any, config: Mapping[str, Any]) -> Layout | LoadError:
    ids = [config[name] for name in _EMBED_IDS if isinstance(config.get(name), int)]
    embed_tokens = [token for token in map(runner.control_token, ids) if token is not None]
    try:
        return probe(runner, min_frames=getattr(part, "num_frames", None) or 1, embed_tokens=embed_tokens)
    except LoadError as error:
        if runner.modality == "image":
            raise
        return error  # a model whose videos or sounds cannot be read still reads images


def _processor_classes(configs: Mapping[str, Mapping[str, Any]]) -> set[str]:
    return {str(config["processor_class"]) for config in configs.values() if config.get("processor_class")}


def _foreign_code(configs: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Why transformers cannot have the processor that the files describe, and the cure; None if it may have it.

    The files name classes that this transformers lacks, or no processor at all beside code of the model (`auto_map`).
    """
    parts = [value for config in configs.values() for value in (config, *config.values()) if isinstance(value, dict)]
    types = {str(part[key]) for part in parts for key in _TYPE_KEYS if part.get(key)}
    classes = _processor_classes(configs)
    lacking = sorted(name for name in classes | types if not _is_of_transformers(name))
    code = next((f"auto_map in {name}" for name, config in configs.items() if config.get("auto_map")), None)
    cures = f"Load a checkpoint that was converted for transformers (often named -hf), {WITHOUT_PROCESSOR}"
    if code is not None and (lacking or not classes):
        return f"The model needs code of its own repository ({code}), which is never run here. {cures}"
    if lacking:
        return (
            f"transformers {metadata.version('transformers')} has no {' and no '.join(lacking)}: unless a newer one "
            f"has it, it is code of the model's own repository, which is never run here. {cures}"
        )
    return None


def _is_of_transformers(name: str) -> bool:
    """Whether transformers has a class; it takes an image processor's name with and without `Fast` for the same."""
    import transformers

    base = name.removesuffix("Fast")
    return hasattr(transformers, base) or hasattr(transformers, f"{base}Fast")


def _load_processor(directory: Path, configs: Mapping[str, Mapping[str, Any]]) -> Any:
    what = f"the processor of {directory}"
    # torchvision is required even for classes that run without it: they then resample differently, and the pixels would
    # depend on the installation.
    missing = [package for package in ("torch", "torchvision", "transformers") if find_spec(package) is None]
    if missing:
        raise MissingExtraError(what, "processors", " and ".join(missing))
    try:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        # tokenizers raises a plain Exception for a definition that it cannot read.
        if not isinstance(error, PROCESSOR_ERRORS) and type(error) is not Exception:
            raise
        if isinstance(error, ImportError) and find_spec("num2words") is None:  # SmolVLM's asks for it
            raise MissingExtraError(what, "processors", "num2words") from error
        cure = _foreign_code(configs) or "Complete or correct the files of the directory"
        raise LoadError(
            f"transformers {metadata.version('transformers')} cannot load {what}: {error}. {cure}"
        ) from error


def _refuse_code(path: Path, config: Mapping[str, Any]) -> None:
    """Raise `LoadError` for a file that names code: transformers may ask on the terminal whether to run it."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        code = part.get("auto_map") or {}
        # Old tokenizer_config.json files list the two tokenizer classes.
        named = [name for name in _CODE if name in code] if isinstance(code, dict) else [f"{code!r}"]
        if named:
            raise LoadError(
                f"{path!s}: auto_map says that {', '.join(named)} is code of the repository, which is "
                "never run; load the checkpoint that was converted for transformers (often named -hf), "
                f"remove auto_map if transformers has this processor itself, {WITHOUT_PROCESSOR}"
            )
        if "audio_tokenizer" in part:
            raise LoadError(f"{path!s}: audio_tokenizer names another model, which is never loaded; remove it")


def _fingerprint(processor: Any, part: Any, runner: ProcessorRunner, layout: Layout | LoadError) -> str:
    """16 hex digits of a hash of everything that decides the items.

    `layout.example` is the text that the processor printed for one probe. It is included because the tokenizer, and not
    the processor's settings, defines the tokens around the features.
    """
    of_others = frozenset[str]().union(*(names for name, names in _OF_MODALITY.items() if name != runner.modality))
    settings = {name: value for name, value in processor.to_dict().items() if name not in of_others | _NOT_MEDIA}
    decoders = {"image": decoder_versions, "video": video_decoder_versions, "audio": audio_decoder_versions}
    description = {
        "processor": runner.name,
        "part": type(part).__name__,
        "modality": runner.modality,
        "marker": runner.marker,
        "example": None if isinstance(layout, LoadError) else layout.example,
        "settings": settings,
        "versions": {name: package_version(name) for name in ("transformers", "torch", "torchvision", "pillow")},
        "decoders": decoders[runner.modality](),
    }
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).hexdigest()[:16]
