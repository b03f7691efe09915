"""`rollouts traj ls` and `show`: the episodes of a file listed, and one printed as a tree."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trajectory_files import (
    assistant_turn,
    completion_node,
    file_of,
    forked,
    lines,
    one_error,
    png,
    prompt_node,
    run,
    short,
)

from rollouts import Trajectory
from rollouts.observability.group_metrics import GroupMetrics
from rollouts.runner import Group, Task
from rollouts.view.episode_data import summary


def test_each_episode_is_one_line_and_shared_tokens_count_once(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", forked(), short("second"))
    header, first, second, footer = lines(run("ls", path))
    assert header == "# episode group turns branches tokens sampled images environment reward status"
    assert first == "0 forked group-a 3 2 17 6 3 0.75 done"
    assert second == "1 second - 1 1 2 1 1 -1 truncated"
    assert footer.startswith("2 episodes")


def test_an_empty_file_says_when_episodes_are_written(tmp_path: Path) -> None:
    assert "holds no episodes; each is written when it ends" in run("ls", file_of(tmp_path / "t.mmr")).stdout


def test_an_image_that_two_nodes_introduce_counts_twice_everywhere_and_once_among_the_distinct_ones(
    tmp_path: Path,
) -> None:
    path = file_of(tmp_path / "t.mmr", forked())
    run("export", path, "--jsonl", tmp_path / "rows.jsonl")
    listed = json.loads(run("ls", path, "--json").stdout)[0]
    exported = json.loads((tmp_path / "rows.jsonl").read_text("utf-8"))
    for row in (listed, exported, forked().media_counts()):
        assert [row[name] for name in ("images", "distinct_images", "sounds", "distinct_sounds")] == [3, 2, 0, 0]
    group = Group(Task("group-a", {}), (forked(), short("second")), (1, 1), np.zeros(2))
    assert GroupMetrics.of(group).images == 4
    assert summary(forked(), 0)["media"] == 3


def test_a_reward_that_overflows_is_left_out_of_the_mean_and_is_null_in_json(tmp_path: Path) -> None:
    infinite = short("infinite")
    infinite.turns[:] = [replace(infinite.turns[0], reward=1.5e308), replace(infinite.turns[0], reward=1.5e308)]
    large = short("large")
    large.turns[:] = [replace(large.turns[0], reward=1.5e308)]
    path = file_of(tmp_path / "t.mmr", [infinite, large, large])
    printed = run("ls", path).stdout
    assert "1.5e+308" in printed.splitlines()[-2]  # the totals
    assert "not in the mean environment reward: 1 episode whose reward is not finite" in printed
    listed = json.loads(run("ls", path, "--json").stdout, parse_constant=pytest.fail)
    assert [one["environment_reward"] for one in listed] == [None, 1.5e308, 1.5e308]


def test_show_prints_roles_text_media_weight_versions_and_rewards(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", short("other"), forked())
    head, *tree = lines(run("show", path, "forked"))
    digests = [hashlib.sha256(png(level)).hexdigest()[:16] for level in (1, 2)]
    assert head == (
        "episode forked of group group-a, seed 11: 3 turns, 2 branches, 17 tokens, 6 sampled, 3 images (2 distinct), "
        "environment reward 0.75, done"
    )
    assert tree == [
        f"0 user 5 tokens image {digests[0]} at 0+1 image {digests[1]} at 1+1 What is this?",
        "1 assistant 2 sampled weights 0 stop, reward 0 A door.",
        f"├─ 2 prompt 2 tokens image {digests[0]} at 0+1",
        "│ 3 assistant 3 sampled weights 1 stop, reward 0.5 Open.",
        "└─ 4 prompt 4 tokens",
        "5 assistant 1 sampled weights 0 stop, reward 0.25 Shut.",
    ]


def test_show_names_the_extras_of_a_node_with_their_shapes(tmp_path: Path) -> None:
    prompt, completion = short("one").nodes
    extras = {"top_ids": np.zeros((1, 5), np.int32), "top_logprobs": np.zeros((1, 5), np.float32)}
    trajectory = replace(short("one"), nodes=[prompt, replace(completion, extras=extras)])
    _, of_prompt, of_completion = lines(run("show", file_of(tmp_path / "t.mmr", trajectory)))
    assert "extras" not in of_prompt
    assert "extras top_ids (1, 5), top_logprobs (1, 5)" in of_completion


def test_ids_are_shown_with_runs_of_one_id_counted(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", forked())
    printed = lines(run("show", path, "--ids"))
    assert printed[2] == "7 x2 1 2 3"
    assert "21 22 x3" in printed


def test_text_shows_whole_messages_with_their_tool_calls_below_each_node(tmp_path: Path) -> None:
    call = {"function": {"name": "look", "arguments": {"at": "door"}}}
    message: Any = {"role": "assistant", "content": f"{'long ' * 40}\nend\x1b[31m", "tool_calls": [call]}
    episode = short("one")
    turn = replace(episode.turns[0], message=message)
    path = file_of(tmp_path / "t.mmr", Trajectory("one", nodes=episode.nodes, turns=[turn]))
    node, first, last = run("show", path, "--text", FORCE_COLOR="1", TERM="xterm-256color").stdout.splitlines()[2:]
    assert node.endswith("…")
    assert first == f"   {'long ' * 40}"
    assert last == '   end␛[31m [calls look({"at": "door"})]'
    assert len(run("show", path).stdout.splitlines()) == 3


def test_an_episode_is_found_by_number_or_id_and_a_missing_one_is_one_line(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", short("a"), short("1"), short("b"))
    assert "episode 1 of" in lines(run("show", path, "1"))[0]
    assert "episode b of" in lines(run("show", path, "2"))[0]
    assert "no episode 'c'" in one_error(run("show", path, "c"))


def test_of_several_episodes_with_one_id_the_first_is_shown_and_the_numbers_of_all_are_named(tmp_path: Path) -> None:
    second = replace(short("a"), seed=7)
    path = file_of(tmp_path / "t.mmr", short("a"), short("b"), second)
    shown = run("show", path, "a")
    assert "seed 0" in lines(shown)[0]
    assert "note: the episodes 0, 2 have this id" in shown.stderr
    assert "seed 7" in lines(run("show", path, "2"))[0]


@pytest.mark.slow
def test_an_episode_of_two_thousand_forks_is_shown_without_recursion(tmp_path: Path) -> None:
    nodes = [prompt_node(-1, 1)]
    for depth in range(0, 4000, 2):
        nodes += [prompt_node(depth, 2), prompt_node(depth, 3)]
        nodes[-1], nodes[-2] = nodes[-2], nodes[-1]
    path = file_of(tmp_path / "t.mmr", Trajectory("deep", nodes=nodes))
    assert len(lines(run("show", path))) == len(nodes) + 1


HOSTILE = "\n\x1b[31mred\x1b]0;title\x07\r\u202e[bold]"


def hostile() -> Trajectory:
    """Escape sequences and markup wherever text can stand."""
    trajectory = short(HOSTILE)
    trajectory.group_id = HOSTILE
    trajectory.error = HOSTILE
    message: Any = {"role": HOSTILE, "content": [HOSTILE, {"text": 3}, 4], "tool_calls": [{"function": HOSTILE}, 5]}
    trajectory.nodes = [
        replace(trajectory.nodes[0], messages=(message,)),
        completion_node(0, 5, version=HOSTILE),
    ]
    trajectory.turns = [assistant_turn(1, HOSTILE)]
    return trajectory


@pytest.mark.parametrize("command", ["ls", "show"])
def test_control_characters_in_a_file_are_escaped_on_the_terminal(tmp_path: Path, command: str) -> None:
    result = run(command, file_of(tmp_path / "t.mmr", hostile()), FORCE_COLOR="1", TERM="xterm-256color", COLUMNS="300")
    for control in ("\x1b]", "\x1b[31m", "\x07", "\r", "\u202e"):
        assert control not in result.output
    assert "[bold]" in result.output
    if command == "show":
        assert len(result.stdout.splitlines()) == 4, "head, error and two nodes"


def test_every_command_takes_the_directory_of_a_run(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    directory.mkdir()
    file_of(directory / "trajectories.mmr", forked())
    assert lines(run("ls", directory)) == lines(run("ls", directory / "trajectories.mmr"))
    assert lines(run("show", directory))[0].startswith("episode forked")
    assert "1 episode" in run("export", directory, "--jsonl", tmp_path / "e.jsonl").stdout
    assert "1 record" in run("merge", directory, "--out", tmp_path / "merged.mmr").stdout
    assert "1 record" in run("repair", directory, "--out", tmp_path / "repaired.mmr").stdout
    assert lines(run("show", tmp_path / "repaired.mmr")) == lines(run("show", directory))
