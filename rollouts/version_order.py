"""The order of the versions of weights: integers in decimal digits, or the places of names in a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollouts.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class VersionOrder:
    """Gives each version its place. `places` is None where versions are integers in decimal digits."""

    places: dict[str, int] | None = None

    @classmethod
    def of_names(cls, versions: Sequence[str] | None) -> VersionOrder:
        """The order of `versions`, all names, the oldest first; of integers for None.

        Raises `ArgumentError` for values that are not a list, and for a name that is in the list twice.
        """
        if versions is None:
            return cls()
        if isinstance(versions, str) or not isinstance(versions, Sequence):
            raise ArgumentError("versions", versions, "pass a list of all versions, the oldest first")
        places: dict[str, int] = {}
        for index, version in enumerate(versions):
            if places.setdefault(version, index) != index:
                rule = f"versions[{places[version]}] is the same; pass each version once, the oldest first"
                raise ArgumentError(f"versions[{index}]", version, rule)
        return cls(places)

    def place(self, version: str) -> int | None:
        """The place of a version: a version with a larger one is newer. None where it is not known."""
        if self.places is not None:
            return self.places.get(version)
        if not (version.isascii() and version.isdigit()):
            return None
        digits = version.lstrip("0") or "0"
        return int(digits) if len(digits) <= 18 else None  # differences of versions are int64
