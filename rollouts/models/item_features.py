"""Features of images, videos and sounds: each distinct item passes its tower once, wherever it is in the rows.

In their forward, models of transformers call `get_image_features`, `get_video_features` and `get_audio_features` with
the tensors of all items, and write what these return into the embeddings, in the order of the items. `towers` replaces
these methods for one forward pass, which then gets the tensors of those items that have no features yet.
"""

import inspect
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from renderers import MediaItem
from renderers.process.caches import ByteLRU
from rollouts.models.architecture import parameters_of
from rollouts.models.placed_rows import PlacedRows, RowItem

_METHODS = {"image": "get_image_features", "video": "get_video_features", "audio": "get_audio_features"}
#: Fields of the output of a tower with a row for each item, where they have none for each token; of others, one
#: with as many rows as there are items may mean something else.
_ROWS_OF_ITEMS = frozenset({"pooler_output", "attention_mask", "audio_mel_mask"})
#: Fields that no forward reads.
_UNREAD = frozenset({"hidden_states", "attentions"})

#: The features of one item: by method, what it returns for this item alone.
ItemFeatures = Mapping[str, Mapping[str, Any]]


class FeatureCache(NamedTuple):
    """Features by the weights that made them, a key of any kind, and by `mm_hash`."""

    entries: ByteLRU[tuple[Hashable, str], ItemFeatures]
    weights: Hashable

    def get(self, mm_hash: str) -> ItemFeatures | None:
        return self.entries.get((self.weights, mm_hash))

    def put(self, mm_hash: str, features: ItemFeatures) -> None:
        # Copies: a part would keep the tensors of its whole batch.
        own = {
            method: type(output)(**{name: _copied(value) for name, value in output.items()})
            for method, output in features.items()
        }
        nbytes = sum(_nbytes(list(output.values())) for output in own.values())
        self.entries.put((self.weights, mm_hash), own, nbytes)


class Towers(NamedTuple):
    """`items` are those whose tensors the forward gets, `methods` those that replace methods of the base model."""

    items: Sequence[RowItem]
    methods: dict[str, Callable[..., Any]]


def towers(base: Any, rows: PlacedRows, known: FeatureCache | None = None, *, divides: bool = True) -> Towers:
    """The towers of `base` for the items of `rows`.

    `known` has the features of items, and gets those of the others; None keeps none. Without
    `divides`, and in models whose features depend on the place of an item, each is encoded at each of its
    places. Also there a sound is encoded without the padding of a batch, where that would pad one: some
    towers let padding change the features of a shorter sound. `methods` raise `NotImplementedError`
    for features that are not those of one item after another.
    """
    placed = rows.items
    methods = {method for each in placed for method in _counts(each.item)}
    if divides and all(_encodes_items(base, method) for method in methods):
        return _encoding_once(base, placed, methods, known)
    sounds = [each.item for each in placed if each.item.has_sound]
    if not encodes_alone(base) or not are_padded(sounds):
        return Towers(placed, {})
    original = getattr(base, _METHODS["audio"])
    return Towers(
        placed, {_METHODS["audio"]: lambda *args, **kwargs: _joined(_one_by_one(original, sounds, args, kwargs))}
    )


def _encoding_once(
    base: Any, placed: Sequence[RowItem], methods: Collection[str], known: FeatureCache | None
) -> Towers:
    first = {each.item.mm_hash: each for each in reversed(placed)}
    found: dict[str, dict[str, Any]] = {}
    if known is not None:
        found = {name: dict(features) for name in first if (features := known.get(name)) is not None}
    items = [each for name, each in reversed(first.items()) if name not in found]
    for method in methods:
        # A forward calls a tower only if it gets its tensors, and reads some of them before.
        if not any(method in _counts(each.item) for each in items):
            encoded = (each for each in placed if method in _counts(each.item))
            items.append(min(encoded, key=lambda each: each.item.nbytes))

    def encoding(method: str) -> Callable[..., Any]:
        original = getattr(base, method)
        given = [each.item for each in items if method in _counts(each.item)]

        def features(*args: Any, **kwargs: Any) -> Any:
            if any(method not in found.get(item.mm_hash, ()) for item in given):
                if method == _METHODS["audio"] and are_padded(given):
                    outputs = _one_by_one(original, given, args, kwargs)
                else:
                    outputs = _divided(original(*args, **kwargs), [_counts(item)[method] for item in given])
                for item, output in zip(given, outputs, strict=True):
                    own = found.setdefault(item.mm_hash, {})
                    own[method] = output
                    if known is not None and own.keys() == _counts(item).keys():
                        known.put(item.mm_hash, own)
            return _joined([found[each.item.mm_hash][method] for each in placed if method in _counts(each.item)])

        return features

    if (
        known is None
        and len(items) == len(placed)
        and not are_padded([each.item for each in items if each.item.has_sound])
    ):
        return Towers(items, {})
    return Towers(items, {method: encoding(method) for method in methods})


def encodes_alone(base: Any) -> bool:
    """Whether the tower of `base` is called with single sounds where a batch would pad one of them."""
    return hasattr(base, _METHODS["audio"])


def are_padded(items: Sequence[MediaItem]) -> bool:
    """Whether a batch of these items would pad one of them."""
    shapes = {(name, item[name].shape) for item in items for name in item if item.fields[name].kind == "batched"}
    return len(shapes) > len({name for name, _ in shapes})


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else type(value)(map(_copied, value))


def _nbytes(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else sum(map(_nbytes, value))


def _counts(item: MediaItem) -> dict[str, int]:
    """By method that encodes the item, or a part of it: how many feature tokens that makes."""
    counts: dict[str, int] = {}
    for modality, count in item.feature_counts:
        # Some models take the frames of a video as images.
        as_images = modality == "video" and "pixel_values_videos" not in item
        method = _METHODS["image" if as_images else modality]
        counts[method] = counts.get(method, 0) + count
    return counts


def _encodes_items(base: Any, method: str) -> bool:
    """Whether a tower reads nothing but the tensors of items: that of MusicFlamingo reads their places."""
    function = getattr(base, method, None)
    return function is not None and "input_ids" not in parameters_of(function)


def _divided(output: Any, counts: Sequence[int]) -> list[Any]:
    """The output of a tower for items with these numbers of feature tokens, one output an item."""
    fields = {name: value for name, value in output.items() if name not in _UNREAD}
    if "pooler_output" in fields and _rows_of_tokens(fields.get("last_hidden_state"), counts) is None:
        # What was projected into the pooler_output, which a forward reads then.
        fields.pop("last_hidden_state", None)
    read = {name: _parts(name, value, counts) for name, value in fields.items()}
    return [type(output)(**{name: parts[index] for name, parts in read.items()}) for index in range(len(counts))]


def _parts(name: str, value: Any, counts: Sequence[int]) -> Sequence[Any]:
    """One part of a field an item: rows of a tensor; of a list with an element an item a tuple of one; of layers a
    list of such parts.
    """
    if (sizes := _rows_of_tokens(value, counts)) is not None:
        return torch.split(value, sizes)
    if isinstance(value, torch.Tensor) and name in _ROWS_OF_ITEMS and len(value) == len(counts):
        return torch.split(value, 1)
    if isinstance(value, list | tuple):
        if [getattr(part, "shape", ())[:1] for part in value] == [(count,) for count in counts]:
            return [(part,) for part in value]
        if name == "deepstack_features":
            layers = [_parts("", layer, counts) for layer in value]
            return [[layer[index] for layer in layers] for index in range(len(counts))]
    shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    raise NotImplementedError(f"{name} of a tower is {shape} for items of {list(counts)} tokens")


def _rows_of_tokens(value: Any, counts: Sequence[int]) -> list[int] | None:
    """How many rows (..., hidden) each item has in a tensor of the features of all tokens; None for another one."""
    if not isinstance(value, torch.Tensor):
        return None
    tokens = math.prod(value.shape[1:-1])
    if value.ndim < 2 or len(value) * tokens != sum(counts) or any(count % tokens for count in counts):
        return None
    return [count // tokens for count in counts]


def _one_by_one(original: Callable[..., Any], sounds: Sequence[MediaItem], args: Any, kwargs: Any) -> list[Any]:
    """The output for each sound, encoded without the padding of the batch."""
    parameters = inspect.signature(original)
    outputs = []
    ends: dict[str, int] = {}  # of the rows so far, of tensors in which a sound has several
    for index, item in enumerate(sounds):
        own = parameters.bind(*args, **kwargs)
        for name, value in own.arguments.items():
            if name in item and isinstance(value, torch.Tensor):
                shape = item[name].shape
                if item.fields[name].kind == "flat":
                    begin, ends[name] = ends.get(name, 0), ends.get(name, 0) + shape[0]
                    own.arguments[name] = value[begin : ends[name]]
                else:
                    own.arguments[name] = value[index][tuple(map(slice, shape))][None]
        outputs += _divided(original(*own.args, **own.kwargs), [_counts(item)[_METHODS["audio"]]])
    return outputs


def _joined(outputs: Sequence[Any]) -> Any:
    """Outputs of single items as that of a batch, with the fields that all of them have: `_divided` leaves one out."""
    names = [name for name in outputs[0] if all(name in each for each in outputs)]
    return type(outputs[0])(**{name: _whole(name, [each[name] for each in outputs]) for name in names})


def _whole(name: str, parts: Sequence[Any]) -> Any:
    """What `_parts` divided; rows (1, T, ...) are padded to one T."""
    if isinstance(parts[0], tuple):
        return [part for of_item in parts for part in of_item]
    if isinstance(parts[0], list):
        return [_whole(name, layer) for layer in zip(*parts, strict=True)]
    if len({part.shape[1:] for part in parts}) > 1:
        longest, padding = max(part.shape[1] for part in parts), name == "audio_mel_mask"  # True on padding
        parts = [
            torch.cat([part, part.new_full((1, longest - part.shape[1], *part.shape[2:]), padding)], dim=1)
            for part in parts
        ]
    return torch.cat(list(parts))
