"""Errors of the viewer."""

from __future__ import annotations

from rollouts.errors import RolloutsError


class ComparedNamesError(RolloutsError):
    """Compared tokens belong to a sample that no shown episode has. `name` is that of the sample.

    Cure: pass the episodes that the batch was made of.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"the compared tokens are of the sample {name!r}, which is no branch of the given episodes; samples of "
            "`samples_from_trajectory` are named EPISODE/LEAF. Pass the episodes that the batch was made of."
        )


class ViewPortError(RolloutsError):
    """The viewer cannot listen on a port. `port` is its number.

    Cure: pass another `--port`, or 0 for a free one.
    """

    def __init__(self, port: int, reason: str) -> None:
        self.port = port
        self.reason = reason
        super().__init__(f"port {port} of 127.0.0.1 cannot be used: {reason}; pass another --port, or 0 for a free one")


class EpisodeReadError(RolloutsError):
    """An episode or a medium of a served file cannot be read. `name` says which one.

    Cure: repair the file with `rollouts traj repair`, and open the viewer again.
    """

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        super().__init__(f"{name}: {reason}")
