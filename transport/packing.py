"""From an object to frames: one header and the raw bytes of every array and media source.

msgpack's C packer walks lists, dicts and plain values by itself and hands back only what it does not know. Each such
thing becomes a numbered entry or blob, is queued, and is packed by itself later. That keeps the walk flat however deep
objects nest, and gives an object that is referred to twice one entry.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np

from renderers.media.source import MediaSource
from transport import registry, wire
from transport.arrays import (
    Bytes,
    UnsupportedArrayError,
    array_bytes,
    describe_dtype,
    is_array,
    is_tensor,
    pack_scalar,
    tensor_parts,
)
from transport.errors import EncodeError
from transport.limits import MAX_DEPTH

_SHA256 = re.compile(r"[0-9a-f]{64}")

Held = Callable[[MediaSource], bool]


def pack(obj: object, held: Held) -> list[wire.Buffer]:
    """The frames of `obj`. `held` is asked once per media source; the bytes of one it affirms are left out."""
    packing = _Packing(held)
    packing.add(obj, parent=-1)
    # The list grows while it is read: packing an entry queues what it refers to.
    packed = [packing.pack_entry(number) for number in packing.queue()]
    order = packing.children_first()
    prelude = wire.PRELUDE.pack(wire.PRELUDE_MAGIC, wire.FORMAT_VERSION, len(packed))
    blobs = msgpack.packb(packing.blobs)
    return [b"".join((prelude, blobs, *(packed[number] for number in order))), *packing.frames]


class _Packing:
    """One message being made."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self.blobs: list[list[object]] = []
        self.frames: list[wire.Buffer] = []
        self.objects: list[Any] = []
        self.parents: list[int] = []  # the entry that mentioned it first; only error messages need it
        self.children: list[list[int]] = []
        self.references: dict[int | str, msgpack.ExtType] = {}  # by id() for objects kept alive here, by media digest
        self.kept: list[object] = []
        self.current = -1
        self.packer = msgpack.Packer(default=self.refer, strict_types=True, use_bin_type=True)

    def add(self, obj: object, parent: int) -> int:
        self.objects.append(obj)
        self.parents.append(parent)
        self.children.append([])
        return len(self.objects) - 1

    def queue(self) -> Iterator[int]:
        number = 0
        while number < len(self.objects):
            yield number
            number += 1

    def pack_entry(self, number: int) -> bytes:
        self.current = number
        obj = self.objects[number]
        tag, payload = (wire.TAG_ROOT, obj) if number == 0 else self.open(obj)
        try:
            packed: bytes = self.packer.pack([number, tag, payload])
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
        if any(type(self.objects[child]).__hash__ is not None for child in self.children[number]):
            self.check_keys(number, packed)
        return packed

    def open(self, obj: Any) -> tuple[object, object]:
        """The tag and the payload of an entry."""
        kind = type(obj)
        if kind is tuple:
            return wire.TAG_TUPLE, list(obj)
        if kind is set or kind is frozenset:
            return wire.TAG_SET if kind is set else wire.TAG_FROZENSET, self.set_members(obj)
        if isinstance(obj, np.generic):
            return wire.TAG_SCALAR, pack_scalar(obj)
        registered = registry.of_class(kind)
        assert registered is not None  # refer() queues nothing else
        return [registered.name, registered.version], registered.pack(obj)

    def set_members(self, obj: Any) -> list[object]:
        strangers = set(map(type, obj)) - wire.KEY_TYPES
        if strangers:
            names = ", ".join(sorted(kind.__name__ for kind in strangers))
            raise EncodeError(self.path(self.current), f"set with members of type {names}", "Send a list.")
        return list(obj)

    def refer(self, obj: Any) -> msgpack.ExtType:
        """What msgpack writes for something it does not know: a reference, and the thing itself is queued."""
        reference = self.references.get(obj.digest if type(obj) is MediaSource else id(obj))
        if reference is None:
            try:
                reference = self.take(obj)
            except UnsupportedArrayError as error:
                raise EncodeError(self.path_of(obj), error.reason, error.cure) from error
        if reference.code == wire.REF_ENTRY:
            self.children[self.current].append(int.from_bytes(reference.data, "big"))
        return reference

    def take(self, obj: Any) -> msgpack.ExtType:
        if type(obj) is MediaSource:
            return self.take_media(obj)
        if is_array(obj):
            return self.take_blob(obj, [wire.BLOB_ARRAY, describe_dtype(obj.dtype), list(obj.shape)], array_bytes(obj))
        if is_tensor(obj):
            name, shape, data = tensor_parts(obj)
            return self.take_blob(obj, [wire.BLOB_TENSOR, name, shape], data)
        if isinstance(obj, np.generic):
            pack_scalar(obj)  # raises here, where the path is at hand
        elif type(obj) not in (tuple, set, frozenset) and registry.of_class(type(obj)) is None:
            raise self.unsupported(obj)
        number = self.add(obj, parent=self.current)
        return self.remember(id(obj), wire.REF_ENTRY, number)

    def take_blob(self, obj: object, description: list[object], data: Bytes) -> msgpack.ExtType:
        self.kept.append(obj)
        self.blobs.append(description)
        self.frames.append(data.data)
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
        reference = msgpack.ExtType(code, number.to_bytes(4, "big"))
        self.references[key] = reference
        return reference

    def unsupported(self, obj: object) -> EncodeError:
        kind = type(obj)
        path = self.path_of(obj)
        if kind is int:
            return EncodeError(path, "integer beyond 64 bits", "Send it as a str.")
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

    def check_keys(self, number: int, packed: bytes) -> None:
        """Refuse a dict key that the receiver would refuse.

        msgpack does not say whether what it hands back is a key or a value. Reading the entry with something that
        cannot be a key in place of every reference does say.
        """
        try:
            msgpack.unpackb(packed, strict_map_key=False, ext_hook=lambda code, data: [])
        except TypeError as error:
            raise EncodeError(
                self.path(number), "dict with a key that is neither str nor int", "Use str or int keys."
            ) from error

    def children_first(self) -> list[int]:
        """Every entry after all those it refers to. Raises `EncodeError` for a cycle and for too deep a nest."""
        waiting = [0] * len(self.objects)
        for children in self.children:
            for child in children:
                waiting[child] += 1
        depth = [0] * len(self.objects)
        order = [] if waiting[0] else [0]
        for number in order:
            for child in self.children[number]:
                waiting[child] -= 1
                depth[child] = max(depth[child], depth[number] + 1)
                if waiting[child] == 0:
                    order.append(child)
        if len(order) < len(self.objects):
            looped = next(number for number, count in enumerate(waiting) if count)
            raise EncodeError(self.path(looped), "the object contains itself", "Refer to the parent by index or id.")
        deepest = max(order, key=depth.__getitem__)
        if depth[deepest] > MAX_DEPTH:
            raise EncodeError(
                type(self.objects[0]).__qualname__,
                f"objects nest {depth[deepest]} deep and {MAX_DEPTH} is the most",
                "Keep the objects in a list and refer to them by index.",
            )
        order.reverse()
        return order

    def path_of(self, target: object) -> str:
        """Where `target`, met while packing the current entry, sits inside the whole object."""
        return self.path(self.current) + _locate(self.objects[self.current], target)

    def path(self, number: int) -> str:
        steps = []
        while (parent := self.parents[number]) >= 0:
            steps.append(_locate(self.objects[parent], self.objects[number]))
            number = parent
        root = type(self.objects[0])
        return (root.__qualname__ if dataclasses.is_dataclass(root) else "value") + "".join(reversed(steps))


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
