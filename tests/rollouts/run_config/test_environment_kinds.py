"""The kinds of environments in a configuration, each run with scripted completions."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_config_files import CONFIG, write_run
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.cli.run.run_parts import make_parts
from rollouts.run_config.config_file import read_config
from rollouts.run_config.errors import RunConfigError
from rollouts.trajectory.tree import Trajectory
from transport import read_records

FUNCTIONS = """\
import numpy as np

def messages(task):
    return [{"role": "user", "content": f"Is {task.data['number']} the number?"}]

def length(completion, task):
    return len(completion["content"])

def right(completion, task):
    return float(completion["content"] == str(task.data["number"]))

def look(side: int):
    '''Show the square.'''
    return np.zeros((side, side, 3), np.uint8)

def calls(conversation, task):
    return sum(message["role"] == "tool" for message in conversation)

def untyped(side):
    return side

def no_task():
    return []
"""


def config_with(environment: str, completions: str) -> str:
    old = '[environment]\nkind = "import"\nfactory = "guess_env:Guess"\narguments = { tries = 2 }\n'
    assert old in CONFIG
    config = CONFIG.replace(old, "").replace('["4", "7"]', completions)
    return f"{config.replace('max_tokens = 16', 'max_tokens = 128')}\n[environment]\n{environment}\n"


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
    call = r"""['<tool_call>\n{"name": "look", "arguments": {"side": 32}}\n</tool_call>', "yes"]"""
    call = call.replace(r"\n", " ")
    config = config_with(environment, call).replace("concurrency = 4", "concurrency = 1")
    path = write_run(tmp_path, config)
    (tmp_path / "functions_env.py").write_text(FUNCTIONS)
    result = CliRunner().invoke(app, ["run", str(path)])
    assert result.exit_code == 0, result.output
    episodes = [episode for group in read_records(tmp_path / "out/trajectories.mmr") for episode in group]
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


WRONG: dict[str, tuple[str, str, list[str]]] = {
    "reward of a name that is used": (
        'kind = "scored_prompt"\nmessages = "functions_env:messages"\n'
        '[[environment.rewards]]\nname = "a"\nfunction = "functions_env:right"\n'
        '[[environment.rewards]]\nname = "a"\nfunction = "functions_env:right"',
        "environment.rewards",
        ["name is 'a'; 2 rewards have this name"],
    ),
    "reward that does not exist": (
        'kind = "scored_prompt"\nmessages = "functions_env:messages"\n'
        '[[environment.rewards]]\nname = "a"\nfunction = "functions_env:rigth"',
        "environment.rewards[0].function",
        ['did you mean "functions_env:right"?'],
    ),
    "messages without a task": (
        'kind = "tools"\ntools = ["functions_env:look"]\nmessages = "functions_env:no_task"',
        "environment.messages",
        ["it is called as no_task(task), but takes ()"],
    ),
    "tool without types": (
        'kind = "tools"\nmessages = "functions_env:messages"\n'
        'tools = [\n"functions_env:look",\n"functions_env:untyped"]',
        "environment.tools[1]",
        ["'side' has no annotation"],
    ),
    "tool twice": (
        'kind = "tools"\nmessages = "functions_env:messages"\ntools = ["functions_env:look", "functions_env:look"]',
        "environment.tools",
        ["two tools have this name"],
    ),
    "number in a list whose name is that of the kind": (
        'kind = "tools"\nmessages = "functions_env:messages"\ntools = [\n"functions_env:look",\n3]',
        "environment.tools[1]",
        ["3: Input should be a valid string"],
    ),
    "unknown id": ('kind = "gymnasium"\nid = "FrozenLak-v1"', "environment.id", ["FrozenLake"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_environment_is_named_with_its_key_and_the_cure(tmp_path: Path, name: str) -> None:
    environment, key, reasons = WRONG[name]
    path = write_run(tmp_path, config_with(environment, '["4"]'))
    (tmp_path / "functions_env.py").write_text(FUNCTIONS)
    with pytest.raises(RunConfigError) as caught:
        make_parts(read_config(path), offline=True)
    (problem,) = caught.value.problems
    assert problem.key == key
    for reason in reasons:
        assert reason in problem.reason
