import gc
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def nothing_leaks() -> Iterator[None]:
    """An unclosed transport or an unfinished coroutine of this test warns when it is collected."""
    gc.freeze()  # what earlier tests in this process left behind is not this test's, and a gigabyte to look through
    yield
    gc.collect()
    gc.unfreeze()


@pytest.fixture(scope="session")
def reloadable_model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that a server can reload: its tied output layer is written too. Read only."""
    from rollouts.engines.vllm import write_tied_head

    directory = shutil.copytree(tiny_model_dir, tmp_path_factory.mktemp("reloadable") / "model")
    write_tied_head(directory)
    return directory


@pytest.fixture
def other(reloadable_model_dir: Path, tmp_path: Path) -> Path:
    """Another checkpoint of the same model."""
    return shutil.copytree(reloadable_model_dir, tmp_path / "other")


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    """A `FakeVLLM`; modules that need another server have a fixture of this name."""
    from fake_server import FakeVLLM

    async with FakeVLLM() as server:
        yield server


@pytest.fixture
async def engine(server: Any) -> AsyncIterator[Any]:
    """A `VLLMEngine` of the fixture `server`, which has read its capabilities."""
    from engine_inputs import FAST_RETRIES, connected

    from rollouts.engines.vllm import VLLMEngine

    async with connected(VLLMEngine(server.base_url, limits=FAST_RETRIES), server) as engine:
        yield engine


@pytest.fixture
async def control(server: Any) -> AsyncIterator[Any]:
    """A `ServerControl` of the fixture `server`, which records its callbacks among the server's events."""
    from engine_inputs import capabilities_of

    from rollouts.engines.http.connection import HttpLimits, ServerConnection
    from rollouts.engines.vllm.control import ServerControl

    connection = ServerConnection(
        server.base_url, limits=HttpLimits(retries=1, backoff_seconds=0, longest_backoff_seconds=0)
    )
    yield ServerControl(
        connection,
        capabilities_of(server),
        forget_media=lambda: server.events.append("forget"),
        on_weight_version=lambda version: server.events.append(f"version {version}"),
    )
    await connection.close()


@pytest.fixture
async def fleet(servers: list[Any]) -> AsyncIterator[Any]:
    """A fleet of the `servers` of the module, once it has checked them."""
    from engine_inputs import FAST_RETRIES

    from rollouts.engines.fleet import EngineFleet, FleetLimits

    limits = FleetLimits(check_seconds=0.02, eject_after=1)
    urls = [server.base_url for server in servers]
    async with EngineFleet.from_urls(urls, limits=limits, http_limits=FAST_RETRIES) as fleet:
        await fleet.check()
        yield fleet
