"""Every exception of `transport`, under one root.

The text of each has the wrong value, its place and the cure.
"""

from typing import Final

import numpy as np

from renderers.errors import Copyable

_MAX_CHARACTERS: Final = 80
_MAX_BITS: Final = 256


def quoted(value: object) -> str:
    """The beginning of the `repr` of text, bytes and numbers; for any other value only its type.

    The `repr` of a decoded value can be too long to print: a message of a few hundred bytes can hold a tuple whose two
    members are the same tuple, and so on. A shared object is built once, but its `repr` doubles with every level.
    """
    if type(value) is int and value.bit_length() > _MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    if value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, np.number):
        return f"{value!r:.{_MAX_CHARACTERS}}"
    return f"a {type(value).__name__}"


class TransportError(Copyable, Exception):
    """Root of every error that `transport` raises on purpose.

    Cure: what the text says; where one class has errors of one cure, its docstring has it.
    """


class EncodeError(TransportError):
    """A value cannot be encoded; `path` is its path inside the object.

    Cure: change the value at the path as the text says.
    """

    def __init__(self, path: str, reason: str, cure: str) -> None:
        self.path = path
        self.reason = reason
        self.cure = cure
        super().__init__(f"{path}: {reason}. {cure}")


class DecodeError(TransportError):
    """Bytes cannot be decoded.

    Cure: what the text says; usually, install one version of mmrollouts on both sides.
    """


class MalformedError(DecodeError):
    """The bytes are not a valid message or record file, or they are incomplete.

    Cure: ask the sender for the message again; restore the file from a copy, or repair it with `repair_record_file`.
    """

    def __init__(self, what: str, cure: str = "Ask the sender for the message again.") -> None:
        super().__init__(f"{what}. {cure}")


class ChecksumError(DecodeError):
    """Bytes changed between writing and reading.

    For a record file, `index` is the record that cannot be read and `offset` the byte at which the damage begins.

    Cure: ask the sender for the message again; for a file, restore it from a copy, or drop the damaged records with
    `repair_record_file`.
    """

    def __init__(
        self,
        what: str,
        expected: str | None = None,
        actual: str | None = None,
        *,
        index: int | None = None,
        offset: int | None = None,
    ) -> None:
        self.index = index
        self.offset = offset
        change = "is damaged" if expected is None else f"was written with checksum {expected} and now has {actual}"
        cure = "Ask the sender for the message again."
        if index is not None:
            cure = "Restore the file from another copy, or drop the damaged records with repair_record_file."
        super().__init__(f"{what} {change}. {cure}")


def unknown_type(name: str, declared_in: str = "", reason: str = "") -> DecodeError:
    """The error of a type that the sender used and this process has not registered.

    `declared_in` is the module that declares it according to the sender, "" if unknown; `reason` is why that module
    could not be imported. Types of this distribution need no import by the user.
    """
    what = f"no type is registered under the wire name {name!r:.200} in the process that decodes"
    if reason:
        cure = f"{declared_in} declares it and cannot be imported there: {reason}"
    elif declared_in == "__main__":
        cure = (
            "The sender declares it in its main script. Declare it with @wire_type in a module, and import that "
            "module in both processes."
        )
    elif declared_in:
        cure = f"Add `import {declared_in:.200}`, which declares it at the sender, to the process that decodes."
    else:
        cure = "Import the module that declares it with @wire_type there, or update the installation there."
    return DecodeError(f"{what}. {cure}")


class MissingMediaError(DecodeError):
    """A message refers to media that the sender omitted and that this process does not have.

    Cure: ask the sender for the media.
    """

    def __init__(self, digest: str) -> None:
        self.digest = digest
        super().__init__(
            f"media sha256 {digest} was not sent with this message and is not stored here. Ask the sender for it."
        )


class LimitError(DecodeError):
    """A message is larger than the receiver accepts. `limit` is the name of the `DecodeLimits` field.

    Cure: if the sender is trusted, raise the field of `DecodeLimits` that the text names.
    """

    def __init__(self, limit: str, allowed: int, actual: int) -> None:
        self.limit = limit
        super().__init__(
            f"{limit[4:].replace('_', ' ')} of the message: {actual}, at most {allowed} allowed. "
            f"If the sender is trusted, pass DecodeLimits({limit}=...)."
        )


class FileLockedError(TransportError):
    """A record file is open in a writer or being repaired, in this process or another one.

    Cure: wait until the file is closed, or write to another file and merge the two.
    """

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} is open for writing here or in another process, and a file has one writer at a time. "
            "Wait until it is closed, or write to a file of your own and merge the two."
        )


class FileChangedError(TransportError):
    """Another writer changed a record file.

    Cure: give each writer a file of its own.
    """

    def __init__(self, path: str, expected: int, actual: int) -> None:
        super().__init__(
            f"{path} has {actual} bytes and had {expected} when it was last used here: another writer changed it. "
            "Give each writer a file of its own."
        )
