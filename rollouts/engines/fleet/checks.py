"""What a fleet asks of an engine: whether it is alive, which model it serves, which weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.engines.protocol import Engine
from rollouts.errors import CapabilityError

#: Fields of `ServerCapabilities` in which servers of one fleet must agree: with others, the same request would be
#: refused or would mean other pixels or another length on another server.
_COMPARED = ("model", "max_model_len", "pixel_dtype", "placeholder_ids", "merge_area", "patch_values")


async def health_problem(engine: Engine) -> str:
    """Why an engine cannot serve now; empty if it can, or if it has no way to tell. Raises `EngineError`."""
    check_health = getattr(engine, "check_health", getattr(getattr(engine, "control", None), "check_health", None))
    if check_health is not None:
        await check_health()
        return ""
    health = getattr(engine, "health", None)
    return "" if health is None or await health() else "its health check failed"


async def served_model(engine: Engine) -> Mapping[str, object]:
    """What servers of a fleet must have in common; empty for an engine without `capabilities`. Raises `EngineError`."""
    capabilities = getattr(engine, "capabilities", None)
    if capabilities is None:
        return {}
    found = await capabilities()
    return {name: getattr(found, name) for name in _COMPARED if hasattr(found, name)}


async def served_weight_version(engine: Engine) -> str | None:
    """The version that an engine serves, read from the server where there is one; None where it cannot be known."""
    control: Any = getattr(engine, "control", None)
    if control is None:
        version = getattr(engine, "weight_version", None)
        return None if version is None else str(version)
    read_version = getattr(control, "weight_version", None)  # the control calls of other engines may lack some
    if read_version is None:
        return None
    try:
        return str(await read_version())
    except CapabilityError:
        return None
