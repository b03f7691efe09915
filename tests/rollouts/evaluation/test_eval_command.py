"""`rollouts eval`: with a configuration, with tasks and options, against chat endpoints; what it writes and refuses."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from endpoint.chat_server import ChatServer, completion, failure
from PIL import Image
from run_config.conftest import forgotten_modules as forgotten_modules  # as for the tests of runs
from run_config.run_config_files import CONFIG, write_run
from typer.testing import CliRunner

from rollouts.cli.main import app
from rollouts.testing import tiny_qwen3_vl
from transport import read_records

TASKS = [
    {"id": "sum", "question": "2 + 2?", "answer": "4"},
    {"id": "product", "question": "2 * 3?", "answer": "6"},
    {"id": "difference", "question": "9 - 8?", "answer": "1"},
]

SCORE = """\
def score(completion, task):
    return float(task.data["answer"] == completion["content"].strip())


def half(completion, task):
    return 0.5


class Twice:
    def __init__(self, task):
        self.task, self.turn = task, 0

    def reset(self, seed):
        return [{"role": "user", "content": self.task.data["question"]}]

    def step(self, assistant):
        from rollouts import StepResult
        self.turn += 1
        right = float(assistant["content"] == self.task.data["answer"])
        again = [] if self.turn == 2 else [{"role": "user", "content": "sure?"}]
        return StepResult(again, right / 2, self.turn == 2)
"""

SUMS = {"2 + 2?": "4", "2 * 3?": "6", "9 - 8?": "2"}  # the last one is wrong


def answer(body: dict[str, Any]) -> Any:
    question = next(text for message in reversed(body["messages"]) for text in SUMS if text in str(message["content"]))
    return completion(SUMS[question])


def evaluate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def results_of(directory: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((directory / "results.json").read_text())
    return results


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of tasks, with `score.py` beside it; the working directory is another one."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/score.py").write_text(SCORE)
    path = tmp_path / "data/tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai")
    return path


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer(answer) as running:
        yield running


def options(tasks: Path, server: ChatServer, *more: object) -> list[object]:
    score = tasks.parent / "score.py"
    return [tasks, "--score", score, *endpoint(server), "--out", "out", *more]


def endpoint(server: ChatServer) -> list[object]:
    return ["--engine", "openai", "--base-url", server.url, "--model", "any"]


@pytest.mark.slow
def test_an_endpoint_is_evaluated_without_a_renderer_and_without_tokens(tasks: Path, server: ChatServer) -> None:
    result = evaluate(*options(tasks, server, "-n", 2, "--set", "tasks.id_key=id"))
    assert result.exit_code == 0, result.output
    results = results_of(Path("out"))
    assert (results["tasks"], results["episodes"], results["failed"], results["complete"]) == (3, 6, 0, True)
    assert results["pass_at_k"]["1"]["value"] == results["pass_hat_k"]["2"]["value"] == pytest.approx(2 / 3)
    assert results["configuration"]["engine"]["model"] == "any"
    assert (results["tokens"], results["sampled_tokens"]) == (60, 18)  # 7 and 3 of each answer, as the server says
    groups = list(read_records("out/trajectories.mmr"))
    assert {group[0].group_id for group in groups} == {"sum", "product", "difference"}
    assert not any(episode.has_tokens for group in groups for episode in group)
    assert "pass@1" in result.stdout
    assert "3 tasks x 2 samples" in result.stdout
    report = Path("out/report.html").read_text()
    assert '<h2 id="h1">Evaluation</h2>' in report
    assert all(row in report for row in ("pass@2", "pass^2", "an episode succeeds with a total reward of at least 1"))


@pytest.mark.slow
def test_the_key_of_openai_goes_to_no_other_server_unless_it_is_named(tasks: Path, server: ChatServer) -> None:
    evaluate(*options(tasks, server, "--limit", 1))
    assert "authorization" not in server.headers[-1]
    evaluate(*options(tasks, server, "--limit", 1, "--api-key-env", "OPENAI_API_KEY", "--out", "named"))
    assert server.headers[-1]["authorization"] == "Bearer sk-of-openai"
    written = [path for path in Path("named").rglob("*") if path.is_file()]
    assert not any(b"sk-of-openai" in path.read_bytes() for path in written)


def test_environments_of_several_turns_run_on_an_endpoint(tasks: Path, server: ChatServer) -> None:
    twice = f"{tasks.parent / 'score.py'}:Twice"
    result = evaluate(tasks, "--environment", twice, *endpoint(server), "--out", "out")
    assert result.exit_code == 0, result.output
    assert [len(body["messages"]) for body in server.bodies].count(3) == 3
    assert results_of(Path("out"))["total_reward"]["value"] == pytest.approx(2 / 3)


@pytest.mark.slow
def test_failed_episodes_are_counted_and_named(tasks: Path) -> None:
    def failing(body: dict[str, Any]) -> Any:
        return failure(400, "no images, please") if "9 - 8" in str(body) else answer(body)

    with ChatServer(failing) as server:
        result = evaluate(*options(tasks, server, "-n", 2))
        excluded = evaluate(*options(tasks, server, "--set", "evaluation.failed=exclude", "--out", "excluded", "-n", 2))
    assert result.exit_code == excluded.exit_code == 0
    assert "2 of 6 episodes failed (count as 0)" in result.stdout
    assert "no images, please" in result.stdout
    assert results_of(Path("out"))["pass_at_k"]["1"]["value"] == pytest.approx(2 / 3)
    assert results_of(Path("excluded"))["pass_at_k"]["1"] == {
        "value": 1.0,
        "tasks": 2,
        "standard_error": 0.0,
        **{key: results_of(Path("excluded"))["pass_at_k"]["1"][key] for key in ("low", "high")},
    }


@pytest.mark.slow
def test_failed_episodes_run_again_when_asked_for(tasks: Path) -> None:
    broken = [True]

    def answers(body: dict[str, Any]) -> Any:
        return failure(400, "not now") if broken[0] and "9 - 8" in str(body) else answer(body)

    with ChatServer(answers) as server:
        by_id = options(tasks, server, "-n", 2, "--set", "tasks.id_key=id")
        evaluate(*by_id)
        broken[0] = False
        asked = len(server.bodies)
        kept = evaluate(*by_id, "--resume")
        assert "2 of 6 episodes failed" in kept.stdout
        assert len(server.bodies) == asked
        again = evaluate(*by_id, "--resume", "--rerun-failed")
    assert again.exit_code == 0, again.output
    assert "1 task with failed episodes run again" in again.output
    assert "0 of 6 episodes failed" in again.stdout
    assert len(server.bodies) == asked + 2
    stored = [group[0].group_id for group in read_records("out/trajectories.mmr")]
    assert sorted(stored) == ["difference", "product", "sum"]


def test_running_failed_episodes_again_needs_an_earlier_run(tasks: Path, server: ChatServer) -> None:
    result = evaluate(*options(tasks, server, "--rerun-failed"))
    assert result.exit_code == 2
    assert "pass --resume, too" in result.stderr
    limited = evaluate(*options(tasks, server, "--rerun-failed", "--resume", "--limit", 1))
    assert limited.exit_code == 2
    assert "leave it out" in limited.stderr


@pytest.mark.slow
def test_another_threshold_counts_the_stored_episodes_again_and_runs_none(tasks: Path, server: ChatServer) -> None:
    score = f"{tasks.parent / 'score.py'}:half"
    arguments = [tasks, "--score", score, *endpoint(server), "--out", "out"]
    first = evaluate(*arguments)
    assert "the threshold 1 is outside of the rewards, which are from 0.5 to 0.5" in first.output
    assert results_of(Path("out"))["pass_at_k"]["1"]["value"] == 0.0
    asked = len(server.bodies)
    again = evaluate(*arguments, "--set", "evaluation.threshold=0.5", "--resume")
    assert again.exit_code == 0, again.output
    assert len(server.bodies) == asked
    assert results_of(Path("out"))["pass_at_k"]["1"]["value"] == 1.0


def test_a_configuration_of_a_run_is_evaluated_and_options_replace_its_values(tmp_path: Path) -> None:
    result = evaluate(write_run(tmp_path), "-n", 3, "--temperature", 0, "--out", tmp_path / "evaluated")
    assert result.exit_code == 0, result.output
    results = results_of(tmp_path / "evaluated")
    assert (results["samples"], results["episodes"]) == (3, 6)
    assert results["configuration"]["sampling"]["temperature"] == 0
    assert len(results["configuration"]["template"]) == 64
    assert list(results["pass_at_k"]) == ["1", "2", "3"]
    assert not (tmp_path / "out").exists()


def test_an_evaluation_of_a_training_file_does_not_go_to_the_directory_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path, CONFIG + "\n[train]\nsteps = 1\ngroups = 1\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/training.jsonl").touch()
    (tmp_path / "model").rename(tmp_path / "out/best")
    monkeypatch.chdir(tmp_path)
    result = evaluate(path, "--model", "out/best")
    assert result.exit_code == 0, result.output
    assert results_of(tmp_path / "evaluations/run-best")["episodes"] == 4
    assert [each.name for each in (tmp_path / "out").iterdir() if each.name != "best"] == ["training.jsonl"]


def test_held_out_tasks_take_the_place_of_others_and_a_change_of_these_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path, CONFIG + '\n[evaluation]\ntasks = { kind = "jsonl", path = "held.jsonl" }\n')
    (tmp_path / "held.jsonl").write_text('{"number": 4}\n')
    refused = evaluate(path, "--set", "tasks.path=held.jsonl")
    assert refused.exit_code == 2
    assert "--set: tasks.path: the tasks of [evaluation] are evaluated" in refused.stderr
    assert evaluate(path).exit_code == 0
    assert results_of(tmp_path / "out")["tasks"] == 1
    others = ("--set", "evaluation.tasks=null", "--set", "tasks.id_key=number", "--out", tmp_path / "others")
    assert evaluate(path, *others).exit_code == 0
    assert results_of(tmp_path / "others")["tasks"] == 2


def test_no_group_is_left_out_by_what_training_skips(tmp_path: Path) -> None:
    # A module of its own: other tests of the process have imported theirs of the environment.
    path = write_run(tmp_path, 'skip_group = "equal_groups:are_equal"\n' + CONFIG)
    (tmp_path / "equal_groups.py").write_text("def are_equal(group):\n    return True\n")
    result = evaluate(path)
    assert result.exit_code == 0, result.output
    assert results_of(tmp_path / "out")["tasks"] == 2
    assert "every group counts: skip_group of" in result.stderr


def test_a_model_directory_is_evaluated_in_this_process(tasks: Path) -> None:
    pytest.importorskip("torch")
    tiny_qwen3_vl("model")
    result = evaluate(tasks, "--score", tasks.parent / "score.py", "--model", "model", "--max-tokens", 4)
    assert result.exit_code == 0, result.output
    assert results_of(Path("evaluations/tasks-model"))["episodes"] == 3
    assert all(
        episode.has_tokens for group in read_records("evaluations/tasks-model/trajectories.mmr") for episode in group
    )


def test_a_dry_run_prints_the_messages_for_an_endpoint_and_asks_nothing(tasks: Path, server: ChatServer) -> None:
    result = evaluate(*options(tasks, server, "--dry-run"))
    assert result.exit_code == 0, result.output
    assert "user: 2 + 2?" in result.stdout
    assert not server.bodies
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "pass either --score FILE.py:FUNCTION, which scores an answer, or --environment FILE.py:NAME"),
        (["--score", "score.py"], "--model: pass the model directory"),
        (["--score", "../data/score.py", "--model", "./modle"], "--model: engine.directory: there is no /"),
        (["--score", "a.py", "--environment", "b.py:B"], "--score and --environment: pass one of them"),
        (["--score", "a.py", "--model", "m", "--engine", "sglang"], "--base-url URL and --engine sglang belong"),
        (
            ["--environment", "b.py:B", "--set", "environment.messages=a.py:m", "--model", "m"],
            "--set: environment.messages: Extra inputs are not permitted",
        ),
        (
            ["--score", "a.py", "--model", "m", "--api-key-env", "KEY"],
            "--api-key-env: engine.api_key_env: Extra inputs are not permitted",
        ),
    ],
)
def test_options_that_are_missing_or_contradict_are_named(tasks: Path, arguments: list[str], said: str) -> None:
    result = evaluate(tasks, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--set", "evaluation.k=[3]"], "--set: evaluation.k: k is 3; pass at most 1, the number of episodes of a"),
        (["--score", "missing.py"], "--score: environment.rewards[0].function: there is no file"),
        (["--samples", "0"], "--samples: group_size: 0: Input should be greater than or equal to 1"),
        (["--set", "sampling.extra.seed=3"], "--set: sampling.extra.seed: the request has this field already"),
        (["--api-key-env", "UNSET_KEY"], "--api-key-env: engine.api_key_env: the environment variable of this name"),
        (["--base-url", "http://127.0.0.1:9/v1"], "--base-url: engine.base_url: ['"),
    ],
)
def test_wrong_values_are_named_with_their_place(tasks: Path, server: ChatServer, change: list[str], said: str) -> None:
    result = evaluate(*options(tasks, server, *change))
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")


def test_an_endpoint_that_does_not_answer_is_named_with_its_option(tasks: Path) -> None:
    endpoint = ("--engine", "openai", "--base-url", "http://127.0.0.1:9/v1", "--model", "any")
    result = evaluate(tasks, "--score", tasks.parent / "score.py", *endpoint)
    assert result.exit_code == 2
    assert "--base-url: engine.base_url: " in result.stderr


def test_a_row_without_a_prompt_fails_with_the_names_that_it_could_have(tasks: Path, server: ChatServer) -> None:
    tasks.write_text('{"text": "2 + 2?", "answer": "4"}\n')
    result = evaluate(*options(tasks, server))
    assert result.exit_code == 1
    assert "add one of messages, prompt, question" in result.output


@pytest.mark.parametrize("in_column", [False, True])
def test_pictures_are_read_from_directories_that_are_named_and_from_no_other(
    tasks: Path, server: ChatServer, in_column: bool
) -> None:
    picture = tasks.parent / "picture.png"
    Image.new("RGB", (8, 8), "red").save(picture)
    content = [{"type": "image", "image": str(picture)}, {"type": "text", "text": "2 + 2?"}]
    column = {"prompt": "2 + 2?", "image": str(picture)}
    row = column if in_column else {"prompt": [{"role": "user", "content": content}]}
    tasks.write_text(json.dumps({**row, "answer": "4"}) + "\n")
    refused = evaluate(*options(tasks, server))
    assert refused.exit_code == 1
    assert "1 of 1 episode failed" in refused.stdout
    assert "allowed_directories" in " ".join(refused.output.split())
    assert not server.bodies
    directories = f"engine.media.allowed_directories={json.dumps([str(tasks.parent)])}"
    read = evaluate(*options(tasks, server, "--set", directories, "--out", "read"))
    assert read.exit_code == 0, read.output
    assert server.bodies[0]["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png")


def test_a_key_that_is_refused_ends_the_command_before_any_episode(tasks: Path) -> None:
    with ChatServer(answer, models=failure(401, "no key")) as server:
        result = evaluate(*options(tasks, server))
        assert not server.bodies
    assert result.exit_code == 2
    assert "the server requires an API key" in result.stderr


def test_a_file_with_the_name_of_a_loaded_module_is_refused(tasks: Path, server: ChatServer) -> None:
    taken = tasks.parent / "json.py"
    taken.write_text(SCORE)
    result = evaluate(*options(tasks, server, "--score", taken))
    assert result.exit_code == 2
    assert "a module json is loaded from" in result.stderr
    assert "give the file another name" in result.stderr
