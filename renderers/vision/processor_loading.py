"""From the files of a model directory to its media processors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from renderers.errors import InvalidFileError, LoadError, short_repr
from renderers.file_reading import read_json
from renderers.media.item import Modality
from renderers.media.policy import MediaPolicy
from renderers.media.store import MediaStore
from renderers.tokens.tokenizer import TemplateTokenizer
from renderers.vision.media_loader import MediaLoader
from renderers.vision.processor import ImageBackend, MediaProcessor

_IMAGE_FILE = "preprocessor_config.json"
_VIDEO_FILE = "video_preprocessor_config.json"
_JOINT_FILE = "processor_config.json"
# Published before there were files for videos: their numbers are those of images, in transformers too.
_WITHOUT_VIDEO_FILE = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor")


def load_media(
    directory: Path,
    *,
    tokenizer: TemplateTokenizer,
    policy: MediaPolicy | None,
    store: MediaStore | None,
    backend: ImageBackend | None,
) -> MediaLoader:
    """The processors that a directory describes: natively for Qwen-VL, else the model's own of transformers.

    A directory that describes none is one of a model that only reads text. Where the model's own processor cannot be
    loaded (a package is not installed, its code would have to be run), or the tokenizer has no token for a video, such
    media are refused with that reason, and text is rendered. Raises `LoadError` for broken numbers of a Qwen-VL.
    """
    model = tokenizer.model
    joint = read_json(directory / _JOINT_FILE)
    # As in transformers, what the joint file holds wins over the older files that may lie beside it.
    image = _part(directory, joint, "image_processor") or read_json(directory / _IMAGE_FILE)
    video = _part(directory, joint, "video_processor") or read_json(directory / _VIDEO_FILE)
    if "feature_extractor_type" in image and "image_processor_type" not in image:  # the numbers of sound
        image = {}
    if not image and not video:
        return MediaLoader({}, model=model)
    family = _processor_class(directory, joint, image)
    if image and not video and family in _WITHOUT_VIDEO_FILE:
        video = {**image, "video_processor_type": "Qwen2VLVideoProcessor"}
    policy = policy or MediaPolicy()
    store = MediaStore() if store is None else store

    from renderers.vision.qwen_vl import QwenVLConfig, QwenVLProcessor, is_qwen_vl_image_config
    from renderers.vision.qwen_vl_video import QwenVLVideoConfig, QwenVLVideoProcessor, is_qwen_vl_video_config

    if (image and not is_qwen_vl_image_config(image)) or (video and not is_qwen_vl_video_config(video)):
        from renderers.vision.hf_processor import load_hf_processors

        try:
            return MediaLoader(load_hf_processors(directory, policy=policy, store=store), model=model)
        except LoadError as error:
            return MediaLoader({}, model=model, missing=dict.fromkeys(("image", "video"), str(error)))

    processors: dict[Modality, MediaProcessor] = {}
    missing: dict[Modality, str] = {}
    if image:
        config = QwenVLConfig.from_dict(image, path=str(directory / _IMAGE_FILE), backend=backend)
        processors["image"] = QwenVLProcessor(config, policy=policy, store=store)
    if video:
        video_config = QwenVLVideoConfig.from_dict(video, path=str(directory / _VIDEO_FILE), processor_class=family)
        processor = QwenVLVideoProcessor(video_config, policy=policy, store=store)
        if tokenizer.control_id(processor.marker) is None:  # many read images only, whatever their files say
            missing["video"] = f"the tokenizer of {model} has no token {processor.marker!r} to stand for one"
        else:
            processors["video"] = processor
    return MediaLoader(processors, model=model, missing=missing)


def _part(directory: Path, joint: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = joint.get(name) or {}
    if not isinstance(part, dict):
        raise InvalidFileError(
            str(directory / _JOINT_FILE), f"{name} is an object with the numbers of a processor, not {short_repr(part)}"
        )
    return part


def _processor_class(directory: Path, *configs: Mapping[str, Any]) -> str | None:
    """The class that transformers makes of the directory, by the name that one of its files gives."""
    named = [*configs, read_json(directory / "tokenizer_config.json")]
    return next((str(config["processor_class"]) for config in named if config.get("processor_class")), None)
