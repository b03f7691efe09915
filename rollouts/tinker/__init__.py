"""`rollouts tinker` serves the Tinker API over a `Trainer` and the engines of this package.

It needs the extra `tinker`.
"""

from importlib.util import find_spec

from renderers.errors import MissingExtraError

for _package in ("torch", "starlette", "uvicorn", "tinker"):
    if find_spec(_package) is None:
        raise MissingExtraError("rollouts tinker", "tinker", _package)
