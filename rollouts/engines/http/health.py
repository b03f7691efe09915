"""Whether a server answers."""

from __future__ import annotations

from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.responses import HttpResponse
from rollouts.errors import CapabilityError, ServerError, ServerTimeoutError, ServerUnreachableError


class HealthControl:
    """The control calls that ask a server whether it is healthy."""

    _connection: ServerConnection

    def _checked(self, response: HttpResponse, path: str, action: str) -> HttpResponse:
        raise NotImplementedError

    async def health(self) -> bool:
        """Whether the server answers and its engine lives: whether `check_health` raises nothing.

        A paused SGLang is not healthy. vLLM is also with weights that a failed reload has broken.
        """
        try:
            await self.check_health()
        except (ServerUnreachableError, ServerTimeoutError, ServerError, CapabilityError):
            return False
        return True

    async def check_health(self) -> None:
        """Raise why `health` would be False.

        Raises `ServerUnreachableError`, `ServerTimeoutError`, `ServerError`, `CapabilityError`.
        """
        response = await self._connection.request(
            "GET", "/health", name="check_health", seconds=10.0, retry=False, slot=False
        )
        self._checked(response, "/health", "checking its health")
