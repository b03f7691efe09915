"""`VLLMEngine.update_weights` loads a directory through the control calls of the server."""

from __future__ import annotations

import shutil

import pytest
from controlled_server import Controlled
from engine_inputs import generate_one, request

from rollouts.engines.protocol import UpdatableEngine
from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import ArgumentError


@pytest.fixture
async def server(reloadable_model_dir):
    async with Controlled(reloadable_model_dir) as server:
        yield server


@pytest.fixture
async def engine(server):
    async with VLLMEngine(server.base_url) as engine:
        yield engine


@pytest.fixture
def other(reloadable_model_dir, tmp_path):
    return shutil.copytree(reloadable_model_dir, tmp_path / "other")


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_the_server_loads_the_directory_and_labels_its_tokens(engine, server, other, mode):
    assert isinstance(engine, UpdatableEngine)
    await engine.update_weights(other, "7", in_flight=mode)
    assert server.loaded[-1] == str(other)
    assert next(seen for seen in server.requests if seen.path == "/pause").query["mode"] == mode
    assert engine.weight_version == "7"
    completion = await generate_one(engine, request())
    assert {span.version for span in completion.weight_spans} == {"7"}


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("directory", ""), "version is .*not empty"),
        (("directory", None), "version is .*not empty"),
    ],
    ids=["an empty version", "no version"],
)
async def test_arguments_of_other_types_are_refused_before_anything_is_sent(engine, server, arguments, rule):
    with pytest.raises(ArgumentError, match=rule):
        await engine.update_weights(*arguments)
    assert not server.requests
