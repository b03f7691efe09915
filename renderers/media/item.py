"""Media of a conversation: the bytes of a source, and an item as the model sees or hears it."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np

from renderers.errors import (
    MediaError,
)
from renderers.messages import Modality

#: The first bytes of the forms for pixels and samples that were not given as a file.
IMAGE_MAGIC = b"mmpx"
VIDEO_MAGIC = b"mmpv"
AUDIO_MAGIC = b"mmpa"
_RAW: Mapping[bytes, Modality] = {IMAGE_MAGIC: "image", VIDEO_MAGIC: "video", AUDIO_MAGIC: "audio"}


def raw_modality(data: bytes | memoryview) -> Modality | None:
    """The modality of bytes in a form of `renderers.media` for pixels or samples; None for a file."""
    return _RAW.get(bytes(data[:4]))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class MediaSource:
    """Immutable source bytes and the sha256 (hex) of exactly those bytes.

    `data` is an encoded file (PNG, JPEG, WAV...) or the form that `renderers.media` writes for pixels and
    samples that were not given as a file. Two sources are equal when their digests are; the bytes are not
    compared. Raises `MediaError` for a memoryview that is not contiguous.
    """

    digest: str
    data: bytes | memoryview = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_contiguous(self.data)

    @classmethod
    def of(cls, data: bytes | memoryview) -> Self:
        """The source of `data`, with its digest computed."""
        _check_contiguous(data)
        return cls(hashlib.sha256(data).hexdigest(), data)

    def __reduce__(self) -> tuple[Any, ...]:  # a memoryview, as decoding gives it, cannot be pickled
        return type(self), (self.digest, bytes(self.data))

    def verify(self) -> None:
        """Raise `MediaError` unless the bytes hash to the digest."""
        actual = hashlib.sha256(self.data).hexdigest()
        if actual != self.digest:
            raise MediaError(
                f"media source announced as {self.digest} is {actual} here: the bytes changed on the way. Ship the "
                "source again.",
                digest=self.digest,
            )

    @property
    def raw_modality(self) -> Modality | None:
        """The modality of `data` in a form of `renderers.media` for pixels or samples; None for a file."""
        return raw_modality(self.data)

    @property
    def nbytes(self) -> int:
        return memoryview(self.data).nbytes


def _check_contiguous(data: bytes | memoryview) -> None:
    if type(data) is memoryview and not data.c_contiguous:
        raise MediaError("the bytes of the medium are a memoryview that is not contiguous; pass bytes(view)")


class PackedArray(Protocol):
    """An array in a smaller form: `unpack` gives the array, `nbytes` is the size of the form in memory."""

    @property
    def nbytes(self) -> int: ...

    def unpack(self) -> np.ndarray: ...


class TensorField(NamedTuple):
    """How the tensor of one item becomes part of the tensor of a batch.

    flat: the item has rows of its own, concatenated along axis 0; batched: the item is one row of the batch,
    stacked along a new axis 0, rows of different shapes padded at their ends with `pad`; shared: equal for
    all, held once. Names as in vLLM's `MultiModalFieldConfig`.
    """

    kind: Literal["flat", "batched", "shared"]
    pad: float | None = None


class ExpansionPiece(NamedTuple):
    """A part of the expansion of a media marker: a control token `times` times, or text (once).

    With `embed`, each of these tokens stands for one row of the output of the model's tower for the item's
    modality, or for the modality that `embed` names: "audio" for the sound inside of a video.
    """

    text: str
    times: int = 1
    embed: bool | Literal["audio"] = False


@dataclass(frozen=True, slots=True)
class PixelScale:
    """float = (uint8 * factor - mean) / std, channel by channel, in the arithmetic of one of transformers' backends.

    fused: that of the torchvision backend, (uint8 - mean / factor) / (std / factor), all in float32. Not
    fused: that of the Pillow backend, the product in float64 and rounded to float32, the rest in float32. The
    last bits differ.
    """

    factor: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    fused: bool = False


@dataclass(frozen=True, eq=False)
class MediaItem(Mapping[str, np.ndarray]):
    """One image, video or sound: a read-only mapping from tensor name to array, and its source.

    For Qwen-VL `item["pixel_values"]` holds canonical uint8 patches (after resize, before rescale and
    normalise) of shape (t*h*w, 3 * temporal_patch * patch * patch), `item["image_grid_thw"]` is int64 of
    shape (3,); a video has `pixel_values_videos` and `video_grid_thw`, a sound `input_features` and the
    mask of its frames, and a video that was processed with its sound has both. `fields` describes for each
    tensor how items are combined in a batch. `mm_hash` identifies exactly these tensors: the source's
    digest and the fingerprint of the processor that made them. `scale` turns uint8 pixels into floats
    (`renderers.vision.patches`); None where the model takes the tensors unchanged.

    `sampling_rate` is the rate in hertz of the samples of which the tensors of a sound, or of the sound of
    a video, were made; None for other media, and where a server made them.

    `num_tokens` is the number of tokens that stand for the item's features. `expansion` replaces the media
    marker; None where the marker itself is repeated `num_tokens` times.
    """

    modality: Modality
    mm_hash: str
    source: MediaSource
    tensors: Mapping[str, np.ndarray | PackedArray] = field(repr=False)
    num_tokens: int
    scale: PixelScale | None
    fields: Mapping[str, TensorField] = field(default_factory=dict, repr=False)
    expansion: tuple[ExpansionPiece, ...] | None = field(default=None, repr=False)
    sampling_rate: int | None = None

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        return tensor if isinstance(tensor, np.ndarray) else tensor.unpack()

    def __contains__(self, name: object) -> bool:  # without unpacking the tensor, as `Mapping` would
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __eq__(self, other: object) -> bool:
        """Whether both have the same tensors, by their `mm_hash`, for tokens of the same number."""
        if not isinstance(other, MediaItem):
            return NotImplemented
        return (self.modality, self.mm_hash, self.num_tokens) == (other.modality, other.mm_hash, other.num_tokens)

    def __hash__(self) -> int:
        return hash((self.modality, self.mm_hash, self.num_tokens))

    @property
    def has_sound(self) -> bool:
        """Whether it has features of a sound: it is a sound, or a video that was processed with its sound."""
        return self.modality == "audio" or any(piece.embed == "audio" for piece in self.expansion or ())

    @property
    def feature_counts(self) -> list[tuple[Modality, int]]:
        """The feature tokens in order: how many follow each other, and the modality that makes them."""
        if self.expansion is None:
            return [(self.modality, self.num_tokens)]
        return [
            (self.modality if piece.embed is True else piece.embed, piece.times)
            for piece in self.expansion
            if piece.embed
        ]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensors in memory, without the source."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def pieces(self, marker: str) -> tuple[ExpansionPiece, ...]:
        """The expansion, also where it is the media marker alone."""
        return self.expansion or (ExpansionPiece(marker, self.num_tokens, embed=True),)
