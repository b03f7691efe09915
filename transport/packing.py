"""From an object to frames: one header with everything small in it, and the raw bytes of large arrays and of media.

msgpack's C packer walks lists, dicts and plain values by itself and hands back only what it does not know. Each such
thing becomes a numbered entry or blob; entries are queued, and each is packed by itself later. That keeps the walk flat
however deep objects nest, and gives an object that is referred to twice one entry.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt

from renderers.media.source import MediaSource
from transport import registry, wire
from transport.arrays import (
    Bytes,
    array_bytes,
    describe_dtype,
    is_array,
    is_tensor,
    pack_scalar,
    tensor_parts,
    vector_code,
)
from transport.builtin_values import PACKERS
from transport.errors import EncodeError
from transport.limits import MAX_DEPTH
from transport.not_sendable import NotSendableError

_SHA256 = re.compile(r"[0-9a-f]{64}")

Held = Callable[[MediaSource], bool]


@functools.lru_cache(maxsize=1 << 14)
def _reference(code: int, number: int) -> msgpack.ExtType:
    size = 1 if number < 1 << 8 else 2 if number < 1 << 16 else 4
    # Without the checks of the constructor, which would take a tenth of the whole encoding.
    return tuple.__new__(msgpack.ExtType, (code, number.to_bytes(size, "big")))


_NESTS = {list, dict}  # what a dict can stand in
_Take: TypeAlias = "Callable[[_Packing, Any], msgpack.ExtType]"


def pack(obj: object, held: Held) -> tuple[list[bytes], list[wire.Buffer]]:
    """The parts of the first frame of `obj`, and its other frames.

    `held` is asked once per media source; the bytes of one it affirms are left out.
    """
    packing = _Packing(obj, held)
    packer = msgpack.Packer(default=packing.refer, strict_types=True, use_bin_type=True)
    # The list grows while it is read: packing an entry queues what it refers to.
    packed = [packing.pack_entry(packer, number, obj) for number, obj in enumerate(packing.objects)]
    packing.check_keys(packed)
    order = packing.children_first()
    prelude = wire.PRELUDE.pack(wire.PRELUDE_MAGIC, wire.FORMAT_VERSION, len(packed))
    tables = packer.pack(packing.types), packer.pack(packing.blobs)
    return [prelude, *tables, *[packed[number] for number in order]], packing.frames


class _Packing:
    """One message being made. Holds neither itself nor its packer, so what it keeps goes when it does."""

    def __init__(self, root: object, held: Held) -> None:
        self.held = held
        self.takers: dict[type, _Take] = {}  # what to do with instances of each class
        self.types: list[list[object]] = []
        self.openers: dict[type, tuple[int, Callable[[Any], object]]] = {}  # tag and payload of entries
        self.blobs: list[list[object]] = []
        self.frames: list[wire.Buffer] = []
        self.objects: list[Any] = [root]
        self.children: list[list[int]] = [[]]
        self.references: dict[int | str, msgpack.ExtType] = {}  # by id() for objects kept alive here, by media digest
        self.kept: list[object] = []
        self.hashes = False  # whether the current entry refers to something Python takes for a dict key
        self.suspects: list[int] = []  # entries that may have such a key
        self.current = -1

    def pack_entry(self, packer: msgpack.Packer, number: int, obj: Any) -> bytes:
        self.current = number
        self.hashes = False
        tag, open_ = self.openers[type(obj)] if number else (wire.TAG_ROOT, _as_is)
        try:
            payload: Any = open_(obj)
            packed: bytes = packer.pack([number, tag, payload])
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
        if self.hashes and (number == 0 or _holds_nests(payload)):
            self.suspects.append(number)
        return packed

    def refer(self, obj: Any) -> msgpack.ExtType:
        """What msgpack writes for something it does not know: a reference, and the thing itself is queued."""
        kind = type(obj)
        if kind is not np.ndarray:
            self.hashes = True
        reference = self.references.get(obj.digest if kind is MediaSource else id(obj))
        if reference is None:
            try:
                if kind is np.ndarray:
                    return self.take_array(obj)
                take = self.takers.get(kind)
                if take is None:
                    take = self.takers[kind] = self.choose(obj)
                reference = take(self, obj)
            except NotSendableError as error:
                raise EncodeError(self.path_of(obj), error.reason, error.cure) from error
        elif reference.code == wire.REF_ENTRY:
            self.children[self.current].append(int.from_bytes(reference.data, "big"))
        return reference

    def choose(self, obj: Any) -> _Take:
        """What to do with objects of the class of this one, which the message has not met before."""
        kind = type(obj)
        registered = registry.of_class(kind)
        if registered is not None:
            self.openers[kind] = wire.TAG_TYPES + len(self.types), registered.pack
            self.types.append([registered.name, registered.version, list(registered.fields)])
            return _Packing.take_entry
        if kind in PACKERS:
            self.openers[kind] = PACKERS[kind]
            return _Packing.take_entry
        if kind is tuple:
            self.openers[kind] = wire.TAG_TUPLE, list
            return _Packing.take_entry
        if kind is set or kind is frozenset:
            self.openers[kind] = wire.TAG_SET if kind is set else wire.TAG_FROZENSET, list
            return _Packing.take_set
        if isinstance(obj, np.generic):
            self.openers[kind] = wire.TAG_SCALAR, pack_scalar
            return _Packing.take_scalar
        if is_array(obj):
            return _Packing.take_array
        if kind is MediaSource:
            return _Packing.take_media
        if is_tensor(obj):
            return _Packing.take_tensor
        raise self.unsupported(obj)

    def take_entry(self, obj: object) -> msgpack.ExtType:
        number = len(self.objects)
        self.objects.append(obj)
        self.children.append([])
        self.children[self.current].append(number)
        return self.remember(id(obj), wire.REF_ENTRY, number)

    def take_scalar(self, scalar: np.generic) -> msgpack.ExtType:
        pack_scalar(scalar)  # raises here, where the path is at hand
        return self.take_entry(scalar)

    def take_set(self, members: Any) -> msgpack.ExtType:
        strangers = set(map(type, members)) - wire.KEY_TYPES
        if any(type(member) is int and member.bit_length() > wire.KEY_BITS for member in members):
            raise EncodeError(self.path_of(members), "set with an integer of more than 64 bits", "Send a list.")
        if strangers:
            names = ", ".join(sorted(kind.__name__ for kind in strangers))
            raise EncodeError(self.path_of(members), f"set with members of type {names}", "Send a list.")
        return self.take_entry(members)

    def take_array(self, array: npt.NDArray[Any]) -> msgpack.ExtType:
        code = vector_code(array)
        if code is None or array.nbytes > wire.INLINE_BYTES:
            description: list[object] = [wire.BLOB_ARRAY, describe_dtype(array.dtype), list(array.shape)]
            return self.take_blob(array, description, array_bytes(array))
        # What take_row() does, without the calls: there are hundreds of these in an episode.
        blobs = self.blobs
        reference = self.references[id(array)] = _reference(wire.REF_BLOB, len(blobs))
        blobs.append([code, array.tobytes()])
        self.kept.append(array)
        return reference

    def take_tensor(self, tensor: Any) -> msgpack.ExtType:
        name, shape, data = tensor_parts(tensor)
        return self.take_blob(tensor, [wire.BLOB_TENSOR, name, shape], data)

    def take_blob(self, obj: object, description: list[object], data: Bytes) -> msgpack.ExtType:
        if data.nbytes <= wire.INLINE_BYTES:
            return self.take_row(obj, [*description, data.tobytes()])
        self.frames.append(data.data)
        return self.take_row(obj, description)

    def take_row(self, obj: object, row: list[object]) -> msgpack.ExtType:
        self.kept.append(obj)
        self.blobs.append(row)
        return self.remember(id(obj), wire.REF_BLOB, len(self.blobs) - 1)

    def take_media(self, source: MediaSource) -> msgpack.ExtType:
        if not _SHA256.fullmatch(source.digest):
            raise EncodeError(
                self.path_of(source), f"media digest {source.digest!r:.80} is not a sha256", "Use MediaSource.of(data)."
            )
        if self.held(source):
            self.blobs.append([wire.BLOB_HELD, source.digest])
        else:
            self.blobs.append([wire.BLOB_MEDIA, source.digest])
            self.frames.append(source.data)
        return self.remember(source.digest, wire.REF_BLOB, len(self.blobs) - 1)

    def remember(self, key: int | str, code: int, number: int) -> msgpack.ExtType:
        reference = _reference(code, number)
        self.references[key] = reference
        return reference

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

    def children_first(self) -> list[int]:
        """Every entry after all those it refers to. Raises `EncodeError` for a cycle and for too deep a nest."""
        waiting = [0] * len(self.objects)
        for child in itertools.chain.from_iterable(self.children):
            waiting[child] += 1
        order: list[int] = []
        depth = -1
        wave = [0]  # what nothing but `order` refers to, the last wave among it
        while wave:
            order += wave
            depth += 1
            ready = []
            for child in itertools.chain.from_iterable([self.children[number] for number in wave]):
                waiting[child] -= 1
                if not waiting[child]:
                    ready.append(child)
            wave = ready
        if len(order) < len(self.objects):
            looped = next(number for number, count in enumerate(waiting) if count)
            raise EncodeError(self.path(looped), "the object contains itself", "Refer to the parent by index or id.")
        if depth > MAX_DEPTH:
            raise EncodeError(
                type(self.objects[0]).__qualname__,
                f"objects nest {depth} deep and {MAX_DEPTH} is the most",
                "Keep the objects in a list and refer to them by index.",
            )
        order.reverse()
        return order

    def path_of(self, target: object) -> str:
        """Where `target`, met while packing the current entry, sits inside the whole object."""
        return self.path(self.current) + _locate(self.objects[self.current], target)

    def path(self, number: int) -> str:
        """Where an entry sits inside the whole object, by way of the entries that mentioned it and each other first."""
        parents: dict[int, int] = {}
        for parent, children in enumerate(self.children):
            for child in children:
                parents.setdefault(child, parent)
        steps = []
        while number:
            steps.append(_locate(self.objects[parents[number]], self.objects[number]))
            number = parents[number]
        root = type(self.objects[0])
        return (root.__qualname__ if dataclasses.is_dataclass(root) else "value") + "".join(reversed(steps))


def _holds_nests(payload: Any) -> bool:
    """Whether something in the payload could be a dict with a key, or hold one."""
    return not _NESTS.isdisjoint(map(type, payload)) and any(type(part) in _NESTS and part for part in payload)


def _as_is(obj: Any) -> Any:
    return obj


def _locate(container: Any, target: object) -> str:
    """The steps from a container to the very object `target`. Slow, and used only to say where something failed."""
    seen = set()
    stack = [(container, "")]
    while stack:
        value, path = stack.pop()
        if value is target and path:
            return path
        if id(value) in seen or (value is not container and not isinstance(value, list | dict)):
            continue
        seen.add(id(value))
        stack.extend((part, path + step) for step, part in _steps(value))
    return ""


def _steps(container: Any) -> Iterator[tuple[str, object]]:
    if isinstance(container, dict):
        for key, value in container.items():
            yield f"[{key!r}]", value
            yield f" (key {key!r:.80})", key
    elif isinstance(container, list | tuple | set | frozenset):
        for index, value in enumerate(container):
            yield f"[{index}]", value
    elif dataclasses.is_dataclass(container):
        for field in dataclasses.fields(container):
            yield f".{field.name}", getattr(container, field.name)
