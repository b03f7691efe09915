"""Loads the media processors of a model directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from renderers.errors import ConfigError, LoadError, short_repr
from renderers.media.policy import MediaPolicy
from renderers.media.store import MediaStore
from renderers.messages import PLURALS, Modality
from renderers.process.files import read_json
from renderers.tokens.tokenizer import TemplateTokenizer
from renderers.vision.media_loader import MediaLoader
from renderers.vision.processor import MediaProcessor

_IMAGE_FILE = "preprocessor_config.json"
_VIDEO_FILE = "video_preprocessor_config.json"
_JOINT_FILE = "processor_config.json"


def load_media(
    directory: Path,
    *,
    tokenizer: TemplateTokenizer,
    policy: MediaPolicy | None,
    store: MediaStore | None,
    sound_of_videos: str | None = None,
) -> MediaLoader:
    """Load the processors that a directory describes: native ones for Qwen-VL, else the model's own of transformers.

    A directory without a description belongs to a text-only model. Where the model's own processor cannot be loaded (a
    missing package, or code of the repository), or the tokenizer has no token for videos, such media are refused with
    that reason, while text is rendered. `sound_of_videos` names the option that asks for videos with their sound.

    Raises `LoadError` for invalid settings of a Qwen-VL, `ConfigError` for that option where a model does not read
    both together.
    """
    model = tokenizer.model
    joint = read_json(directory / _JOINT_FILE)
    # As in transformers, the joint file takes precedence over the older separate files.
    image = _part(directory, joint, "image_processor") or read_json(directory / _IMAGE_FILE)
    video = _part(directory, joint, "video_processor") or read_json(directory / _VIDEO_FILE)
    hears = bool(_part(directory, joint, "feature_extractor") or _part(directory, joint, "audio_processor"))
    if "feature_extractor_type" in image:
        hears = True
        if not image.keys() & {"image_processor_type", "image_mean"}:
            image = {}  # settings for sounds alone
    if sound_of_videos is not None and not hears:
        raise _no_sound_of_videos(sound_of_videos, f"{model} reads no sounds")
    # DeepSeek-VL2 has the settings of its images beside the name of its processor.
    if not image and not video and not hears and "image_mean" not in joint:
        return MediaLoader({}, model=model)
    named = [joint, image, read_json(directory / "tokenizer_config.json")]
    family = next((str(config["processor_class"]) for config in named if config.get("processor_class")), None)
    # These were published before the file for videos existed; transformers also reads the file for images for them.
    if image and not video and family in ("Qwen2VLProcessor", "Qwen2_5_VLProcessor"):
        video = {**image, "video_processor_type": "Qwen2VLVideoProcessor"}
    policy = policy or MediaPolicy()
    store = MediaStore() if store is None else store

    from renderers.vision.qwen_vl import QwenVLConfig, QwenVLProcessor, is_qwen_vl_image_config
    from renderers.vision.qwen_vl_video import QwenVLVideoConfig, QwenVLVideoProcessor, is_qwen_vl_video_config

    is_qwen_vl = not image or is_qwen_vl_image_config(image)
    if hears or not (image or video) or not is_qwen_vl or (video and not is_qwen_vl_video_config(video)):
        from renderers.vision.hf_processor import VideosWithSound, load_hf_processors

        try:
            loaded = load_hf_processors(directory, policy=policy, store=store)
        except LoadError as error:
            return MediaLoader({}, model=model, missing=dict.fromkeys(get_args(Modality), str(error)))
        if sound_of_videos is not None:
            if not {"video", "audio"} <= loaded.keys():
                read = " and ".join(PLURALS[modality] for modality in loaded)
                raise _no_sound_of_videos(sound_of_videos, f"{model} reads only {read}")
            try:
                loaded["video"] = VideosWithSound(loaded["video"], loaded["audio"])
            except LoadError as error:
                raise _no_sound_of_videos(sound_of_videos, str(error)) from error
        elif {"video", "audio"} <= loaded.keys():
            loaded["video"].drops_sound = True
        return MediaLoader(loaded, model=model)

    processors: dict[Modality, MediaProcessor] = {}
    missing: dict[Modality, str] = {}
    if image:
        config = QwenVLConfig.from_dict(image, path=str(directory / _IMAGE_FILE))
        processors["image"] = QwenVLProcessor(config, policy=policy, store=store)
    if video:
        video_config = QwenVLVideoConfig.from_dict(video, path=str(directory / _VIDEO_FILE), processor_class=family)
        processor = QwenVLVideoProcessor(video_config, policy=policy, store=store)
        # Many models read images only, although they ship a file for videos.
        if tokenizer.control_id(processor.marker) is None:
            missing["video"] = f"the tokenizer of {model} has no token {processor.marker!r} to stand for one"
        else:
            processors["video"] = processor
    return MediaLoader(processors, model=model, missing=missing)


def _no_sound_of_videos(option: str, reason: str) -> ConfigError:
    rule = f"without it: {reason}. Send the sound of a video as an audio part beside the video"
    return ConfigError("chat_template_kwargs", option, (rule,))


def _part(directory: Path, joint: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = joint.get(name) or {}
    if not isinstance(part, dict):
        raise LoadError(
            f"{directory / _JOINT_FILE!s}: {name} is an object with the numbers of a processor, not {short_repr(part)}"
        )
    return part
