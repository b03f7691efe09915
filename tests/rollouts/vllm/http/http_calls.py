"""What the tests of the HTTP connection share: one generation, and a clock for its retries."""

import json

from fake_server import GENERATE

from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.responses import HttpResponse


class Clock:
    """Time that passes only when a retry sleeps; `chance` is what the jitter draws."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.chance = 1.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


CONTENT = {"request_id": "r", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "logprobs": 0}}
GENERATION = [json.dumps(CONTENT).encode()]


async def generate(connection: ServerConnection, **options: object) -> HttpResponse:
    return await connection.request("POST", GENERATE, name="r", body=GENERATION, **options)  # type: ignore[arg-type]
