"""Episodes for another process, with their images as sources, as pixels, or as names alone.

    packed = pack_episodes([trajectory], pixels="bfloat16", processors=renderer.processors)
    message = encoder.encode_frames(packed)         # transport.CompactEncoder: each image once a connection

    packed = decoder.decode_frames(message)
    samples_from_trajectory(packed.episodes[0], advantage=1.0, processors=packed.processors())

`source` is the smallest and the default: an encoded image is a tenth of its pixels. The receiver derives the pixels
again with its own processors, and is refused any that would have another `mm_hash`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

import numpy as np

from renderers import MediaItem, MediaSource
from renderers.bfloat16 import float32_to_bfloat16
from renderers.errors import MediaError
from renderers.media.item import ExpansionPiece, Modality, PackedArray, TensorField
from renderers.media.pixel_scale import PixelScale
from renderers.vision.normalise import normalised
from renderers.vision.patches import StillPatches
from renderers.vision.processor import MediaProcessor
from rollouts.bfloat16 import Bfloat16Array
from rollouts.errors import PixelFormError, PixelMismatchError
from rollouts.trajectory.token_node import MediaReference, TokenNode, processor_for
from rollouts.trajectory.tree import Trajectory, Turn
from transport import decode, encode, wire_type

PixelForm = Literal["source", "uint8", "float32", "bfloat16", "none"]
"""What travels: the source; canonical uint8 pixels; the floats a vision tower takes; or neither source nor pixels.

uint8 and float32 are the sampler's pixels bit for bit, bfloat16 are the floats rounded to nearest, ties to even.
"""

Processors = Mapping[Modality, MediaProcessor]


@wire_type("rollouts.AbsentSource")
@dataclass(frozen=True, slots=True)
class AbsentSource(MediaSource):
    """A source by name only: its bytes were not sent. Reading `data` raises `PixelFormError`."""

    data: bytes | memoryview = field(init=False, repr=False, compare=False)

    def __getattr__(self, name: str) -> Any:  # reached where an attribute has no value
        if name != "data":
            raise AttributeError(name)
        raise PixelFormError(
            f"the bytes of medium {self.digest} were not sent with this episode",
            'Use the processors of the packed episodes, or pack with pixels="source".',
        )

    def __reduce__(self) -> tuple[type[AbsentSource], tuple[str]]:  # copying and pickling must not read `data`
        return AbsentSource, (self.digest,)


@wire_type("rollouts.PackedItem")
@dataclass(frozen=True, slots=True, eq=False)
class PackedItem:
    """A `MediaItem` without its source, its pixels in one of the array forms."""

    modality: Modality
    mm_hash: str
    digest: str
    tensors: dict[str, np.ndarray | StillPatches | Bfloat16Array]
    num_tokens: int
    scale: PixelScale | None
    fields: dict[str, list[Any]]
    expansion: list[list[Any]] | None

    @classmethod
    def of(cls, item: MediaItem, form: PixelForm) -> PackedItem:
        return cls(
            item.modality,
            item.mm_hash,
            item.source.digest,
            {name: _packed(item, name, form) for name in item.tensors},
            item.num_tokens,
            item.scale if form == "uint8" else None,
            {name: list(how) for name, how in item.fields.items()},
            None if item.expansion is None else [list(piece) for piece in item.expansion],
        )

    def item(self) -> MediaItem:
        return MediaItem(
            self.modality,
            self.mm_hash,
            AbsentSource(self.digest),
            cast("dict[str, np.ndarray | PackedArray]", self.tensors),
            self.num_tokens,
            self.scale,
            {name: TensorField(*how) for name, how in self.fields.items()},
            None if self.expansion is None else tuple(ExpansionPiece(*piece) for piece in self.expansion),
        )


@wire_type("rollouts.PackedEpisodes")
@dataclass(frozen=True, slots=True, eq=False)
class PackedEpisodes:
    """Episodes and, in the array forms, their media: `mm_hash` -> an encoded `PackedItem`, a blob like any source."""

    pixels: PixelForm
    episodes: list[Trajectory]
    items: dict[str, MediaSource] = field(default_factory=dict)

    def processors(self, own: Processors | None = None) -> Processors:
        """What turns the references of these episodes into items; for `samples_from_trajectory`.

        With `source` these are `own`, the receiver's (`renderer.processors`), once they are known to derive the pixels
        that the sampler saw; otherwise raises `PixelMismatchError`, which names both fingerprints. In the array forms
        they hand out the pixels that came. With `none` there are no pixels and this raises `PixelFormError`.
        """
        return processors_of(self.pixels, all_references(self.episodes), self.items, own)


def pack_episodes(
    episodes: Sequence[Trajectory], *, pixels: PixelForm = "source", processors: Processors | None = None
) -> PackedEpisodes:
    """The episodes with their media in one form. The episodes given are not changed.

    The array forms need the sender's `processors`, which have seen the media before and mostly still hold the pixels.
    Raises `PixelFormError`, `MissingProcessorError`, and `PixelMismatchError` where `processors` are not those that
    the sampler used.
    """
    if check_form(pixels) == "source":
        return PackedEpisodes(pixels, list(episodes))
    shown = {reference.mm_hash: reference for reference in all_references(episodes)}
    derived = () if pixels == "none" else (reference.derive(processors or {}) for reference in shown.values())
    return PackedEpisodes(pixels, [_without_sources(episode) for episode in episodes], pack_items(derived, pixels))


def all_references(episodes: Iterable[Trajectory]) -> Iterator[MediaReference]:
    return (reference for episode in episodes for reference in episode.all_media())


def check_form(form: PixelForm) -> PixelForm:
    """Raise `PixelFormError` for what is no form."""
    if form not in get_args(PixelForm):
        raise PixelFormError(f"pixels={form!r} is no form", f"Use one of {', '.join(get_args(PixelForm))}.")
    return form


def pack_items(items: Iterable[MediaItem], form: PixelForm) -> dict[str, MediaSource]:
    """`mm_hash` -> encoded `PackedItem`, each once."""
    packed: dict[str, MediaSource] = {}
    for item in items:
        if item.mm_hash not in packed:
            packed[item.mm_hash] = MediaSource.of(encode(PackedItem.of(item, form)))
    return packed


def processors_of(
    form: PixelForm, references: Iterable[MediaReference], items: Mapping[str, MediaSource], own: Processors | None
) -> Processors:
    """See `PackedEpisodes.processors`."""
    if check_form(form) == "none":
        if next(iter(references), None) is not None:
            raise PixelFormError('these media were packed with pixels="none"', "Pack them in another form to see them.")
        return own or {}
    if form == "source":
        for reference in references:
            derived = processor_for(own, reference.modality).mm_hash(reference.source)
            if derived != reference.mm_hash:
                raise PixelMismatchError(reference.mm_hash, derived)
        return own or {}
    by_modality: dict[Modality, dict[str, str]] = {}
    for reference in references:
        names = by_modality.setdefault(reference.modality, {})
        if names.setdefault(reference.source.digest, reference.mm_hash) != reference.mm_hash:
            raise PixelFormError(
                f"{names[reference.source.digest]} and {reference.mm_hash} show one source through two processors",
                "Pack episodes of different processors apart.",
            )
        if reference.mm_hash not in items:
            raise PixelFormError(f"the pixels of {reference.mm_hash} did not come", "Pack the episodes again.")
    # Only what samples ask of a processor: to process a source, and under what name.
    return {
        modality: cast("MediaProcessor", _Received({digest: items[name] for digest, name in names.items()}, names))
        for modality, names in by_modality.items()
    }


@dataclass(frozen=True, slots=True)
class _Received:
    """The items that came, by the digest of their source."""

    blobs: Mapping[str, MediaSource]
    names: Mapping[str, str]
    items: dict[str, MediaItem] = field(default_factory=dict)

    def mm_hash(self, source: MediaSource) -> str:
        return self.names[source.digest]

    def process(self, source: MediaSource) -> MediaItem:
        if source.digest not in self.blobs:
            raise MediaError(f"the pixels of medium {source.digest} did not come", digest=source.digest)
        if source.digest not in self.items:
            packed = decode(self.blobs[source.digest].data)
            if not isinstance(packed, PackedItem) or packed.digest != source.digest:
                raise PixelFormError(
                    f"what came for medium {source.digest} holds no pixels of it", "Have the episodes packed again."
                )
            self.items[source.digest] = packed.item()
        return self.items[source.digest]


def without_source(reference: MediaReference) -> MediaReference:
    return replace(reference, source=AbsentSource(reference.source.digest))


def _without_sources(episode: Trajectory) -> Trajectory:
    nodes = [_node_without_sources(node) if node.media or node.messages else node for node in episode.nodes]
    turns = [_turn_without_sources(turn) for turn in episode.turns]
    return replace(episode, nodes=type(episode.nodes)(nodes), turns=type(episode.turns)(turns))


def _node_without_sources(node: TokenNode) -> TokenNode:
    return replace(node, media=tuple(map(without_source, node.media)), messages=_emptied(node.messages))


def _turn_without_sources(turn: Turn) -> Turn:
    return replace(turn, message=_emptied(turn.message), info=_emptied(turn.info))


def _emptied(value: Any) -> Any:
    """Messages and infos with names in place of the sources in them."""
    if isinstance(value, MediaSource):
        return AbsentSource(value.digest)
    if isinstance(value, dict):
        return {key: _emptied(one) for key, one in value.items()}
    return type(value)(map(_emptied, value)) if type(value) in (list, tuple) else value


def _packed(item: MediaItem, name: str, form: PixelForm) -> np.ndarray | StillPatches | Bfloat16Array:
    """A tensor of an item in an array form; what is neither pixels nor floats (a grid) stays as it is."""
    tensor = item.tensors[name]
    is_pixels = isinstance(tensor, StillPatches) or (isinstance(tensor, np.ndarray) and tensor.dtype == np.uint8)
    if form == "uint8":
        if item.scale is None and item[name].dtype.kind == "f":
            raise PixelFormError(
                f"{name} of {item.mm_hash} are floats: its processor gives no uint8 pixels",
                'Pack with pixels="source" or "float32".',
            )
        return tensor if isinstance(tensor, StillPatches) else item[name]
    if item.scale is not None and is_pixels:
        if form == "float32":
            return normalised(item, name)
        return Bfloat16Array(normalised(item, name, dtype="bfloat16"))
    array = item[name]
    return Bfloat16Array(float32_to_bfloat16(array)) if form == "bfloat16" and array.dtype == np.float32 else array
