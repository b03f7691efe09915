"""The kinds of environments in a configuration, each run with scripted completions."""

from pathlib import Path

import pytest
from run_config_files import CONFIG, write_run
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.trajectory.tree import Trajectory
from transport import read_records

FUNCTIONS = """\
import numpy as np

def messages(task):
    return [{"role": "user", "content": f"Is {task.data['number']} the number?"}]

def look(side: int):
    '''Show the square.'''
    return np.zeros((side, side, 3), np.uint8)

def calls(conversation, task):
    return sum(message["role"] == "tool" for message in conversation)

"""


def config_with(environment: str, completions: str) -> str:
    old = '[environment]\nkind = "import"\nfactory = "guess_env:Guess"\narguments = { tries = 2 }\n'
    assert old in CONFIG
    config = CONFIG.replace(old, "").replace('["4", "7"]', completions)
    config = config.replace("max_tokens = 16", "max_tokens = 128").replace("concurrency = 4", "concurrency = 1")
    return f"{config}\n[environment]\n{environment}\n"


def run(directory: Path, environment: str, completions: str) -> dict[str, list[Trajectory]]:
    """The groups of a run by their tasks."""
    path = write_run(directory, config_with(environment, completions))
    (directory / "functions_env.py").write_text(FUNCTIONS)
    result = CliRunner().invoke(app, ["run", str(path)])
    assert result.exit_code == 0, result.output
    return {group[0].group_id: group for group in read_records(directory / "out/trajectories.mmr")}


@pytest.mark.slow
def test_tools_are_typed_functions(tmp_path: Path) -> None:
    environment = """\
kind = "tools"
tools = ["functions_env:look"]
messages = "functions_env:messages"
[[environment.rewards]]
name = "calls"
function = "functions_env:calls"
"""
    call = """['<tool_call> {"name": "look", "arguments": {"side": 32}} </tool_call>', "yes"]"""
    episodes = [episode for group in run(tmp_path, environment, call).values() for episode in group]
    assert [(episode.reward, episode.num_turns, len(list(episode.all_media()))) for episode in episodes] == [
        (1.0, 2, 1)
    ] * 4


@pytest.mark.slow
def test_an_environment_of_gymnasium_is_named_by_its_id(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    environment = """\
kind = "gymnasium"
id = "FrozenLake-v1"
arguments = { is_slippery = false }
action_names = ["left", "down", "right", "up"]
"""
    # Without slipping, three steps down from the start end in the hole in the corner of the map of 4x4.
    groups = run(tmp_path, environment, '["down"]')
    episode = groups["four"][0]
    assert [turn.info["action"] for turn in episode.turns] == [1, 1, 1]
    assert [turn.info["terminated"] for turn in episode.turns] == [False, False, True]
    assert (episode.done, episode.reward, len(list(episode.all_media()))) == (True, 0.0, 3)
