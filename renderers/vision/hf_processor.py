"""Media items from any processor of transformers, run on one image, video or sound at a time.

The model's own code decides pixels, tensors and placeholder text; nothing is imitated. Which tensors it
returns, and how those of several items become one, is found at load by running it on probes
(`vision.hf_probing`). torch and transformers (the extra `processors`) are imported only here, when a
processor is loaded.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np

from renderers.errors import LoadError, MediaError, MissingExtraError, missing_token
from renderers.media.audio_decoding import audio_decoder_versions, decode_audio, holds_sound
from renderers.media.decoding import decode_image, decoder_versions
from renderers.media.item import ExpansionPiece, MediaItem, MediaSource, PackedArray
from renderers.media.policy import MediaPolicy
from renderers.media.store import MediaStore
from renderers.media.video_decoding import decode_video, package_version, video_decoder_versions
from renderers.messages import PLURALS, Modality
from renderers.process.files import read_json
from renderers.process.fork_reset import ProcessLock
from renderers.vision.hf_probing import Layout, item_tensor, layout_with_sound, probe
from renderers.vision.hf_runner import (
    PROCESSOR_ERRORS,
    WITHOUT_PROCESSOR,
    Clip,
    ClipWithSound,
    Medium,
    ProcessorRunner,
    Sound,
    part_of,
)
from renderers.vision.patches import ScaledPixels
from renderers.vision.processor import StoringProcessor
from renderers.vision.sound_lengths import SoundLengths

_log = logging.getLogger("renderers")

# Files that may name code of the repository, and the classes for which that code would be run.
_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "tokenizer_config.json",
    "config.json",
)
_CODE = ("AutoProcessor", "AutoImageProcessor", "AutoVideoProcessor", "AutoFeatureExtractor", "AutoTokenizer")
# What can be done where transformers does not have, or cannot make, the processor that the files describe.
_CURE = (
    "Install a package that this names, complete the files of the directory, or take a newer transformers. Code of "
    "the model's own repository (auto_map) is never run: load a checkpoint that was converted for transformers (often "
    f"named -hf), {WITHOUT_PROCESSOR}"
)
_EMBED_IDS = (
    "image_token_id",
    "image_token_index",
    "media_placeholder_token_id",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
)
# Those that affect the tensors of one modality only.
_OF_MODALITY: Mapping[Modality, frozenset[str]] = {
    "image": frozenset({"image_processor"}),
    "video": frozenset({"video_processor"}),
    "audio": frozenset({"audio_processor", "feature_extractor", "audio_seq_length", "audio_ms_per_token"}),
}


class HFProcessor(StoringProcessor):
    """Turns media sources into `MediaItem`s by running the model's own processor, each distinct one once.

    The tensors of an item are what the processor returns for it alone, except those of the text: numpy arrays of the
    same names and types (bfloat16 as the float32 of equal value), `scale` None. Where the floats are exactly uint8
    patches after rescale and normalise, the patches are kept (`ScaledPixels`) for servers that normalise.

    `layout` is the result of probing, or the error of a probing that failed, for which media are then
    refused.
    """

    #: Whether the model hears sounds, and is not given those inside of videos.
    drops_sound = False

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
        self._lengths = SoundLengths(runner)
        self._embeds: dict[str, bool | Literal["audio"]] = {self.embed_token: True}

    def usable_layout(self) -> Layout:
        """The layout. Raises the error of a probing that failed."""
        if isinstance(self._layout, LoadError):
            raise self._layout
        return self._layout

    def make_item(self, source: MediaSource) -> MediaItem:
        layout = self._layout
        if isinstance(layout, LoadError):
            raise MediaError(
                f"this model's {PLURALS[self.modality]} cannot be processed: {layout}", digest=source.digest
            ) from layout
        fields = layout.fields
        medium = self._decoded(source)
        sound = medium.sound if isinstance(medium, ClipWithSound) else medium
        try:
            if isinstance(sound, Sound):
                # Some processors cut the end of a long sound without an error.
                self._lengths.check(len(sound.samples), source.digest, self.modality)
            # With scales the pixels are those before rescaling, uint8.
            output = self._runner.run([medium], raw=bool(layout.scales))
        except PROCESSOR_ERRORS as error:
            raise MediaError(
                f"{self._runner.name} cannot process {self.modality} {source.digest[:12]}: {error}",
                digest=source.digest,
            ) from error
        made = layout.tensors(output)
        if made.keys() != fields.keys():
            raise MediaError(
                f"{self._runner.name} returned the tensors {', '.join(made)} for {self.modality} "
                f"{source.digest[:12]}; when it was loaded it returned {', '.join(fields)} for every probe. Resize the "
                f"{self.modality} to a more usual size, or leave it out",
                digest=source.digest,
            )
        tensors: dict[str, np.ndarray | PackedArray] = {}
        for name, rows in made.items():
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
            piece._replace(embed=self._embeds.get(piece.text, False))
            for piece in self._runner.pieces(output.replacements[0])
        )
        for token in self._embeds:
            if all(piece.text != token for piece in pieces):
                raise MediaError(
                    f"{self._runner.name} puts no {token} in place of {self.modality} {source.digest[:12]}, so "
                    "the model would not notice it. A sound is too short: append silence, or leave it out",
                    digest=source.digest,
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
            sampling_rate=self._runner.sampling_rate if isinstance(sound, Sound) else None,
        )

    def _decoded(self, source: MediaSource) -> Medium:
        if self.modality == "image":
            return decode_image(source, self.policy)
        if self.modality == "audio":
            return Sound(decode_audio(source, self.policy, self._runner.sampling_rate))
        clip = Clip(*decode_video(source, self.policy))
        if (
            self.drops_sound
            and _first_sound
            and holds_sound(source, self.policy)
            and _first_sound.pop("unlogged", False)
        ):
            _log.warning(
                "video %s has a sound, which the model does not hear: its frames are read alone. To have both, load "
                'the renderer with chat_template_kwargs={"use_audio_in_video": True} (not logged again)',
                source.digest[:12],
            )
        return clip


#: Emptied by the first video of the process whose sound is dropped, which is logged; no later one is opened for it.
_first_sound: Final = {"unlogged": True}


class VideosWithSound(HFProcessor):
    """Turns videos into `MediaItem`s together with the sound inside of them, as the processors of omni models do it.

    An item has the tensors of the video and those of its sound, and its expansion has the tokens of both,
    in the order of time. A video file without a sound is processed as a video alone. Raises `LoadError` for
    a processor that does not read videos with their sound.
    """

    reads_sound = True

    def __init__(self, videos: HFProcessor, sounds: HFProcessor) -> None:
        layout = layout_with_sound(videos.usable_layout(), sounds.usable_layout(), videos._runner, sounds._runner)
        described = json.dumps([videos.fingerprint, sounds.fingerprint, layout.example])
        fingerprint = hashlib.sha256(described.encode()).hexdigest()[:16]
        super().__init__(videos._runner, layout, fingerprint=fingerprint, policy=videos.policy, store=videos.store)
        self._videos = videos
        self._sounds = sounds
        self._lengths = sounds._lengths
        self._embeds[sounds.embed_token] = "audio"

    def make_item(self, source: MediaSource) -> MediaItem:
        if source.raw_modality == "video":
            raise MediaError(
                "frames have no sound, and use_audio_in_video asks for that of the video; pass the file of the video",
                digest=source.digest,
            )
        if holds_sound(source, self.policy):
            return super().make_item(source)
        return replace(self._videos.make_item(source), mm_hash=self.mm_hash(source))

    def _decoded(self, source: MediaSource) -> Medium:
        clip, sound = self._videos._decoded(source), self._sounds._decoded(source)
        assert isinstance(clip, Clip)
        assert isinstance(sound, Sound)
        return ClipWithSound(clip, sound)


def load_hf_processors(directory: str | Path, *, policy: MediaPolicy, store: MediaStore) -> dict[Modality, HFProcessor]:
    """The processors for images, videos and sounds of a model directory, as far as its own processor accepts them.

    Only processor classes of transformers itself are run, never code of the directory, and nothing is
    fetched. Raises `MissingExtraError` where a package is missing, else a `LoadError` that names file or
    class and the cure.
    """
    directory = Path(directory)
    configs = {name: read_json(directory / name) for name in _FILES}
    for name, config in configs.items():
        _refuse_code(directory / name, config)
    processor = _load_processor(directory)
    name = type(processor).__name__
    parts = {modality: part_of(processor, modality) for modality in get_args(Modality)}
    if not hasattr(processor, "tokenizer") or not any(parts.values()):
        named = sorted({str(config["processor_class"]) for config in configs.values() if "processor_class" in config})
        raise LoadError(
            f"transformers {metadata.version('transformers')} loads {directory} as {name}, which is not a "
            f"processor of text and media; its files name {' and '.join(named) or 'no processor_class'}. {_CURE}"
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


def _load_processor(directory: Path) -> Any:
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
        reason = " ".join(str(error).split())
        raise LoadError(
            f"transformers {metadata.version('transformers')} cannot load {what}: {reason}. {_CURE}"
        ) from error


def _refuse_code(path: Path, config: Mapping[str, Any]) -> None:
    """Raise `LoadError` for a file that names code, which transformers may ask whether to run."""
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

    `layout.example` is the text that the processor printed for one probe. It is included because the
    tokenizer, and not the processor's settings, defines the tokens around the features.
    """
    of_others = frozenset[str]().union(*(names for name, names in _OF_MODALITY.items() if name != runner.modality))
    # Settings of the processor that do not affect the tensors of any modality.
    settings = {
        name: value
        for name, value in processor.to_dict().items()
        if name not in of_others | frozenset({"auto_map", "name_or_path"})
    }
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
