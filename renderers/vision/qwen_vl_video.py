"""Qwen-VL videos: which frames, what size, patches, and the time stamps that Qwen3-VL prints between them.

Follows `Qwen2VLVideoProcessor` (Qwen2-VL, 2.5-VL) and `Qwen3VLVideoProcessor` (3-VL, 3.5 to 3.8) of transformers bit
for bit. They exist for torchvision only, so frames are resized and scaled as `qwen_vl` does for that backend. A Qwen3
video is several runs of placeholders: each group of frames that one patch spans becomes `<1.5
seconds><|vision_start|><|video_pad|>...<|vision_end|>`. These replace only the template's `<|video_pad|>`, so the
`<|vision_start|>` and `<|vision_end|>` that the template prints around it stay, as in transformers and vLLM.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from renderers.errors import MediaError, MediaLimitError, short_repr
from renderers.media.item import ExpansionPiece, MediaItem, MediaSource, PackedArray, TensorField
from renderers.media.policy import MediaPolicy
from renderers.media.store import MediaStore
from renderers.media.video_decoding import FramePlan, SampledVideo, VideoInfo, sample_video, video_decoder_versions
from renderers.messages import Modality
from renderers.vision import resampling
from renderers.vision.patches import frame_patches
from renderers.vision.processor import StoringProcessor
from renderers.vision.qwen_vl import (
    MAX_RESIZED_PIXELS,
    PixelSettings,
    fingerprint,
    fitting_size,
    read_integer,
    read_pixel_settings,
    require,
)

Family = Literal["qwen2", "qwen3"]

_FAMILIES: dict[str, Family] = {"Qwen2VLVideoProcessor": "qwen2", "Qwen3VLVideoProcessor": "qwen3"}
# The defaults of the classes.
_DEFAULTS: dict[Family, dict[str, Any]] = {
    "qwen2": {"do_sample_frames": False, "fps": None, "max_video_tokens": 128_000},
    "qwen3": {"do_sample_frames": True, "fps": 2, "max_video_tokens": 768},
}
# The frame rate that Qwen3-VL, and `sampled_fps` of transformers for all, assume for videos without one.
_ASSUMED_FPS = 24
_MAX_FRAMES = 2**16
_VIDEO_FIELDS = {
    "pixel_values_videos": TensorField("flat"),
    "video_grid_thw": TensorField("batched"),
    "second_per_grid_ts": TensorField("batched"),
}


def is_qwen_vl_video_config(config: Mapping[str, Any]) -> bool:
    """Whether `QwenVLVideoConfig` reads this parsed video_preprocessor_config.json."""
    return config.get("video_processor_type") in list(_FAMILIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVLVideoConfig(PixelSettings):
    """The settings of video_preprocessor_config.json that affect frames and pixels.

    family: the model family whose rules for sampling and sizes apply. min_pixels and max_pixels: width times height of
    a frame for qwen2, times the frames of the video for qwen3. fps or num_frames: the sampling rate if
    `do_sample_frames`. max_video_tokens: with `cap_pixels_per_frame`, tokens of a video for qwen2, of a frame for
    qwen3. seconds_per_grid: whether the model takes the seconds that a patch spans (Qwen2.5-VL).
    """

    family: Family = "qwen3"
    min_pixels: int = 4096
    max_pixels: int = 25165824
    do_sample_frames: bool = True
    fps: float | None = 2
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768
    seconds_per_grid: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, path: str, processor_class: str | None = None) -> Self:
        """Read a parsed video_preprocessor_config.json; `path` names it in errors. Raises `LoadError`.

        `processor_class` is that key of the model's files; Qwen2_5_VLProcessor gives the model seconds.
        """
        family = _FAMILIES[config["video_processor_type"]]
        return cls(
            family=family,
            seconds_per_grid=(processor_class or config.get("processor_class")) == "Qwen2_5_VLProcessor",
            **read_pixel_settings(config, path=path, fused=True),
            **_read_sampling({**_DEFAULTS[family], **config}, family, path=path),
        )

    @property
    def fingerprint(self) -> str:
        """16 hex digits of all that affects pixels: settings, versions of resampler and decoders."""
        return fingerprint("video", self, resampler=resampling.VERSION, decoders=video_decoder_versions())


class QwenVLVideoProcessor(StoringProcessor):
    """Turns media sources into `MediaItem`s, each distinct video once."""

    modality: Modality = "video"
    marker = embed_token = "<|video_pad|>"

    def __init__(self, config: QwenVLVideoConfig, *, policy: MediaPolicy, store: MediaStore) -> None:
        super().__init__(config.fingerprint, policy, store)
        self.config = config

    def make_item(self, source: MediaSource) -> MediaItem:
        """`pixel_values_videos` uint8, `video_grid_thw` int64 (3,), and for Qwen2.5-VL `second_per_grid_ts` float32 ().

        Raises `MediaLimitError`, `MediaError`.
        """
        config = self.config
        video = sample_video(source, self.policy, lambda info: self._plan(info, source.digest))
        patches = frame_patches(video.frames, config.patch_size, config.merge_size, config.temporal_patch_size)
        count, _, height, width = video.frames.shape
        grid = (-(-count // config.temporal_patch_size), height // config.patch_size, width // config.patch_size)
        tensors = {"pixel_values_videos": patches, "video_grid_thw": np.array(grid, dtype=np.int64)}
        if config.seconds_per_grid:
            fps = video.info.fps
            sampled_fps = _ASSUMED_FPS if fps is None else len(video.indices) / video.info.frames * fps
            seconds = config.temporal_patch_size / sampled_fps
            tensors["second_per_grid_ts"] = np.array(seconds, dtype=np.float32)
        for tensor in tensors.values():
            tensor.setflags(write=False)
        frame_tokens = grid[1] * grid[2] // config.merge_size**2
        return MediaItem(
            self.modality,
            self.mm_hash(source),
            source,
            dict[str, np.ndarray | PackedArray](tensors),
            grid[0] * frame_tokens,
            config.scale,
            {name: _VIDEO_FIELDS[name] for name in tensors},
            self._expansion(video, frame_tokens) if config.family == "qwen3" else None,
        )

    def _plan(self, info: VideoInfo, digest: str) -> FramePlan:
        indices = sampled_indices(info.frames, info.fps, self.config, digest=digest)
        width, height = resized_frame_size(info.width, info.height, len(indices), self.config, digest=digest)
        self.policy.check_frames(len(indices), width, height, digest=digest)
        return FramePlan(indices, lambda planes: resampling.resize(planes, height, width, self.config.resample))

    def _expansion(self, video: SampledVideo, frame_tokens: int) -> tuple[ExpansionPiece, ...]:
        return tuple(
            piece
            for seconds in time_stamps(video.indices, video.info.fps, self.config.temporal_patch_size)
            for piece in (
                ExpansionPiece(f"<{seconds:.1f} seconds>"),
                ExpansionPiece("<|vision_start|>"),
                ExpansionPiece(self.embed_token, frame_tokens, embed=True),
                ExpansionPiece("<|vision_end|>"),
            )
        )


def time_stamps(indices: Sequence[int], fps: float | None, temporal_patch_size: int) -> list[float]:
    """For each group of frames that a patch spans, the middle between its first and its last frame, in seconds.

    Source: `Qwen3VLProcessor._calculate_timestamps` of transformers. `fps` is that of the video, 24 where unknown; the
    last frame is repeated to complete the last group.
    """
    filled = [*indices, *[indices[-1]] * (-len(indices) % temporal_patch_size)]
    seconds = [index / (fps or _ASSUMED_FPS) for index in filled]
    firsts, lasts = seconds[::temporal_patch_size], seconds[temporal_patch_size - 1 :: temporal_patch_size]
    return [(first + last) / 2 for first, last in zip(firsts, lasts, strict=True)]


def sampled_indices(
    total: int, fps: float | None, config: QwenVLVideoConfig, *, digest: str | None = None
) -> list[int]:
    """The indices of the sampled frames among `total`, ascending; of a short video some more than once.

    Source: `sample_frames` of the two processors of transformers. `fps` is that of the video; qwen3 takes 24 where it
    is unknown. Raises `MediaLimitError` for a video too short to sample, `MediaError` where qwen2 has to sample
    by time and the frame rate is unknown.
    """
    if not config.do_sample_frames:
        return list(range(total))
    if config.family == "qwen3":
        if config.num_frames is not None:
            count = config.num_frames
        elif config.fps is not None:
            count = int(total / (fps or _ASSUMED_FPS) * config.fps)
            count = min(max(count, config.min_frames), config.max_frames, total)
        else:
            count = min(max(total, config.min_frames), config.max_frames)
        return [int(index) for index in np.linspace(0, total - 1, count).round()]
    temporal = config.temporal_patch_size
    if config.num_frames is not None:
        count = round(config.num_frames / temporal) * temporal
    else:
        if fps is None:
            raise MediaError(
                "the frame rate of this video is unknown, and this model samples by it; pass its frames with their fps",
                digest=digest,
            )
        limit = math.floor(min(config.max_frames, total) / temporal) * temporal
        wanted = total / fps * (config.fps or 0)
        count = math.floor(min(max(wanted, config.min_frames), limit, total) / temporal) * temporal
    if not 0 < count <= total:
        raise MediaLimitError(
            f"{count} frames cannot be sampled of a video of {total}; pass a longer video, or lower num_frames "
            "or fps of the model's video_preprocessor_config.json",
            digest=digest,
        )
    # transformers computes the steps in float32 tensors of torch and truncates them to integers.
    return [int(index) for index in (np.arange(count) * (total / count)).astype(np.float32)]


def resized_frame_size(
    width: int, height: int, frames: int, config: QwenVLVideoConfig, *, digest: str | None = None
) -> tuple[int, int]:
    """(width, height) of each of `frames` sampled frames after the resize: multiples of `factor`.

    Source: `resize` and `smart_resize` of the two processors. Raises `MediaLimitError` past `MAX_ASPECT_RATIO` and, for
    qwen3, for fewer frames than a patch spans.
    """
    factor, smallest, largest = config.factor, config.min_pixels, config.max_pixels
    if config.family == "qwen3":
        if frames < config.temporal_patch_size:
            raise MediaLimitError(
                f"a video of {frames} frame(s) where {config.temporal_patch_size} are needed; pass more frames, or one "
                "frame as an image",
                digest=digest,
            )
        if config.cap_pixels_per_frame:
            cap = min(config.max_video_tokens * factor**2, largest // frames)
            largest = max(cap, int(smallest * 1.05)) * frames
        if width < factor or height < factor:
            scale = max(factor / height, factor / width)
            width, height = int(width * scale), int(height * scale)
    elif config.cap_pixels_per_frame:
        budget = int(config.max_video_tokens * factor * factor * 0.9)
        largest = max(min(largest, budget * config.temporal_patch_size // frames), int(smallest * 1.05))
    if config.family == "qwen2":
        return fitting_size(width, height, factor, smallest, largest, digest=digest)
    rounded = round(frames / config.temporal_patch_size) * config.temporal_patch_size
    return fitting_size(width, height, factor, smallest, largest, frames=frames, rounded_frames=rounded, digest=digest)


def _read_sampling(config: Mapping[str, Any], family: Family, *, path: str) -> dict[str, Any]:
    sampled = bool(config["do_sample_frames"])
    given = [name for name in ("fps", "num_frames") if config.get(name) is not None]
    require(len(given) < 2, path, "fps and num_frames are both set; set the one that is not meant to null")
    is_said = bool(given) or not sampled or family != "qwen2"
    require(is_said, path, "do_sample_frames is true but neither fps nor num_frames says how many")
    numbers: dict[str, Any] = {
        name: read_integer(config, name, maximum=_MAX_FRAMES, default=default, path=path)
        for name, default in (("num_frames", None), ("min_frames", 4), ("max_frames", 768))
    }
    fps = config["fps"]
    is_rate = fps is None or (type(fps) in (int, float) and 1e-6 <= fps <= 1e6)
    require(is_rate, path, f"fps is {short_repr(fps)}; it is a positive number of frames a second, or null")
    return {
        "do_sample_frames": sampled,
        "fps": None if fps is None else float(fps),
        **numbers,
        "cap_pixels_per_frame": bool(config.get("cap_pixels_per_frame")),
        "max_video_tokens": read_integer(config, "max_video_tokens", maximum=MAX_RESIZED_PIXELS, path=path),
    }
