"""Episodes in the object store of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from renderers import MediaSource
from rollouts.errors import RolloutsError
from rollouts.ray.object_media import ObjectMedia, frames_and_media
from rollouts.trajectory.tree import Trajectory
from transport import decode_frames


@dataclass(frozen=True, slots=True, eq=False)
class StoredEpisodes:
    """References to episodes in the object store: `frames` holds the episodes, `media` an object for each digest.

    Small, whatever the episodes hold: it may be an argument or a result of any task or actor of the cluster.
    """

    frames: Any
    media: Mapping[str, Any]
    num_episodes: int

    def load(self) -> list[Trajectory]:
        """The episodes. Blocks until this node has them.

        Large arrays and all media are views of the node's object store. Raises `RolloutsError` where the
        process that stored them has ended, and `DecodeError`.
        """
        try:
            message, *values = ray.get([self.frames, *self.media.values()])
        except ObjectLostError as error:
            raise RolloutsError(
                f"{self.num_episodes} stored episodes, or media of them, are no longer in the object store "
                f"({type(error).__name__}); the process that stored them must run until they have been loaded"
            ) from error
        found: dict[str, MediaSource] = {}
        for digest, value in zip(self.media, values, strict=True):
            found[digest] = MediaSource(digest, value.frames[0])
            found[digest].verify()
        episodes: list[Trajectory] = decode_frames(message.frames, find_media=found.get)
        return episodes


def store_episodes(episodes: Sequence[Trajectory], media: ObjectMedia) -> StoredEpisodes:
    """Write episodes into the object store, and of their media those that are not in it yet.

    `media` are the objects that this process has: `RayWorkers.media`, so that an image that came from a worker is not
    written again. They stay in the store while this process runs and uses the result. Raises `EncodeError`.
    """
    frames, sources = frames_and_media(list(episodes))
    return StoredEpisodes(ray.put(frames), media.put(sources.values()), len(episodes))
