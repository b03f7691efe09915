"""From an object to frames: one header with everything small in it, and the raw bytes of large arrays and of media.

msgpack's C packer walks lists, dicts and plain values by itself and hands back only what it does not know. Each such
thing becomes a numbered entry or blob; entries are queued, and each is packed by itself later. That keeps the walk flat
however deep objects nest, and gives an object that is referred to twice one entry.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt

from renderers.media.source import MediaSource
from transport.errors import EncodeError
from transport.wire import registry, wire_format
from transport.wire.arrays import (
    Bytes,
    array_bytes,
    describe_dtype,
    is_array,
    is_tensor,
    pack_scalar,
    tensor_parts,
    vector_code,
)
from transport.wire.builtin_values import PACKERS
from transport.wire.errors import NotSendableError
from transport.wire.limits import MAX_DEPTH
from transport.wire.locating import locate

_SHA256 = re.compile(r"[0-9a-f]{64}")

OmitMedia = Callable[[MediaSource], bool]


@functools.lru_cache(maxsize=1 << 14)
def _reference(code: int, number: int) -> msgpack.ExtType:
    size = 1 if number < 1 << 8 else 2 if number < 1 << 16 else 4
    # Without the checks of the constructor, which would take a tenth of the whole encoding.
    return tuple.__new__(msgpack.ExtType, (code, number.to_bytes(size, "big")))


_ARRAY = np.ndarray
_EMPTY: tuple[()] = ()
_EMPTY_REFERENCE = msgpack.ExtType(wire_format.EMPTY_TUPLE, b"")
_ONLY_ARRAYS = {np.ndarray}
_ONLY_TUPLES = {tuple}
_NESTS = {list, dict}  # what a dict can stand in
_Take: TypeAlias = "Callable[[_Packing, Any], msgpack.ExtType]"


def pack(obj: object, held: OmitMedia, *, depth: int = 0) -> tuple[list[bytes], list[wire_format.Buffer]]:
    """The parts of the first frame of `obj`, and its other frames.

    `held` is asked once per media source; the bytes of one it affirms are left out. `depth` is that of `obj` itself:
    how many objects count as being around it.
    """
    answers: dict[str, bool] = {}

    def held_once(source: MediaSource) -> bool:
        if source.digest not in answers:
            answers[source.digest] = held(source)
        return answers[source.digest]

    try:
        return _pack(obj, held_once, depth, in_runs=True)
    except _OneByOneError:
        pass
    return _pack(obj, held_once, depth, in_runs=False)


def _pack(obj: object, held: OmitMedia, depth: int, in_runs: bool) -> tuple[list[bytes], list[wire_format.Buffer]]:
    packing = _Packing(obj, held, depth, in_runs)
    packer = msgpack.Packer(default=packing.refer, strict_types=True, use_bin_type=True)
    packed = packing.pack_runs(packer.pack) if in_runs else packing.pack_one_by_one(packer.pack)
    plain = all(len(row) == wire_format.TYPE_ROW for row in packing.types)
    version = wire_format.UNDECLARED_VERSION if plain else wire_format.FORMAT_VERSION
    prelude = wire_format.PRELUDE.pack(wire_format.PRELUDE_MAGIC, version, len(packed))
    return [prelude, packer.pack(packing.types), packer.pack(packing.blobs), b"".join(packed)], packing.frames


class _OneByOneError(Exception):
    """The objects of this message cannot be packed in runs, or something is wrong that must be said exactly."""


class _Root:
    """What the openers know the root entry by; its own class has another opener."""


class _Packing:
    """One message being made. Holds neither itself nor its packer, so what it keeps goes when it does."""

    def __init__(self, root: object, held: OmitMedia, depth: int, in_runs: bool) -> None:
        self.held = held
        self.in_runs = in_runs
        self.takers: dict[type, _Take] = {}  # what to do with instances of each class
        self.types: list[list[object]] = []
        # tag and payload of entries
        self.openers: dict[type, tuple[int, Callable[[Any], object]]] = {_Root: (wire_format.TAG_ROOT, _as_is)}
        self.readers: dict[type, Sequence[Callable[[Any], Any]]] = {}  # of classes that are packed in runs
        self.blobs: list[list[object]] = []
        self.frames: list[wire_format.Buffer] = []
        self.places: dict[int | str, int] = {}  # among the blobs, by id() or media digest
        self.kept: list[object] = []  # what has an id() among the places
        self.objects: list[Any] = [root]
        self.entries: dict[int, tuple[msgpack.ExtType, int]] = {}  # of entries, by id()
        self.children: list[int] = []  # of all entries, those of the first one first
        self.ends: list[int] = []  # how many children there are up to the end of each entry
        self.depths: list[int] = [depth]
        self.tangled = False  # whether an entry refers to one before it, and `depths` mean nothing
        self.hashes = False  # whether the current entry refers to something Python takes for a dict key
        self.suspects: list[int] = []  # entries that may have such a key
        self.current = 0  # the entry, or the last of the run, that is being packed
        self.inside = 1  # the depth of what it refers to

    def pack_runs(self, pack: Callable[[object], bytes]) -> list[bytes]:
        """All entries, children first, neighbours of one class as a run. Raises `_OneByOneError`.

        Turned round, the order in which entries were met is right unless one refers to an entry before it, or to one of
        its own run. Few messages are like that; they cost what has been packed of them until it shows.
        """
        packed: list[bytes] = []
        first = 0
        while first < len(self.objects):
            end = self.end_of_run(first)
            if end - first < 2:
                packed.append(self.pack_entry(pack, first, self.objects[first]))
            else:
                packed.append(self.pack_run(pack, first, end))
            if self.tangled:
                raise _OneByOneError
            first = end
        self.check_keys(packed)
        if max(self.depths) > MAX_DEPTH:
            raise _OneByOneError
        packed.reverse()
        return packed

    def pack_one_by_one(self, pack: Callable[[object], bytes]) -> list[bytes]:
        """All entries, children first."""
        # The list grows while it is read: packing an entry queues what it refers to.
        packed = [self.pack_entry(pack, number, obj) for number, obj in enumerate(self.objects)]
        self.check_keys(packed)
        return [packed[number] for number in self.children_first()]

    def end_of_run(self, first: int) -> int:
        kind = type(self.objects[first])
        if not first or kind not in self.readers:
            return first + 1
        others = (n for n in range(first + 1, len(self.objects)) if type(self.objects[n]) is not kind)
        return next(others, len(self.objects))

    def pack_run(self, pack: Callable[[object], bytes], first: int, end: int) -> bytes:
        objects = self.objects[first:end]
        kind = type(objects[0])
        self.current = end - 1
        self.inside = max(self.depths[first:end]) + 1
        self.hashes = False
        try:
            columns = [self.column([read(obj) for obj in objects]) for read in self.readers[kind]]
            packed = pack([first, self.openers[kind][0], end - first, columns])
        except (AttributeError, NotSendableError, UnicodeEncodeError, ValueError, OverflowError, BufferError) as error:
            raise _OneByOneError from error
        if self.hashes and any(map(_may_hold_keys, columns)):
            self.suspects.append(len(self.ends))
        self.ends.append(len(self.children))
        return packed

    def column(self, values: list[Any]) -> object:
        """What stands for the values of one field of a run (see `wire`)."""
        kinds = set(map(type, values))
        if kinds == _ONLY_ARRAYS:
            return self.take_arrays(values)
        if kinds == _ONLY_TUPLES and max(map(len, values)) <= 1:  # longer ones may be shared, and are sent once
            return {wire_format.TUPLES: list(map(list, values))}
        return values

    def take_arrays(self, arrays: list[npt.NDArray[Any]]) -> int | list[msgpack.ExtType]:
        start = len(self.blobs)
        keys = list(map(id, arrays))
        codes = [vector_code(array) for array in arrays]
        new = self.places.keys().isdisjoint(keys) and len(set(keys)) == len(keys)
        if new and None not in codes and max(array.nbytes for array in arrays) <= wire_format.INLINE_BYTES:
            # What place_of() would do with each, at half the cost: there are hundreds in an episode.
            self.places.update(zip(keys, range(start, start + len(keys)), strict=True))
            self.kept += arrays
            self.blobs += [[code, array.tobytes()] for code, array in zip(codes, arrays, strict=True)]
            return start
        places = [self.place_of(array) for array in arrays]
        return start if new else [_reference(wire_format.REF_BLOB, place) for place in places]

    def pack_entry(self, pack: Callable[[object], bytes], number: int, obj: Any) -> bytes:
        self.current = number
        self.inside = self.depths[number] + 1
        self.hashes = False
        tag, open_ = self.openers[type(obj) if number else _Root]
        try:
            payload: Any = open_(obj)
            packed = pack([number, tag, payload])
        except NotSendableError as error:
            raise EncodeError(self.path(number), error.reason, error.cure) from error
        except UnicodeEncodeError as error:
            raise EncodeError(
                self.path(number), f"text that is not Unicode: {error.reason}", "Replace lone surrogates."
            ) from error
        except (ValueError, OverflowError, BufferError) as error:
            raise EncodeError(
                self.path(number),
                f"msgpack cannot pack it: {error}",
                "Remove cycles, lists nested over 1000 deep, non-contiguous memoryviews and strings over 4 GiB.",
            ) from error
        if self.hashes and (not number or [part for part in payload if type(part) in _NESTS and part]):
            self.suspects.append(len(self.ends))
        self.ends.append(len(self.children))
        return packed

    def refer(self, obj: Any) -> msgpack.ExtType:
        """What msgpack writes for something it does not know: a reference, and the thing itself is queued."""
        kind = type(obj)
        if kind is _ARRAY:
            place = self.places.get(id(obj))
            return self.meet(kind, obj) if place is None else _reference(wire_format.REF_BLOB, place)
        self.hashes = True
        if obj is _EMPTY:
            return _EMPTY_REFERENCE
        known = self.entries.get(id(obj))
        if known is None:
            return self.meet(kind, obj)
        reference, number = known
        self.children.append(number)
        if number <= self.current:
            self.tangled = True
        elif self.depths[number] < self.inside:
            self.depths[number] = self.inside
        return reference

    def meet(self, kind: type, obj: Any) -> msgpack.ExtType:
        take = self.takers.get(kind)
        try:
            if take is None:
                take = self.takers[kind] = self.choose(obj)
            return take(self, obj)
        except NotSendableError as error:
            raise EncodeError(self.path_of(obj), error.reason, error.cure) from error

    def choose(self, obj: Any) -> _Take:
        """What to do with objects of the class of this one, which the message has not met before."""
        kind = type(obj)
        registered = registry.of_class(kind)
        if registered is not None:
            self.openers[kind] = wire_format.TAG_TYPES + len(self.types), registered.pack
            if len(registered.readers) >= wire_format.RUN_FIELDS:
                self.readers[kind] = registered.readers
            self.types.append(registered.described())
            return _Packing.take_entry
        if kind in PACKERS:
            self.openers[kind] = PACKERS[kind]
            return _Packing.take_entry
        if kind is tuple:
            self.openers[kind] = wire_format.TAG_TUPLE, list
            return _Packing.take_entry
        if kind is set or kind is frozenset:
            self.openers[kind] = wire_format.TAG_SET if kind is set else wire_format.TAG_FROZENSET, list
            return _Packing.take_set
        if isinstance(obj, np.generic):
            self.openers[kind] = wire_format.TAG_SCALAR, pack_scalar
            return _Packing.take_scalar
        if kind is MediaSource:
            return _Packing.take_media
        if is_array(obj):
            return _Packing.take_array
        if is_tensor(obj):
            return _Packing.take_tensor
        raise self.unsupported(obj)

    def take_entry(self, obj: object) -> msgpack.ExtType:
        number = len(self.objects)
        self.objects.append(obj)
        self.depths.append(self.inside)
        self.children.append(number)
        reference = _reference(wire_format.REF_ENTRY, number)
        self.entries[id(obj)] = reference, number
        return reference

    def take_scalar(self, scalar: np.generic) -> msgpack.ExtType:
        pack_scalar(scalar)  # raises here, where the path is at hand
        return self.take_entry(scalar)

    def take_set(self, members: Any) -> msgpack.ExtType:
        strangers = set(map(type, members)) - wire_format.KEY_TYPES
        if any(type(member) is int and member.bit_length() > wire_format.KEY_BITS for member in members):
            raise EncodeError(self.path_of(members), "set with an integer of more than 64 bits", "Send a list.")
        if strangers:
            names = ", ".join(sorted(kind.__name__ for kind in strangers))
            raise EncodeError(self.path_of(members), f"set with members of type {names}", "Send a list.")
        return self.take_entry(members)

    def place_of(self, array: npt.NDArray[Any]) -> int:
        """Where an array is among the blobs, taking it there if it is new."""
        place = self.places.get(id(array))
        if place is not None:
            return place
        code = vector_code(array)
        if code is None or array.nbytes > wire_format.INLINE_BYTES:
            description: list[object] = [wire_format.BLOB_ARRAY, describe_dtype(array.dtype), list(array.shape)]
            return self.place_data(array, description, array_bytes(array))
        self.kept.append(array)
        return self.place_row(id(array), [code, array.tobytes()])

    def take_array(self, array: npt.NDArray[Any]) -> msgpack.ExtType:
        return _reference(wire_format.REF_BLOB, self.place_of(array))

    def take_tensor(self, tensor: Any) -> msgpack.ExtType:
        place = self.places.get(id(tensor))
        if place is None:
            name, shape, data = tensor_parts(tensor)
            place = self.place_data(tensor, [wire_format.BLOB_TENSOR, name, shape], data)
        return _reference(wire_format.REF_BLOB, place)

    def place_data(self, obj: object, description: list[object], data: Bytes) -> int:
        self.kept.append(obj)
        if data.nbytes <= wire_format.INLINE_BYTES:
            return self.place_row(id(obj), [*description, data.tobytes()])
        self.frames.append(data.data)
        return self.place_row(id(obj), description)

    def place_row(self, key: int | str, row: list[object]) -> int:
        place = self.places[key] = len(self.blobs)
        self.blobs.append(row)
        return place

    def take_media(self, source: MediaSource) -> msgpack.ExtType:
        place = self.places.get(source.digest)
        if place is None:
            place = self.place_media(source)
        return _reference(wire_format.REF_BLOB, place)

    def place_media(self, source: MediaSource) -> int:
        if not _SHA256.fullmatch(source.digest):
            raise EncodeError(
                self.path_of(source), f"media digest {source.digest!r:.80} is not a sha256", "Use MediaSource.of(data)."
            )
        if self.held(source):
            return self.place_row(source.digest, [wire_format.BLOB_HELD, source.digest])
        self.frames.append(source.data)
        return self.place_row(source.digest, [wire_format.BLOB_MEDIA, source.digest])

    def unsupported(self, obj: object) -> EncodeError:
        kind = type(obj)
        path = self.path_of(obj)
        if isinstance(obj, str | int | float | list | dict | tuple | bytes):
            plain = next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")
            return EncodeError(
                path,
                f"{kind.__qualname__}, a subclass of {plain}, would come back as another type",
                f"Pass {plain}(x).",
            )
        return EncodeError(
            path,
            f"values of type {kind.__module__}.{kind.__qualname__} cannot be sent",
            "Register the class with @wire_type, or convert it to plain data first.",
        )

    def check_keys(self, packed: list[bytes]) -> None:
        """Refuse a dict key that the receiver would refuse.

        msgpack does not say whether what it hands back is a key or a value. Reading the entries with something that
        cannot be a key in place of every reference does say.
        """
        entries = b"".join([packed[number] for number in self.suspects])
        reading = msgpack.Unpacker(
            strict_map_key=False, ext_hook=lambda code, data: [], max_buffer_size=max(len(entries), 1)
        )
        reading.feed(entries)
        for number in self.suspects:
            try:
                reading.unpack()
            except TypeError as error:
                raise EncodeError(
                    self.path(number),
                    "dict with a key that is neither str nor an int of 64 bits",
                    "Use str or int keys.",
                ) from error

    def children_first(self) -> Sequence[int]:
        """Every entry after all those it refers to. Raises `EncodeError` for a cycle and for too deep a nest."""
        if self.tangled:
            order, depth = self.untangled()
        else:
            order, depth = range(len(self.objects) - 1, -1, -1), max(self.depths)
        if depth > MAX_DEPTH:
            raise EncodeError(
                type(self.objects[0]).__qualname__,
                f"objects nest {depth} deep and {MAX_DEPTH} is the most",
                "Keep the objects in a list and refer to them by index.",
            )
        return order

    def untangled(self) -> tuple[Sequence[int], int]:
        """The order of the entries if numbers do not tell it, and how deep they nest."""
        starts = [0, *self.ends]
        waiting = [0] * len(self.objects)
        for child in self.children:
            waiting[child] += 1
        order: list[int] = []
        depth = self.depths[0] - 1
        wave = [0]  # what nothing but `order` refers to, the last wave among it
        while wave:
            order += wave
            depth += 1
            ready = []
            for number in wave:
                for child in self.children[starts[number] : starts[number + 1]]:
                    waiting[child] -= 1
                    if not waiting[child]:
                        ready.append(child)
            wave = ready
        if len(order) < len(self.objects):
            looped = next(number for number, count in enumerate(waiting) if count)
            raise EncodeError(self.path(looped), "the object contains itself", "Refer to the parent by index or id.")
        order.reverse()
        return order, depth

    def path_of(self, target: object) -> str:
        """Where `target`, met while packing the current entry, sits inside the whole object."""
        return self.path(self.current) + locate(self.objects[self.current], target)

    def path(self, number: int) -> str:
        """Where an entry sits inside the whole object, by way of the entries that mentioned it and each other first.

        It is asked for to say where something is wrong; of runs that is not known, and `_OneByOneError` is raised.
        """
        if self.in_runs:
            raise _OneByOneError
        steps = []
        while number:
            parent = bisect.bisect_right(self.ends, self.children.index(number))
            steps.append(locate(self.objects[parent], self.objects[number]))
            number = parent
        root = type(self.objects[0])
        return (root.__qualname__ if dataclasses.is_dataclass(root) else "value") + "".join(reversed(steps))


def _may_hold_keys(column: Any) -> bool:
    """Whether something in a column could be a dict with a key, or hold one."""
    parts = column if type(column) is list else column.get(wire_format.TUPLES, ()) if type(column) is dict else ()
    return not _NESTS.isdisjoint(map(type, parts)) and any(type(part) in _NESTS and part for part in parts)


def _as_is(obj: Any) -> Any:
    return obj
