"""Video files with a sound inside, coded without loss, so that their frames and samples are known."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import av
import numpy as np

RATE = 16000


class Film(NamedTuple):
    """`frames` uint8 (frames, height, width, 3); `samples` int16 (samples,) at 16 kHz, None for a silent film."""

    frames: np.ndarray
    samples: np.ndarray | None
    fps: int

    @property
    def file(self) -> bytes:
        """A file in the format Matroska, the same each time: without the date and a random number."""
        buffer = io.BytesIO()
        with av.open(buffer, "w", format="matroska", options={"fflags": "+bitexact"}) as container:
            video: Any = container.add_stream("ffv1", rate=self.fps)
            video.pix_fmt = "bgr0"
            video.height, video.width = self.frames.shape[1:3]
            audio: Any = None if self.samples is None else container.add_stream("pcm_s16le", rate=RATE, layout="mono")
            for frame in self.frames:
                container.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(video.encode())
            if self.samples is not None:
                block = av.AudioFrame.from_ndarray(self.samples[None], format="s16", layout="mono")
                block.sample_rate, block.pts = RATE, 0
                container.mux(audio.encode(block))
                container.mux(audio.encode())
        return buffer.getvalue()

    @property
    def heard(self) -> np.ndarray:
        """The samples as float32."""
        assert self.samples is not None
        return self.samples / np.float32(32768)

    @property
    def metadata(self) -> dict[str, Any]:
        """What transformers is told of the frames."""
        count, height, width, _ = self.frames.shape
        known = {"total_num_frames": count, "fps": float(self.fps), "width": width, "height": height}
        return {**known, "duration": count / self.fps, "frames_indices": list(range(count))}

    @property
    def part(self) -> dict[str, Any]:
        return {"type": "video", "video": self.file}


def film(count: int, seconds: float | None, seed: int = 0, *, fps: int = 4, sound_seed: int | None = None) -> Film:
    """A film of `count` frames with a sound of so many seconds; `sound_seed` gives it the sound of another one."""
    frames = np.random.default_rng([seed, count]).integers(0, 256, (count, 56, 84, 3), dtype=np.uint8)
    if seconds is None:
        return Film(frames, None, fps)
    noise = np.random.default_rng(seed if sound_seed is None else sound_seed)
    return Film(frames, noise.integers(-9000, 9000, round(seconds * RATE), dtype=np.int16), fps)


def inputs_of(parts: Sequence[Mapping[str, Any] | Film]) -> dict[str, Any]:
    """The arguments that a processor of an omni model takes for the films, with their sounds, and the audio parts."""
    films = [part for part in parts if isinstance(part, Film)]
    audio: list[np.ndarray] = []
    origins: list[int | None] = []  # of each sound the number of its film
    number = -1
    for part in parts:
        if isinstance(part, Film):
            number += 1
            if part.samples is not None:
                audio.append(part.heard)
                origins.append(number)
        elif part["type"] == "audio":
            audio.append(part["audio"])
            origins.append(None)
    inputs: dict[str, Any] = {}
    if films:
        known = [each.metadata for each in films]
        inputs |= {"videos": [each.frames for each in films]}
        inputs["videos_kwargs"] = {"video_metadata": known, "return_tensors": "pt"}
    if audio:
        inputs |= {"audio": audio, "audio_kwargs": {"sampling_rate": RATE, "return_tensors": "pt"}}
    if films and audio:
        inputs |= {"load_audio_from_video": True, "audio_from_video_indices": origins}
    return inputs
