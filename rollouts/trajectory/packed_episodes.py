"""Episodes packed for another process, with their media as sources or as pixels.

    packed = pack_episodes([trajectory], pixels="uint8", processors=renderer.processors)
    message = encode_frames(packed)                 # of `transport`

    packed = decode_frames(message)
    samples_from_trajectory(packed.episodes[0], advantage=1.0, processors=packed.processors())

`source` is the smallest form and the default: an encoded image is a tenth of its pixels. The receiver
computes the pixels again with its own processors, and pixels with another `mm_hash` are an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np

from renderers import MediaItem, MediaSource
from renderers.errors import MediaError
from renderers.media.item import PackedArray
from renderers.messages import Modality
from renderers.vision.patches import StillPatches, normalised
from renderers.vision.processor import MediaProcessor
from rollouts.errors import ArgumentError, PixelMismatchError, RolloutsError
from rollouts.trajectory.media_reference import MediaReference, processor_for
from rollouts.trajectory.tree import Trajectory
from rollouts.values import check_choice
from transport import decode, encode, wire_type

PixelForm = Literal["source", "uint8", "float32"]
"""What is sent: the source; canonical uint8 pixels; or the floats a tower takes.

Pixels are those of the sampler bit for bit. The features of a sound are float32 in both array forms.
"""

Processors = Mapping[Modality, MediaProcessor]


@wire_type("rollouts.AbsentSource")
@dataclass(frozen=True, slots=True)
class AbsentSource(MediaSource):
    """A source whose bytes were not sent. It has a digest; reading `data` raises `RolloutsError`."""

    data: bytes | memoryview = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Do not check `data`, which has no value."""

    def __getattr__(self, name: str) -> Any:  # called only for an attribute without a value
        if name != "data":
            raise AttributeError(name)
        raise RolloutsError(
            f"the bytes of the source {self.digest} were not sent with this episode. Use the processors of the packed "
            'episodes, or pack with pixels="source".'
        )

    def __reduce__(self) -> tuple[type[AbsentSource], tuple[str]]:  # copying and pickling must not read `data`
        return AbsentSource, (self.digest,)


@wire_type("rollouts.PackedEpisodes")
@dataclass(frozen=True, slots=True, eq=False)
class PackedEpisodes:
    """Episodes in one form. In the array forms `items` has their media: `mm_hash` -> an encoded `MediaItem`."""

    pixels: PixelForm
    episodes: list[Trajectory]
    items: dict[str, MediaSource] = field(default_factory=dict)

    def processors(self, own: Processors | None = None) -> Processors:
        """The processors that make items of the references of these episodes, for `samples_from_trajectory`.

        With `source` they are `own`, the receiver's `renderer.processors`, if these compute the pixels that
        the sampler saw; otherwise raises `PixelMismatchError`, which names both fingerprints. In the array
        forms they return the pixels that were sent.
        """
        check_choice("pixels", self.pixels, PixelForm)
        if self.pixels == "source":
            for reference in self._references():
                computed = processor_for(own, reference.modality).mm_hash(reference.source)
                if computed != reference.mm_hash:
                    raise PixelMismatchError(reference.mm_hash, computed)
            return own or {}
        return self._received_items()

    def _references(self) -> Iterator[MediaReference]:
        return (reference for episode in self.episodes for reference in episode.all_media())

    def _received_items(self) -> Processors:
        hashes: dict[Modality, dict[str, str]] = {}
        for reference in self._references():
            of_modality = hashes.setdefault(reference.modality, {})
            mm_hash = of_modality.setdefault(reference.source.digest, reference.mm_hash)
            if mm_hash != reference.mm_hash:
                raise RolloutsError(
                    f"{mm_hash} and {reference.mm_hash} are pixels of one source from two processors. Pack episodes of "
                    "different processors separately."
                )
            if mm_hash not in self.items:
                raise RolloutsError(f"the pixels of {mm_hash} were not sent. Pack the episodes again.")
        # Samples use no other methods of a processor than those of `_ReceivedItems`.
        return {
            modality: cast("MediaProcessor", _ReceivedItems(of_modality, self.items))
            for modality, of_modality in hashes.items()
        }


def pack_episodes(
    episodes: Sequence[Trajectory], *, pixels: PixelForm = "source", processors: Processors | None = None
) -> PackedEpisodes:
    """The episodes with their media in one form. The episodes themselves are not changed.

    The array forms need the sender's `processors`; their caches usually still hold the pixels. Raises
    `RolloutsError`, `PixelMismatchError` if `processors` compute other pixels than the sampler saw, and
    `ArgumentError` for anything but a sequence of trajectories.
    """
    if not isinstance(episodes, Sequence) or not all(isinstance(one, Trajectory) for one in episodes):
        raise ArgumentError("episodes", episodes, "pass a list of Trajectory, also for one: [trajectory]")
    check_choice("pixels", pixels, PixelForm)
    if pixels == "source":
        return PackedEpisodes(pixels, list(episodes))
    items: dict[str, MediaSource] = {}
    for reference in (one for episode in episodes for one in episode.all_media()):
        if reference.mm_hash not in items:
            packed = _packed_item(reference.derive(processors or {}), pixels)
            items[reference.mm_hash] = MediaSource.of(encode(packed))
    return PackedEpisodes(pixels, [_without_sources(episode) for episode in episodes], items)


@dataclass(frozen=True, slots=True)
class _ReceivedItems:
    """Returns the items of one modality that were sent. `hashes` maps the digest of a source to an `mm_hash`."""

    hashes: Mapping[str, str]
    packed: Mapping[str, MediaSource]
    items: dict[str, MediaItem] = field(default_factory=dict)

    def mm_hash(self, source: MediaSource) -> str:
        return self.hashes[source.digest]

    def process(self, source: MediaSource) -> MediaItem:
        if source.digest not in self.hashes:
            raise MediaError(f"the pixels of the source {source.digest} were not sent", digest=source.digest)
        if source.digest not in self.items:
            packed = decode(self.packed[self.hashes[source.digest]].data)
            if not isinstance(packed, MediaItem) or packed.source != AbsentSource(source.digest):
                raise RolloutsError(
                    f"what was sent for the source {source.digest} holds no pixels of it. Pack the episodes again."
                )
            self.items[source.digest] = packed
        return self.items[source.digest]


def _without_sources(episode: Trajectory) -> Trajectory:
    nodes = [
        replace(
            node,
            media=tuple(replace(one, source=AbsentSource(one.source.digest)) for one in node.media),
            messages=_plain_without_sources(node.messages),
        )
        if node.media or node.messages
        else node
        for node in episode.nodes
    ]
    turns = [
        replace(turn, message=_plain_without_sources(turn.message), info=_plain_without_sources(turn.info))
        for turn in episode.turns
    ]
    return replace(episode, nodes=type(episode.nodes)(nodes), turns=type(episode.turns)(turns))


def _plain_without_sources(value: Any) -> Any:
    """A message or an info with an `AbsentSource` in place of each source in it."""
    if isinstance(value, MediaSource):
        return AbsentSource(value.digest)
    if isinstance(value, dict):
        return {key: _plain_without_sources(one) for key, one in value.items()}
    return type(value)(map(_plain_without_sources, value)) if type(value) in (list, tuple) else value


def _packed_item(item: MediaItem, form: PixelForm) -> MediaItem:
    tensors: dict[str, np.ndarray | PackedArray] = {name: _packed_tensor(item, name, form) for name in item.tensors}
    scale = item.scale if form == "uint8" else None
    return replace(item, source=AbsentSource(item.source.digest), tensors=tensors, scale=scale)


def _packed_tensor(item: MediaItem, name: str, form: PixelForm) -> np.ndarray | StillPatches:
    """A tensor of an item in an array form. Tensors that are neither pixels nor floats (a grid) are not changed."""
    tensor = item.tensors[name]
    if form == "uint8":
        if item.scale is None and item.modality != "audio" and item[name].dtype.kind == "f":
            raise RolloutsError(
                f"{name} of {item.mm_hash} are floats: its processor gives no uint8 pixels. Pack with "
                'pixels="source" or "float32".'
            )
        return tensor if isinstance(tensor, StillPatches) else item[name]
    is_pixels = isinstance(tensor, StillPatches) or (isinstance(tensor, np.ndarray) and tensor.dtype == np.uint8)
    return normalised(item, name) if item.scale is not None and is_pixels else item[name]
