"""`rollouts traj show` with tokens, images and tool calls: on a terminal with colours, and in a pipe."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from trajectory_files import file_of, forked, png, prompt_node, run, short

from rollouts import FinishReason, TokenNode, Trajectory, Turn, WeightSpan
from rollouts.cli.traj.printing import By, NodeDetails, Shown, legend

sys.path += [str(Path(__file__).parent / name) for name in ("view", "report")]

from report_runs import trained_run
from viewer_episodes import called, media_episode, sound_source, two_turns, video

TERMINAL = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "80"}
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def test_tokens_in_a_pipe_have_boundaries_marks_and_numbers(tmp_path: Path, renderer, tiny_model_dir: Path) -> None:
    path = file_of(tmp_path / "t.mmr", two_turns(renderer))
    printed = run("show", path, "--model", str(tiny_model_dir), "--by", "mismatch").stdout
    assert "¦[image 72e9890d: 4 tokens]¦" in printed.replace("<|vision_start|>", "¦").replace("]<", "]¦<")
    assert "●B⟨0.25⟩¦●l⟨0.25⟩¦●u⟨0.25⟩¦" in printed
    assert "●R¦●e¦●d¦" in printed  # the first turn has no log-probabilities of a trainer
    assert "\x1b" not in printed


@pytest.mark.parametrize(
    ("by", "make", "note"),
    [
        (
            "mismatch",
            "forked",
            "needs the trainer's log-probabilities, and this episode has none: a TrainingLog writes",
        ),
        (
            "logprob",
            "prompt",
            "--by logprob shows sampled tokens, and this episode has none; the tokens are coloured by",
        ),
        (
            "sampled",
            "prompt",
            "--by sampled shows sampled tokens, and this episode has none; the tokens are coloured by",
        ),
        ("mismatch", "prompt", "the tokens are coloured by owner"),
        ("owner", "unowned", "pass --model DIR; the tokens are coloured by sampled"),
    ],
)
def test_a_colouring_that_the_episode_does_not_have_is_one_line_with_the_cure(
    tmp_path: Path, by: str, make: str, note: str
) -> None:
    unowned = forked("one")
    unowned.nodes[:] = [replace(node, messages=()) for node in unowned.nodes]
    prompt = Trajectory("one", nodes=[prompt_node(-1, 5, 6)])
    path = file_of(tmp_path / "t.mmr", {"forked": forked("one"), "prompt": prompt, "unowned": unowned}[make])
    result = run("show", path, "--by", by)
    assert result.exit_code == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("note: ")
    assert note in line
    assert "¦" in result.stdout


@pytest.mark.parametrize("by", list(By))
def test_a_colouring_that_the_episode_has_needs_no_line(tmp_path: Path, renderer, by: By) -> None:
    assert run("show", file_of(tmp_path / "t.mmr", two_turns(renderer)), "--by", by.value).stderr == ""


def test_the_mismatch_is_read_from_the_log_of_the_trainer_beside_the_file(tmp_path: Path) -> None:
    file = trained_run(tmp_path / "run") / "trajectories.mmr"
    result = run("show", file, "episode-8", "--by", "mismatch")
    assert result.stderr == ""
    assert "●0⟨0.001⟩¦●1⟨0.001⟩¦" in result.stdout
    assert run("show", file.parent, "episode-8", "--by", "mismatch").stdout == result.stdout
    (file.parent / "mismatch.mmr").write_text("x")
    damaged = run("show", file, "episode-8", "--by", "mismatch")
    assert damaged.exit_code == 0
    assert [line.partition(":")[0] for line in damaged.stderr.splitlines()] == ["error", "note"]
    assert "●0⟨-0.5⟩¦●1⟨-1⟩¦" in damaged.stdout


def test_without_a_model_tokens_are_ids(tmp_path: Path, renderer) -> None:
    episode = two_turns(renderer)
    path = file_of(tmp_path / "t.mmr", episode)
    printed = run("show", path, "--by", "sampled").stdout
    sampled = episode.nodes[1].token_ids.tolist()
    assert "".join(f"●{token}¦" for token in sampled) in printed


def test_the_likeliest_tokens_of_sampler_and_teacher_are_below_each_sampled_token(
    tmp_path: Path, renderer, tiny_model_dir: Path
) -> None:
    episode = two_turns(renderer)
    ids = {letter: renderer.tokenizer.body.encode(letter).ids[0] for letter in "Red\n"}
    node, count = episode.nodes[1], len(episode.nodes[1])
    top = np.tile(np.array([ids["R"], ids["\n"], ids["e"]], np.int32), (count, 1))
    logprobs = np.tile(np.array([-0.25, -1.5, -3], np.float32), (count, 1))
    extras = {"top_ids": top, "top_logprobs": logprobs}
    extras |= {"teacher_top_ids": top[:, ::2], "teacher_top_logprobs": logprobs[:, :2] - 1}
    episode = replace(episode, nodes=(episode.nodes[0], replace(node, extras=extras), *episode.nodes[2:]))
    path = file_of(tmp_path / "t.mmr", episode)
    lines = run("show", path, "--model", str(tiny_model_dir), "--top", "2").stdout.splitlines()
    shown = [line.strip(" │") for line in lines if "sampler: " in line]
    rows = 'sampler: "R" -0.25, "\\n" -1.5   teacher: "R" -1.25, "e" -2.5'
    assert shown[:3] == [f'"{letter}"   {rows}' for letter in "Red"]
    assert len(shown) == count
    without = [line.strip(" │") for line in run("show", path, "--top", "1").stdout.splitlines() if "sampler: " in line]
    assert without[1] == f"{ids['e']}   sampler: {ids['R']} -0.25   teacher: {ids['R']} -1.25"
    assert "sampler: " not in run("show", path, "--model", str(tiny_model_dir)).stdout


def test_likeliest_tokens_that_are_parts_of_a_character_are_told_apart_by_their_ids(
    tmp_path: Path, renderer, tiny_model_dir: Path
) -> None:
    episode = two_turns(renderer)
    node, count = episode.nodes[1], len(episode.nodes[1])
    parts = renderer.tokenizer.body.encode("é").ids
    extras = {"top_ids": np.tile(np.array(parts, np.int32), (count, 1))}
    extras["top_logprobs"] = np.tile(np.array([-1, -2], np.float32), (count, 1))
    episode = replace(episode, nodes=(episode.nodes[0], replace(node, extras=extras), *episode.nodes[2:]))
    printed = run("show", file_of(tmp_path / "t.mmr", episode), "--model", str(tiny_model_dir), "--top", "2").stdout
    assert f'"R"   sampler: "[{parts[0]}]" -1, "[{parts[1]}]" -2' in printed


def test_an_episode_without_likeliest_tokens_says_how_to_get_them(tmp_path: Path, renderer) -> None:
    result = run("show", file_of(tmp_path / "t.mmr", two_turns(renderer)), "--top", "3")
    assert result.exit_code == 0
    assert "the episode has no likeliest tokens: SamplingParams.top_logprobs or score(top_k=)" in result.stderr


def test_tool_calls_have_their_status_with_the_model_alone(tmp_path: Path, renderer, tiny_model_dir: Path) -> None:
    path = file_of(tmp_path / "t.mmr", called(renderer))
    with_model = run("show", path, "--model", str(tiny_model_dir)).stdout
    assert 'calls look({"at": "door"})  ok' in with_model
    assert "invalid_json" in with_model
    without = run("show", path).stdout
    assert 'calls look({"at": "door"})' in without
    assert "ok" not in without.split("calls look(")[1]


def test_images_are_half_blocks_on_a_terminal_at_the_place_of_their_tokens(tmp_path: Path, renderer) -> None:
    path = file_of(tmp_path / "t.mmr", two_turns(renderer))
    printed = run("show", path, "--by", "owner", **TERMINAL).stdout
    lines = [ESCAPE.sub("", line) for line in printed.splitlines()]
    drawn = [index for index, line in enumerate(lines) if "▀" in line]
    assert len(drawn) == 3 * 16
    assert "[image 72e9890d: 4 tokens]" in lines[drawn[0] - 1]
    assert "38;2;255;0;0;48;2;255;0;0m▀" in printed  # a red pixel above a red one
    assert max(len(line) for line in lines if "▀" in line or "⏎" in line) <= 80
    for arguments, environment in ((("--no-images",), TERMINAL), ((), {})):
        assert "▀" not in run("show", path, *arguments, **environment).stdout


def test_a_medium_that_cannot_be_decoded_is_one_line_and_a_video_has_frames(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", media_episode(("video", video()), ("image", b"no image")))
    lines = ESCAPE.sub("", run("show", path, **TERMINAL).stdout).splitlines()
    drawn = [line for line in lines if "▀" in line]
    assert 0 < len(drawn) <= 16
    assert len(re.findall("▀+", drawn[0])) == 4
    assert "[image not shown: it cannot be decoded" in lines[-1]


def test_a_sound_is_a_waveform_with_its_duration_in_a_line(tmp_path: Path) -> None:
    silence_then_noise = np.repeat(np.array([0, 0.1], np.float32), 12_000)
    path = file_of(tmp_path / "t.mmr", media_episode(("audio", sound_source(silence_then_noise, 16_000))))
    lines = ESCAPE.sub("", run("show", path, **TERMINAL).stdout).splitlines()
    assert lines[-1].endswith(" " * 24 + "█" * 24 + " 1.5 s, 16,000 Hz")


def test_more_than_eight_images_of_a_node_are_counted(tmp_path: Path) -> None:
    pictures = tuple(png(level) for level in range(11))
    path = file_of(tmp_path / "t.mmr", Trajectory("many", nodes=[prompt_node(-1, *range(11), images=pictures)]))
    assert "[3 more media are not shown]" in run("show", path, **TERMINAL).stdout


def styles_of(by: By, logprobs: list[float], trainer: list[float]) -> list[str]:
    count = len(logprobs)
    node = TokenNode(
        -1,
        np.arange(count, dtype=np.int32),
        np.ones(count, bool),
        np.array(logprobs, np.float32),
        (WeightSpan("0", 0, count),),
        extras={"trainer_logprobs": np.array(trainer, np.float32)},
    )
    details = NodeDetails(Trajectory("one", nodes=[node]), Shown(by, colours=True))
    (line,) = details.lines(0, 0)
    return [str(span.style) for span in line.spans]


def test_colours_are_those_of_the_viewer() -> None:
    assert styles_of(By.LOGPROB, [0, -6, -20], [0, -6, -20]) == [
        "black on #ffffff",
        "black on #f0705c",
        "black on #f0705c",
    ]
    assert styles_of(By.MISMATCH, [-1, -1, -1], [-1, -3, np.nan]) == [
        "black on #ffffff",
        "black on #f0705c",
        "color(245)",
    ]
    assert styles_of(By.OWNER, [-1], [-1]) == ["black on #d2f0d8"]
    css = (Path(__file__).parents[2] / "rollouts/view/frontend/src/viewer.css").read_text("utf-8")
    for name, style in legend(By.OWNER)[:-1]:
        assert f"--{name}: light-dark({style.removeprefix('black on ')}," in css
    for colour in ("#ffffff", "#f0705c"):
        assert f"light-dark({colour}," in css


HOSTILE = "\x1b[31mred\x1b]0;title\x07\r\u202e[bold]"


@pytest.mark.parametrize("by", list(By))
def test_tokens_with_control_characters_are_shown_and_not_executed(renderer, by: By) -> None:
    ids = renderer.tokenizer.encode_scaffold(HOSTILE)
    call = {"function": {"name": HOSTILE, "arguments": HOSTILE}}
    message = {"role": HOSTILE, "content": HOSTILE, "tool_calls": [call]}
    prompt = TokenNode(
        -1, np.array(ids, np.int32), np.zeros(len(ids), bool), np.empty(0, np.float32), messages=(message,)
    )
    answer = TokenNode(0, np.array(ids, np.int32), np.ones(len(ids), bool), np.zeros(len(ids), np.float32))
    trajectory = Trajectory("one", nodes=[prompt, answer], turns=[Turn(1, FinishReason.STOP, message)])
    console = Console(force_terminal=True, color_system=None, width=200, record=True, file=io.StringIO())
    for model in (renderer, None):
        details = NodeDetails(trajectory, Shown(by, colours=True, width=40), model)
        for line in (*details.lines(0, 0), *details.lines(1, 0)):
            console.print(line, soft_wrap=True)
    shown = console.export_text()
    assert not set(shown) & set("\x1b\x07\r\u202e")
    assert "␛[31mred" in shown.replace("\n", "")


def test_an_episode_without_tokens_and_tools_without_a_model(tmp_path: Path) -> None:
    path = file_of(tmp_path / "t.mmr", short("one"))
    assert run("show", path, "--tools", "x.json").exit_code == 2
    assert run("show", path, "--by", "entropies").exit_code == 2
