"""Encoding an object as frames: a header with everything small, and one frame per large array and media source.

msgpack's C packer walks lists, dicts and plain values. It calls `_Encoding.reference_to` for every other object, which
becomes a numbered entry or a blob. Entries are queued and encoded one after the other, so that the depth of nested
objects costs no recursion and an object with two references has one entry.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgpack
import numpy as np

from renderers.media.item import MediaSource
from transport.errors import EncodeError, NotEncodableError
from transport.wire import registry, wire_format
from transport.wire.arrays import encode_scalar, is_array, is_tensor
from transport.wire.blob_table import BlobTable, OmitMedia
from transport.wire.builtin_values import ENCODERS
from transport.wire.limits import MAX_DEPTH
from transport.wire.paths import find_cycle, find_path


@functools.lru_cache(maxsize=1 << 14)
def _reference(code: int, number: int) -> msgpack.ExtType:
    size = 1 if number < 1 << 8 else 2 if number < 1 << 16 else 4
    # Without the checks of the constructor, which would take a tenth of the whole encoding.
    return tuple.__new__(msgpack.ExtType, (code, number.to_bytes(size, "big")))


_ARRAY: Final = np.ndarray
_EMPTY_TUPLE: Final[tuple[()]] = ()
_EMPTY_TUPLE_REFERENCE: Final = msgpack.ExtType(wire_format.EMPTY_TUPLE, b"")
# What can hold a dict key or an extension value; msgpack packs a user's ExtType without a call of `reference_to`.
_CHECKED: Final = {list, dict, msgpack.ExtType}
_Add: TypeAlias = "Callable[[_Encoding, Any], msgpack.ExtType]"


def encode_message(
    obj: object, omit_media: OmitMedia, *, depth: int = 0
) -> tuple[list[bytes], list[wire_format.Buffer]]:
    """The parts of the first frame of `obj`, and its other frames.

    `omit_media` is called once per media source; the bytes of a source for which it returns True are left out. `depth`
    is the number of objects that count as being around `obj`.
    """
    encoding = _Encoding(obj, omit_media, depth)
    packer = msgpack.Packer(default=encoding.reference_to, strict_types=True, use_bin_type=True)
    packed = encoding.encode_entries(packer.pack)
    prelude = wire_format.PRELUDE.pack(wire_format.PRELUDE_MAGIC, wire_format.FORMAT_VERSION, len(packed))
    tables = [packer.pack(encoding.types), packer.pack(encoding.blobs.rows)]
    return [prelude, *tables, b"".join(packed)], encoding.blobs.frames


class _Root:
    """The key of the root entry among the entry encoders; the class of the root object has an encoder of its own."""


class _Encoding:
    """The state of one message that is being encoded.

    It holds no reference to itself or to its packer, so that the objects which it keeps alive are freed with it.
    """

    def __init__(self, root: object, omit_media: OmitMedia, depth: int) -> None:
        self.adders: dict[type, _Add] = {}  # how an instance of each class is added to the message
        self.types: list[list[object]] = []
        # The tag of each class of entries, and the function that gives the payload of an instance.
        self.entry_encoders: dict[type, tuple[int, Callable[[Any], object]]] = {
            _Root: (wire_format.TAG_ROOT, lambda obj: obj)
        }
        self.blobs = BlobTable(omit_media)
        self.objects: list[Any] = [root]  # one per entry
        self.entries: dict[int, tuple[msgpack.ExtType, int]] = {}  # reference and number of each entry, by id()
        self.children: list[int] = []  # the children of the first encoded entry, then those of the second, ...
        self.children_ends: list[int] = []  # where the children of each encoded entry end in that list
        self.depths: list[int] = [depth]  # of each entry; wrong if `refers_backwards`
        self.refers_backwards = False  # whether an entry refers to one that was encoded before it, or to itself
        self.found_objects = False  # whether the current entry refers to something that may be a key of a dict
        self.references = 0  # extension values in the current entry, without those of the user
        # The places, among the encoded entries, of those that may have wrong keys or an extension value of the user,
        # and their number of references.
        self.to_check: list[tuple[int, int]] = []
        self.current = 0  # the entry that is being encoded
        self.child_depth = 1  # the depth of what the current entry refers to

    def encode_entries(self, pack: Callable[[object], bytes]) -> list[bytes]:
        """All entries, children first.

        Entries get their numbers when they are found, which is after their parents. The reverse order therefore puts
        children first, unless an entry refers to an entry with a smaller number.
        """
        # The list grows during the loop: encoding an entry queues the objects that it refers to.
        packed = [self.encode_entry(pack, number, obj) for number, obj in enumerate(self.objects)]
        self.check_entries(packed)
        return [packed[number] for number in self.children_first()]

    def encode_entry(self, pack: Callable[[object], bytes], number: int, obj: Any) -> bytes:
        self.current = number
        self.child_depth = self.depths[number] + 1
        self.found_objects, self.references = False, 0
        tag, encode_payload = self.entry_encoders[type(obj) if number else _Root]
        try:
            payload: Any = encode_payload(obj)
            packed = pack([number, tag, payload])
        except NotEncodableError as error:
            raise EncodeError(self.path(number), error.reason, error.cure) from error
        except UnicodeEncodeError as error:
            raise EncodeError(
                self.path(number), f"text that is not Unicode: {error.reason}", "Replace lone surrogates."
            ) from error
        except (ValueError, OverflowError, BufferError) as error:
            cycle = find_cycle(obj)
            if cycle:
                path = self.path(number) + cycle
                raise EncodeError(path, "a cycle: a list or dict that contains itself", "Remove it.") from error
            raise EncodeError(
                self.path(number),
                f"msgpack cannot pack it: {str(error).rstrip('.')}",
                "Remove lists nested over 1000 deep, non-contiguous memoryviews and strings over 4 GiB.",
            ) from error
        if (self.found_objects or may_hold_extensions(packed)) and (not number or _needs_check(payload)):
            self.to_check.append((len(self.children_ends), self.references))
        self.children_ends.append(len(self.children))
        return packed

    def reference_to(self, obj: Any) -> msgpack.ExtType:
        """What msgpack writes in place of an object that it cannot pack. A new object becomes an entry or a blob."""
        kind = type(obj)
        self.references += 1
        if kind is _ARRAY:
            number = self.blobs.numbers.get(id(obj))
            return self.add(kind, obj) if number is None else _reference(wire_format.REF_BLOB, number)
        self.found_objects = True
        if obj is _EMPTY_TUPLE:
            return _EMPTY_TUPLE_REFERENCE
        known = self.entries.get(id(obj))
        if known is None:
            return self.add(kind, obj)
        reference, number = known
        self.children.append(number)
        if number <= self.current:
            self.refers_backwards = True
        elif self.depths[number] < self.child_depth:
            self.depths[number] = self.child_depth
        return reference

    def add(self, kind: type, obj: Any) -> msgpack.ExtType:
        add = self.adders.get(kind)
        try:
            if add is None:
                add = self.adders[kind] = self.choose_adder(obj)
            return add(self, obj)
        except NotEncodableError as error:
            path = self.path(self.current) + find_path(self.objects[self.current], obj)
            raise EncodeError(path, error.reason, error.cure) from error

    def choose_adder(self, obj: Any) -> _Add:
        """How objects of the class of `obj` are added to the message. Raises `NotEncodableError`."""
        kind = type(obj)
        registered = registry.registration_of_class(kind)
        if registered is not None:
            self.entry_encoders[kind] = wire_format.TAG_TYPES + len(self.types), registered.encode
            self.types.append(registered.type_row())
            return _Encoding.add_entry
        if kind in ENCODERS:
            self.entry_encoders[kind] = ENCODERS[kind]
            return _Encoding.add_entry
        if kind is tuple:
            self.entry_encoders[kind] = wire_format.TAG_TUPLE, list
            return _Encoding.add_entry
        if kind is set or kind is frozenset:
            self.entry_encoders[kind] = wire_format.TAG_SET if kind is set else wire_format.TAG_FROZENSET, list
            return _Encoding.add_set
        if isinstance(obj, np.generic):
            self.entry_encoders[kind] = wire_format.TAG_SCALAR, encode_scalar
            return _Encoding.add_scalar
        if kind is MediaSource:
            return lambda encoding, source: _reference(wire_format.REF_BLOB, encoding.blobs.add_media(source))
        if is_array(obj):
            return lambda encoding, array: _reference(wire_format.REF_BLOB, encoding.blobs.add_array(array))
        if is_tensor(obj):
            return lambda encoding, tensor: _reference(wire_format.REF_BLOB, encoding.blobs.add_tensor(tensor))
        raise _unsupported(obj)

    def add_entry(self, obj: object) -> msgpack.ExtType:
        number = len(self.objects)
        self.objects.append(obj)
        self.depths.append(self.child_depth)
        self.children.append(number)
        reference = _reference(wire_format.REF_ENTRY, number)
        self.entries[id(obj)] = reference, number
        return reference

    def add_scalar(self, scalar: np.generic) -> msgpack.ExtType:
        encode_scalar(scalar)  # raises here, where the path is known
        return self.add_entry(scalar)

    def add_set(self, members: Any) -> msgpack.ExtType:
        if any(type(member) is int and member.bit_length() > wire_format.KEY_BITS for member in members):
            raise NotEncodableError("set with an integer of more than 64 bits", "Send a list.")
        unsupported = set(map(type, members)) - wire_format.KEY_TYPES
        if unsupported:
            names = ", ".join(sorted(kind.__name__ for kind in unsupported))
            raise NotEncodableError(f"set with members of type {names}", "Send a list.")
        return self.add_entry(members)

    def check_entries(self, packed: list[bytes]) -> None:
        """Refuse a dict key that the receiver would refuse, and a user's extension value: it would be a reference.

        msgpack does not say whether the object that it hands back is a key or a value. Unpacking the entries with a
        list, which cannot be a key, in place of every reference finds the keys.
        """
        entries = b"".join([packed[place] for place, _ in self.to_check])
        found: list[int] = []
        unpacker = msgpack.Unpacker(
            strict_map_key=False,
            ext_hook=lambda code, data: found.append(code) or [],  # type: ignore[func-returns-value]
            max_buffer_size=max(len(entries), 1),
        )
        unpacker.feed(entries)
        for place, references in self.to_check:
            found.clear()
            try:
                unpacker.unpack()
            except TypeError as error:
                raise EncodeError(
                    self.path(place),
                    "dict with a key that is neither str nor an int of 64 bits",
                    "Use str or int keys.",
                ) from error
            if len(found) != references:
                raise EncodeError(
                    self.path(place),
                    "msgpack.ExtType, which the receiver could mistake for a reference",
                    "Send its code and data.",
                )

    def children_first(self) -> Sequence[int]:
        """Every entry after its children. Raises `EncodeError` for a cycle and for objects that nest too deep."""
        if self.refers_backwards:
            order, depth = self.sort_by_references()
        else:
            order, depth = range(len(self.objects) - 1, -1, -1), max(self.depths)
        if depth > MAX_DEPTH:
            raise EncodeError(
                type(self.objects[0]).__qualname__,
                f"objects nest {depth} deep and {MAX_DEPTH} is the most",
                "Keep the objects in a list and refer to them by index.",
            )
        return order

    def sort_by_references(self) -> tuple[Sequence[int], int]:
        """A topological order of the entries, children first, and how deep they nest."""
        starts = [0, *self.children_ends]
        parents_left = [0] * len(self.objects)
        for child in self.children:
            parents_left[child] += 1
        order: list[int] = []
        depth = self.depths[0] - 1
        level = [0]  # the entries all of whose parents are in `order`
        while level:
            order += level
            depth += 1
            next_level = []
            for number in level:
                for child in self.children[starts[number] : starts[number + 1]]:
                    parents_left[child] -= 1
                    if not parents_left[child]:
                        next_level.append(child)
            level = next_level
        if len(order) < len(self.objects):
            in_cycle = next(number for number, count in enumerate(parents_left) if count)
            raise EncodeError(self.path(in_cycle), "the object contains itself", "Refer to the parent by index or id.")
        order.reverse()
        return order, depth

    def path(self, number: int) -> str:
        """The path from the root to an entry, for an error, through the first reference to each entry on the way."""
        steps = []
        while number:
            parent = bisect.bisect_right(self.children_ends, self.children.index(number))
            steps.append(find_path(self.objects[parent], self.objects[number]))
            number = parent
        root = type(self.objects[0])
        return (root.__qualname__ if dataclasses.is_dataclass(root) else "value") + "".join(reversed(steps))


def _unsupported(obj: object) -> NotEncodableError:
    kind = type(obj)
    if isinstance(obj, str | int | float | list | dict | tuple | bytes):
        plain = next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")
        return NotEncodableError(
            f"{kind.__qualname__}, a subclass of {plain}, would come back as another type", f"Pass {plain}(x)."
        )
    return NotEncodableError(
        f"values of type {kind.__module__}.{kind.__qualname__} cannot be encoded",
        "Register the class with @wire_type, or convert it to plain data first.",
    )


def may_hold_extensions(packed: bytes) -> bool:
    """False if no value in these msgpack bytes is an extension value."""
    # msgpack begins an extension value with one of these
    return any(map(packed.__contains__, b"\xc7\xc8\xc9\xd4\xd5\xd6\xd7\xd8"))


def _needs_check(values: Any) -> bool:
    """Whether a value in a payload is, or holds, a dict with a key or an extension value."""
    return type(values) is list and any(type(value) in _CHECKED and value for value in values)
