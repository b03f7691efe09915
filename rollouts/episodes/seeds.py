"""Seeds derived from seeds."""

from __future__ import annotations

import hashlib


def derived_seed(seed: int, *path: str | int) -> int:
    """A seed below 2**63 for `path`, unrelated to the seeds of other paths and of neighbouring values of `seed`."""
    name = "/".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
