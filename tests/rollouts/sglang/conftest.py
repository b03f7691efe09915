from collections.abc import AsyncIterator
from pathlib import Path

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


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory as far as the engine looks into it; the server reads none."""
    (tmp_path / "config.json").write_text("{}")
    return tmp_path
