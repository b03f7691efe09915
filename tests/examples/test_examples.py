"""The programs in examples/, in their quick form, and what their output must show."""

import asyncio
import importlib.util
import json
import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from rollouts import testing
from rollouts.cli.main import app
from transport import read_records

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


pytestmark = pytest.mark.usefixtures("empty_working_directory")


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_short_and_says_how_to_run_it():
    for path in EXAMPLES.glob("*.py"):
        lines = path.read_text("utf-8").splitlines()
        assert len(lines) < 150, path.name
        assert f"    python examples/{path.name}" in "\n".join(lines[:6])


def test_the_list_of_examples_has_each_program_once():
    rows = (EXAMPLES / "README.md").read_text("utf-8").splitlines()
    listed = [row for row in rows if row.startswith("|")][2:]
    programs = [*(path.name for path in EXAMPLES.glob("*.py")), "run_config/colours.py"]
    assert len(listed) == len(programs)
    for program in programs:
        assert sum(f"`python examples/{program}" in row for row in listed) == 1, program


@pytest.mark.slow
def test_guess_the_colour_prints_a_mismatch_near_zero(capsys, tiny_model_dir):
    asyncio.run(load("guess_the_colour").main(tiny_model_dir))
    assert "sampled" in capsys.readouterr().out


@pytest.mark.slow
def test_supervised_training_learns_digits_and_draws_its_curves(tmp_path):
    curves = load("sft_vlm_classifier").main(["--quick", "--out", str(tmp_path)])
    assert curves[-1]["held_out_nll"] < curves[0]["held_out_nll"]
    assert curves[-1]["accuracy"] > 0.2  # chance is 0.1
    assert "held out nll" in (tmp_path / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_a_student_reads_digits_after_distillation_from_its_own_episodes(tmp_path):
    curves = load("distill_digits").main(["--quick", "--out", str(tmp_path)])
    assert curves["accuracy"][0] < 0.1
    assert curves["accuracy"][-1] > 0.2  # chance is 0.1
    assert curves["divergence"][-1] < curves["divergence"][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model"),
    [("sums", "qwen3_vl"), ("tones", "qwen2_audio"), ("cards", "qwen3_vl")],
)
def test_a_short_file_trains_with_a_mismatch_near_zero(name, model, tmp_path, monkeypatch):
    for path in (EXAMPLES / "train").glob(f"{name}.*"):
        assert len(path.read_text("utf-8").splitlines()) <= 40
        shutil.copy(path, tmp_path)
    getattr(testing, f"tiny_{model}")(tmp_path / f"{name}-model")
    monkeypatch.setattr(sys, "path", [*sys.path])
    changes = ["train.steps=2", "train.groups=4", "supervised.steps=3", "output.report=false"]
    if name == "cards":
        changes.append("evaluation.tasks.arguments.count=4")
    arguments = [part for change in changes for part in ("--set", change)]
    result = CliRunner().invoke(app, ["train", str(tmp_path / f"{name}.toml"), *arguments])
    assert result.exit_code == 0, result.output
    output = tmp_path / f"{name}-out"
    rows = [json.loads(line)["metrics"] for line in (output / "training.jsonl").read_text().splitlines()]
    assert [row["mismatch_max"] < 1e-5 for row in rows if "mismatch_max" in row] == [True, True]
    assert sum(len(group) for group in read_records(output / "trajectories.mmr")) == 2 * 4 * 8
    assert json.loads((output / "summary.json").read_text())["complete"]
    for file in ("last/model.safetensors", "evaluations/0/results.json", "evaluations/2/results.json"):
        assert (output / file).is_file()


@pytest.mark.slow
def test_every_agent_of_an_episode_has_samples_of_its_own_with_a_mismatch_near_zero(tiny_model_dir):
    trajectory, mismatches = asyncio.run(load("sub_agents").main(tiny_model_dir))
    assert set(mismatches) == {"", "critic", *(f"reader-{number}" for number in range(4))}
    assert max(mismatches.values()) < 1e-5
    assert len(trajectory.leaves()) == 6


@pytest.mark.slow
def test_the_images_of_an_mcp_tool_are_in_the_episodes(tiny_model_dir):
    groups = asyncio.run(load("mcp_tools").main(tiny_model_dir))
    assert {group.task.task_id: group.rewards.tolist() for group in groups} == {
        "chart-0": [0.0, 0.0],
        "chart-1": [1.0, 1.0],
        "chart-2": [0.0, 0.0],
    }
    assert all(len(list(episode.all_media())) == 1 for group in groups for episode in group.episodes)


@pytest.mark.slow
def test_a_summarised_history_is_a_branch_and_every_sampled_token_is_trained_once(tiny_model_dir):
    trajectory, samples, report = asyncio.run(load("compaction").main(tiny_model_dir))
    first, *later = map(trajectory.path, trajectory.leaves())
    assert later
    assert len(samples) == 1 + len(later)
    for nodes in later:
        assert nodes[:2] == first[:2]  # the task and the plan
        assert nodes[2] not in first
        assert trajectory.media(nodes[-1])
    sampled = sum(len(node.logprobs) for node in trajectory.nodes)
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == sampled
    assert report.max_abs < 1e-4


def test_drawings_are_judged_by_their_pixels(capsys):
    groups, usage = load("judged_drawings").main([])
    drawings = set()
    for group in groups:
        for episode in group.episodes:
            drawn = episode.turns[0].message["tool_calls"][0]["function"]["arguments"]
            drawings.add((group.task.task_id, drawn["shape"], drawn["colour"]))
            alike = [drawn["shape"] == "square", drawn["colour"] == group.task.task_id.split()[0]]
            assert episode.reward == 0.5 * sum(alike)
    assert (usage.verdicts, usage.judged, usage.requests) == (12, len(drawings), len(drawings))
    assert "JudgeUsage(verdicts=12" in capsys.readouterr().out


@pytest.mark.slow
def test_a_syntax_of_ones_own_is_read_back_and_its_calls_are_made(tiny_model_dir):
    detected, printed, parsed, trajectory = load("custom_format").main(tiny_model_dir)
    assert detected.tool_calls is None
    assert parsed == printed
    outcomes = [[call["outcome"] for call in turn.info.get("tool_calls", ())] for turn in trajectory.turns]
    assert outcomes == [["malformed"], ["ok"], []]
    assert trajectory.turns[0].message["reasoning_content"] == "A forecast helps."
    assert (trajectory.reward, trajectory.forks) == (1.0, 0)


@pytest.mark.slow
def test_pixels_of_a_processor_of_ones_own_are_sampled_and_trained_and_no_others(tiny_model_dir, capsys):
    example = load("custom_processor")
    trajectory, report, refusal = asyncio.run(example.main(tiny_model_dir))
    assert example.lengths(trajectory) == [16, 16, 16]
    assert report.max_abs < 1e-4
    assert "square-64-pillow-" in str(refusal)
    assert "model's own processor: [16, 24, 24]" in capsys.readouterr().out


def test_a_dataset_reads_images_beside_its_file_and_no_others(tmp_path, capsys):
    example = load("single_turn_scoring")
    (tmp_path / "data").mkdir()
    data = example.draw_dataset(tmp_path / "data")
    (tmp_path / "data" / "dots-4.png").rename(tmp_path / "dots-4.png")
    data.write_text(data.read_text("utf-8").replace('"dots-4.png"', '"../dots-4.png"'), "utf-8")
    failed = {group.task.task_id: group.num_failed for group in example.main(["--data", str(data)])}
    assert failed == {"dots-1": 0, "dots-2": 0, "dots-3": 0, "dots-4": example.GROUP_SIZE}
    assert capsys.readouterr().out.count("dots-4     failed: MediaPolicyError") == example.GROUP_SIZE


def test_a_failed_completion_is_in_no_advantage_of_its_group(monkeypatch, capsys):
    example = load("single_turn_scoring")
    answers = defaultdict(lambda: iter(["1", TimeoutError("too slow"), "I see 2 dots.", "3"]))  # by prompt
    monkeypatch.setattr(
        example, "script", lambda request: next(answers[tuple(item.mm_hash for item, _ in request.media)])
    )
    assert [group.num_failed for group in example.main([])] == [1] * 4
    rows = [line.split()[:6] for line in capsys.readouterr().out.splitlines() if re.match(r"dots-\d +\d", line)]
    assert len(rows) == 4 * 3
    for task in range(1, 5):
        assert sum(float(row[5]) for row in rows if row[0] == f"dots-{task}") == pytest.approx(0, abs=0.02)


@pytest.mark.slow
def test_lakes_are_walked_from_their_frames_and_ranked_within_their_groups(tmp_path):
    groups = load("gymnasium_from_pixels").main(["--tasks", "2", "--out", str(tmp_path / "lake.mmr")])
    assert sum(group.num_failed for group in groups) == 0
    stored = {episode.episode_id: episode for episode in read_records(tmp_path / "lake.mmr")}
    for group in groups:
        assert len({next(iter(episode.all_media())).source.digest for episode in group.episodes}) == 1  # one lake
        assert np.mean(group.reward_parts["rank"]) == pytest.approx(0.5)
        for index, episode in enumerate(group.episodes):
            moves = sum("action" in turn.info for turn in episode.turns[:-1])
            assert len(list(stored[episode.episode_id].all_media())) == 1 + moves
            own = group.rewards[index] - 0.1 * group.reward_parts["rank"][index]
            assert own == pytest.approx(episode.reward)


def test_a_tool_shows_an_enlarged_part_of_the_image_and_a_wrong_call_is_answered(capsys):
    groups = load("tools_with_images").main([])
    for group in groups:
        for index, episode in enumerate(group.episodes):
            assert [call["outcome"] for call in episode.turns[0].info["tool_calls"]] == ["ok", "invalid_arguments"]
            assert len(list(episode.all_media())) == 2
            right, calls = (group.reward_parts[name][index] for name in ("right", "calls"))
            assert calls == 2
            assert group.rewards[index] == pytest.approx(right - 0.05 * calls)
    assert "tool: error: invalid arguments for zoom: factor: Input should be less than or equal to 4, not 9" in (
        capsys.readouterr().out
    )


@pytest.mark.slow
def test_recorded_episodes_are_each_trained_once_through_two_workers():
    names = load("offline_dataset").main(["--quick"])
    assert len(set(names)) == len(names)
    assert len(names) == 32


@pytest.mark.slow
def test_a_sampled_placeholder_token_is_kept_from_trl_and_nothing_after_it_is_trained(trl):
    def node(ids, sampled):
        count = len(ids)
        logprobs = np.full(count if sampled else 0, -1.0, np.float32)
        return SimpleNamespace(token_ids=np.array(ids), sampled=np.full(count, sampled), logprobs=logprobs)

    nodes = [node([1, 9, 2], False), node([5, 9, 6], True), node([3], False), node([7], True)]
    columns = load("trl_grpo").columns_of(SimpleNamespace(nodes=nodes, reward=1.0), [9])
    assert columns["prompt_ids"] == [1, 9, 2]
    assert columns["completion_ids"] == [5, 0, 6, 3, 7]
    assert columns["env_mask"] == [1, 0, 0, 0, 0]


@pytest.mark.slow
def test_trl_computes_the_log_probabilities_of_our_sampler(trl, monkeypatch):
    differences = []
    compute_loss = trl.GRPOTrainer._compute_loss
    compute_logprobs = trl.GRPOTrainer._get_per_token_logps_and_entropies

    def recording_loss(trainer, model, inputs):
        def recording_logprobs(*arguments, **columns):
            result = compute_logprobs(trainer, *arguments, **columns)
            mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
            differences.append((result[0] - inputs["sampling_per_token_logps"])[mask].abs().max().item())
            return result

        trainer._get_per_token_logps_and_entropies = recording_logprobs
        return compute_loss(trainer, model, inputs)

    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", recording_loss)
    rewards = load("trl_grpo").main(["--quick"])
    assert len(rewards) == len(differences) == 2
    assert max(differences) < 1e-4


@pytest.mark.slow
def test_an_agent_on_the_openai_client_is_recorded_with_a_mismatch_near_zero(tiny_model_dir):
    trajectories, report = asyncio.run(load("openai_client_agent").main(tiny_model_dir))
    assert [trajectory.num_turns for trajectory in trajectories] == [3] * 4
    assert all(len(trajectory.leaves()) == 1 for trajectory in trajectories)
    assert report.max_abs < 1e-4
