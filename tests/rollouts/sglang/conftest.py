from collections.abc import AsyncIterator

import pytest
from fake_sglang import FakeSGLang

from rollouts.engines.sglang import HttpLimits, SGLangEngine


@pytest.fixture
async def server() -> AsyncIterator[FakeSGLang]:
    server = FakeSGLang()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def engine(server: FakeSGLang) -> AsyncIterator[SGLangEngine]:
    async with SGLangEngine(server.base_url, limits=HttpLimits(retries=1, backoff_seconds=0.01)) as engine:
        yield engine
