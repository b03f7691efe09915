"""Arguments of a wrong type or range are errors that name the argument, its value and the cure."""

import asyncio

import pytest

from rollouts import GenerateRequest, SamplingParams, Trajectory, pack_episodes
from rollouts.engines.local import LocalEngine
from rollouts.errors import ArgumentError, EngineError
from rollouts.testing import ScriptedEngine


@pytest.mark.parametrize(
    ("episodes", "error"),
    [
        (Trajectory("e1"), r"episodes is <Trajectory e1.*; pass a list .*\[trajectory\]"),
        (["e1"], "episodes is .*; pass a list of Trajectory"),
    ],
)
def test_episodes_to_pack(episodes, error):
    with pytest.raises(ArgumentError, match=f"^.*{error}"):
        pack_episodes(episodes)


def test_the_local_engine():
    with pytest.raises(ArgumentError, match="max_batch_rows is 0; pass an integer of at least 1"):
        LocalEngine(None, max_batch_rows=0)


@pytest.mark.parametrize("config", [None, "{}", "{", '{"model_type": "no_such_model"}'])
def test_a_directory_that_is_no_checkpoint(tmp_path, config):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ArgumentError, match=r"directory is .*; pass a checkpoint directory with config.json and"):
        LocalEngine.from_pretrained(tmp_path)


def test_an_entry_of_a_script_is_named_by_its_number():
    engine = ScriptedEngine([[1], None])
    request = GenerateRequest([1], SamplingParams())
    asyncio.run(engine.generate(request))
    with pytest.raises(EngineError, match=r"entry 1 of the script is None \(NoneType\); pass text, token ids"):
        asyncio.run(engine.generate(request))
