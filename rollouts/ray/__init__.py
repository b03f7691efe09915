"""The episodes of a `Runner` run in actors of a Ray cluster. Needs the extra `ray`."""

from renderers.errors import MissingExtraError

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise MissingExtraError("rollouts.ray", "ray", "ray") from error

from rollouts.ray.cluster import connect
from rollouts.ray.object_media import ObjectMedia, StoredEpisodes, store_episodes
from rollouts.ray.servers import RayServers
from rollouts.ray.workers import RayWorkers

__all__ = [
    "ObjectMedia",
    "RayServers",
    "RayWorkers",
    "StoredEpisodes",
    "connect",
    "store_episodes",
]
