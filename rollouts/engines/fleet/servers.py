"""The servers of a fleet that actors of a Ray cluster run."""

from collections.abc import Sequence
from typing import Any

from renderers.errors import MissingExtraError
from rollouts.errors import ArgumentError, RolloutsError, describe_exception


class RayServerNames:
    """Addresses of servers by the names of actors with a method `base_url`, as those of `RayServers`."""

    def __init__(self, names: Sequence[str], namespace: str | None) -> None:
        self._names = list(names)
        self._namespace = namespace
        self._urls: dict[str, str] = {}

    def read(self) -> list[str]:
        """The addresses. Raises `RolloutsError` for a name without such an actor, and `MissingExtraError`."""
        self._urls = {name: self._ask(name, 60.0) for name in self._names}
        return list(self._urls.values())

    def read_if_changed(self) -> list[str] | None:
        """The addresses if one has changed since the last call, else None. That of a lost actor stays as it was."""
        urls = dict(self._urls)
        for name in self._names:
            try:
                urls[name] = self._ask(name, 5.0)  # while a server is started again, the fleet goes on without it
            except RolloutsError:
                continue
        if urls == self._urls:
            return None
        self._urls = urls
        return list(urls.values())

    def _ask(self, name: str, seconds: float) -> str:
        ray = _ray()
        try:
            actor = ray.get_actor(name, namespace=self._namespace)
            return str(ray.get(actor.base_url.remote(), timeout=seconds))
        except (ValueError, AttributeError, TimeoutError, ray.exceptions.RayError) as error:
            raise RolloutsError(
                f"the actor {name:.80} gives no address: {describe_exception(error)}; pass names of "
                "rollouts.ray.RayServers, or of actors with a method base_url, in this namespace"
            ) from error


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("EngineFleet.from_ray", "ray", "ray") from error
    if not ray.is_initialized():
        rule = 'call rollouts.ray.connect(), or ray.init(address="auto"), before EngineFleet.from_ray'
        raise ArgumentError("names", "no connection to Ray", rule)
    return ray
