"""`rollouts train`: what it learns, writes and refuses."""

import asyncio
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from engine_server import EngineVLLM
from fake_http import Response, Seen
from model_families import save_family
from safetensors.torch import load_file
from server_thread import served
from transformers import get_scheduler
from typer.testing import CliRunner
from vowels_training import CONFIG, ENVIRONMENT, HELD_OUT, figures, project, train

from renderers import load_renderer
from rollouts import GenerateRequest, SamplingParams
from rollouts.cli.main import app
from rollouts.engines.local import LocalEngine
from rollouts.engines.vllm import write_tied_head
from rollouts.runner import Task, schedule
from rollouts.train.task_order import TaskOrder
from rollouts.training.trainer import AdamParams, Trainer
from transport import RecordReader


class LoadingVLLM(EngineVLLM):
    """A server that loads the weights that it is told to load."""

    async def answer(self, seen: Seen) -> Response | None:
        if seen.path == "/collective_rpc":
            await self.engine.update_weights(seen.json["kwargs"]["weights_path"], "loaded")
        return await super().answer(seen)


JSONL = '{ kind = "jsonl", path = "tasks.jsonl" }'
SUPERVISED = """
[supervised]
tasks = {{ kind = "jsonl", path = "conversations.jsonl" }}
steps = 2
batch = {}
"""
CONVERSATION = '{"messages": [{"role": "user", "content": "Sing."}, {"role": "assistant", "content": "aeiou"}]}\n'
TEACHER = '\n[teacher]\nengine = { kind = "local", directory = "MODEL" }\n'
GENERATOR = '{ kind = "import", source = "vowels_env:held_out" }'


def mismatches(directory: Path) -> list[float]:
    return [row["mismatch_max"] for _, row in figures(directory) if "mismatch_max" in row]


@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_trains_adapter_or_model_and_leaves_weights_that_an_engine_loads(
    tmp_path: Path, tiny_model_dir: Path, rank: int
) -> None:
    result = train(project(tmp_path, tiny_model_dir, CONFIG + HELD_OUT, lora_rank=str(rank)))
    assert result.exit_code == 0, result.output
    assert "step 3/3: 0:00 left  reward" in result.output
    last = result.output.strip().splitlines()[-1]
    assert re.match(r"in .*/out: best \(step [0-3], held-out reward 0\.\d+\), evaluations, last, checkpoints", last)
    assert len(mismatches(tmp_path)) == 3
    assert max(mismatches(tmp_path)) < 1e-5
    out = tmp_path / "out"
    assert sorted(path.name for path in out.glob("checkpoints/*"))[-2:] == ["step-2", "step-3"]
    with RecordReader(out / "trajectories.mmr") as reader:
        assert [len(reader[record]) for record in range(len(reader))] == [4] * 9
    assert json.loads((out / "evaluations" / "3" / "results.json").read_text())["episodes"] == 10

    async def load() -> None:
        engine = LocalEngine.from_pretrained(tiny_model_dir if rank else out / "last")
        if rank:
            await engine.load_adapter("last", out / "last")
        ids = load_renderer(tiny_model_dir).render([{"role": "user", "content": "Sing."}]).token_ids
        await engine.generate(GenerateRequest(ids, SamplingParams(max_tokens=2), adapter="last" if rank else None))
        await engine.close()

    asyncio.run(load())
    compared = CliRunner().invoke(app, ["compare", f"{out}@1", f"{out}@3"])
    assert compared.exit_code == 0, compared.output
    assert "over 5 shared tasks" in compared.output  # the held-out evaluations of these steps


def train_with_other_weights(path: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    """Train with a planted fault: the engine keeps its first weights, and calls them those of each step."""

    async def only_label(engine: LocalEngine, weights: Any, version: str, **_: Any) -> None:
        await engine.update_weight_version(version)

    with monkeypatch.context() as planted:
        planted.setattr(LocalEngine, "update_weights", only_label)
        stopped = train(path)
    assert stopped.exit_code == 2
    assert "train.max_mismatch is 0.001" in stopped.output
    return stopped


def test_the_run_stops_before_a_step_whose_episodes_other_weights_have_sampled(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project(tmp_path, tiny_model_dir)
    stopped = train_with_other_weights(path, monkeypatch)
    assert "step 2 was not taken" in stopped.output
    assert "explained by no hypothesis (other weights cannot be tested)" in stopped.output
    assert (tmp_path / "out" / "checkpoints" / "step-1" / "state.json").exists()
    assert [step for step, row in figures(tmp_path) if "mismatch_max" in row] == [1, 2]
    assert train(path, "--resume").exit_code == 0
    assert max(mismatches(tmp_path)) < 1e-5


@pytest.mark.parametrize("mode", ['"one_step_off_policy"', '"asynchronous"\nmax_staleness = 2'])
def test_modes_whose_steps_have_no_sample_of_their_weights_stop_where_the_engine_has_others(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    path = project(tmp_path, tiny_model_dir, CONFIG + f"[mode]\nkind = {mode}\n", learning_rate="1e-2")
    stopped = train_with_other_weights(path, monkeypatch)
    assert "after step 1 the log-probabilities of sampler and trainer differ by" in stopped.output
    resumed = train(path, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert all(float(each) < 1e-5 for each in re.findall(r"mismatch (\S+)", resumed.output))


def test_one_wrong_image_among_the_episodes_of_a_step_stops_the_run(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler sees the square of another task in one of twelve episodes, which differs by 0.3 nats on average."""
    images: list[Any] = []
    other_is_here = asyncio.Event()  # requests come in no order
    original = LocalEngine.generate

    async def generate(engine: LocalEngine, request: GenerateRequest, *arguments: Any) -> Any:
        if request.request_id == "1/0.0-0":
            images.append(request.multi_modal_data)
            other_is_here.set()
        if request.request_id == "0/2.0-0":
            await other_is_here.wait()
            request = replace(request, multi_modal_data=images[0])
        return await original(engine, request, *arguments)

    monkeypatch.setattr(LocalEngine, "generate", generate)
    stopped = train(project(tmp_path, tiny_model_dir, CONFIG + "max_mismatch = 0.1\n"))
    assert stopped.exit_code == 2
    assert "step 1 was not taken: in" in stopped.output
    assert json.loads((tmp_path / "out" / "checkpoints" / "step-0" / "state.json").read_text())["step"] == 0


@pytest.mark.parametrize(
    "change",
    [
        'loss = "cispo"\nminibatches = 2\nepochs = 2\nmean_over = "episodes"\nscale = "batch"',
        'loss = "gspo"\nkl = 0.1\nbaseline = "leave_one_out"\nschedule = "cosine"\nwarmup_steps = 2',
        'loss = "dro"\nloss_options = { beta = 0.1 }\nmax_row_tokens = 40\ndtype = "bfloat16"\nmax_mismatch = 1.0',
    ],
)
def test_losses_and_their_options_are_those_of_the_file(tmp_path: Path, tiny_model_dir: Path, change: str) -> None:
    result = train(project(tmp_path, tiny_model_dir, f"{CONFIG}{change}\n", lora_rank="2", steps="2"))
    assert result.exit_code == 0, result.output
    rows = dict(figures(tmp_path)[:1])
    assert rows[1]["grad_norm"] > 0
    assert ("kl_to_start" in rows[1]) == ("kl" in change)


def test_the_distance_to_the_base_model_is_that_among_the_kept_ids(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A new adapter changes nothing: before the first step the policy is the base model."""
    sampling = "{ max_tokens = 8, top_k = 3, top_logprobs = 3 }"
    config = f"{CONFIG}kl = 0.1\n"
    result = train(project(tmp_path, tiny_model_dir, config, lora_rank="2", steps="2", sampling=sampling))
    assert result.exit_code == 0, result.output
    first, second = (row["kl_to_start"] for _, row in figures(tmp_path) if "kl_to_start" in row)
    assert abs(first) < 1e-5 < abs(second)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_follows_the_schedules_of_transformers(
    tmp_path: Path, tiny_model_dir: Path, schedule: str
) -> None:
    result = train(project(tmp_path, tiny_model_dir, f'{CONFIG}schedule = "{schedule}"\n', steps="4"))
    assert result.exit_code == 0, result.output
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    expected = get_scheduler(schedule, optimizer, num_warmup_steps=0, num_training_steps=4)
    rates = []
    for _ in range(4):
        rates += expected.get_last_lr()
        optimizer.step()
        expected.step()
    found = [row["learning_rate"] for _, row in figures(tmp_path) if "learning_rate" in row]
    assert found == pytest.approx(rates)
    assert found[-1] > 0


@pytest.mark.parametrize("mode", ["one_step_off_policy", "asynchronous"])
def test_episodes_of_earlier_weights_are_trained_on_within_the_bound(
    tmp_path: Path, tiny_model_dir: Path, mode: str
) -> None:
    bound = "max_staleness = 2" if mode == "asynchronous" else ""
    config = f'{CONFIG}\n[mode]\nkind = "{mode}"\n{bound}\n'
    result = train(project(tmp_path, tiny_model_dir, config, steps="5"))
    assert result.exit_code == 0, result.output
    lags = [row["staleness"] for _, row in figures(tmp_path) if "staleness" in row]
    assert len(lags) == 5
    assert 0 < max(lags) <= 2
    printed = re.findall(r"mismatch (\S+)", result.output)
    assert len(printed) == 5
    assert all(float(each) < 1e-5 for each in printed)


def test_a_server_gets_the_weights_of_each_step_from_a_directory(tmp_path: Path, tiny_model_dir: Path) -> None:
    directory = shutil.copytree(tiny_model_dir, tmp_path / "model")
    write_tied_head(directory)
    with served(LoadingVLLM(directory)) as server:
        engine = f'{{ kind = "vllm", base_url = "{server.base_url}" }}'
        result = train(project(tmp_path, directory, CONFIG, engine=engine))
    assert result.exit_code == 0, result.output
    assert server.loaded[1:] == [str(tmp_path / "out" / "weights" / version) for version in "0123"]
    assert sorted(path.name for path in (tmp_path / "out" / "weights").iterdir()) == ["2", "3"]
    assert max(mismatches(tmp_path)) < 1e-5


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    "engine",
    [
        '{ kind = "scripted", completions = ["a"] }',
        '{ kind = "openai", base_url = "http://127.0.0.1:9/v1", model = "m" }',
    ],
)
def test_an_engine_that_takes_no_weights_is_refused(
    tmp_path: Path, tiny_model_dir: Path, engine: str, dry: list[str]
) -> None:
    config = CONFIG.replace('renderer = { model = "MODEL" }', "") if "openai" in engine else CONFIG
    result = train(project(tmp_path, tiny_model_dir, config, engine=engine), *dry)
    assert result.exit_code == 2
    assert "engine.kind: it takes no weights; train with local" in result.output


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ('loss = "pg"', "train: loss is 'pg'; pass one of"),
        ('loss = "ppo"\nloss_options = { clip = 0.2 }', "ppo has no such option"),
        ('loss = "dro"', "train.loss_options: options['beta'] is None"),
        ("adam = { momentum = 0.9 }", "fields of AdamParams"),
        ("kl = 0.1", "train.kl: with lora_rank = 0"),
    ],
)
def test_a_wrong_value_is_named_before_anything_is_sampled(
    tmp_path: Path, tiny_model_dir: Path, change: str, reason: str
) -> None:
    result = train(project(tmp_path, tiny_model_dir, f"{CONFIG}{change}\n"))
    assert result.exit_code == 2
    assert reason in result.output
    assert not (tmp_path / "out" / "trajectories.mmr").exists()
    mended = train(project(tmp_path, tiny_model_dir, steps="1"))  # in the directory that has nothing but a lock
    assert mended.exit_code == 0, mended.output


def test_the_files_of_the_documentation_are_a_whole_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "train.md").read_text("utf-8")
    blocks = re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in blocks] == ["vowels.py", "train.toml"]
    for name, content in blocks:
        (tmp_path / name).write_text(content)
    (tmp_path / "model").symlink_to(tiny_model_dir)
    changes = ["train.steps=2", "train.groups=4", "output.report=false"]
    result = train(tmp_path / "train.toml", *(part for each in changes for part in ("--set", each)))
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out/evaluations/2/results.json").read_text())["episodes"] == 50
    assert max(mismatches(tmp_path)) < 1e-5


@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_a_k_of_more_samples_than_an_evaluation_takes_is_refused_before_anything_runs(
    tmp_path: Path, tiny_model_dir: Path, options: list[str]
) -> None:
    result = train(project(tmp_path, tiny_model_dir, f"{CONFIG}{HELD_OUT}k = [3]\n"), *options)
    assert result.exit_code == 2
    assert "evaluation.k: k is 3; pass at most 2" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_the_success_of_one_episode_is_written_where_the_file_names_other_k(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    result = train(project(tmp_path, tiny_model_dir, f"{CONFIG}{HELD_OUT}k = [2]\n", steps="1"))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "evaluations" / "1" / "results.json").read_text())
    assert list(found["pass_at_k"]) == ["1", "2"]
    assert [row["held_out_success"] for _, row in figures(tmp_path) if "held_out_success" in row] == [0, 0]


def test_an_evaluation_without_its_packages_is_refused_before_anything_runs(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    result = train(project(tmp_path, tiny_model_dir, CONFIG + HELD_OUT))
    assert result.exit_code == 2
    assert "needs scipy" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("loss = 'reverse_kl'", "train.loss: 'reverse_kl' compares with a teacher; add [teacher]"),
        ("max_row_tokens = 20", "train.max_row_tokens: the first prompt has"),
        ("top_p = 0.9", "sampling.top_logprobs: top_p and top_k leave ids out"),
        ("top_k = 5, top_logprobs = 3", "sampling.top_logprobs: top_p and top_k leave ids out"),
        ("top_k = 5, top_logprobs = 5, top_p = 0.5", "sampling.top_logprobs: top_p and top_k leave ids out"),
        ("top_k = 5, top_logprobs = 5, temperature = 0.5", "sampling.top_logprobs: top_p and top_k leave ids out"),
        (f"loss = 'forward_kl'{TEACHER}", "teacher.top_k: 'forward_kl' compares likeliest ids"),
        (f"loss = 'jsd'\nloss_options = {{ beta = 1.0 }}{TEACHER}top_k = 4\n", "options['beta'] is 1.0; pass"),
        (f"{SUPERVISED.format(2)}learning_rate = 1e16", "supervised.learning_rate"),
    ],
)
def test_a_dry_run_refuses_what_would_fail_after_the_first_episodes(
    tmp_path: Path, tiny_model_dir: Path, change: str, said: str
) -> None:
    sampling = f"{{ max_tokens = 8, {change} }}" if change.startswith("top") else "{ max_tokens = 8 }"
    config = CONFIG if change.startswith("top") else f"{CONFIG}{change}\n"
    path = project(tmp_path, tiny_model_dir, config, sampling=sampling)
    (tmp_path / "conversations.jsonl").write_text(CONVERSATION)
    result = train(path, "--dry-run")
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_server_that_does_not_answer_is_an_error_before_the_warm_start(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = (CONFIG + SUPERVISED.format(2)).replace(
        'engine = { kind = "local", directory = "MODEL" }',
        'engine = { kind = "vllm", base_url = "http://127.0.0.1:9" }',
    )
    path = project(tmp_path, tiny_model_dir, config)
    (tmp_path / "conversations.jsonl").write_text(CONVERSATION)
    result = train(path)
    assert result.exit_code == 2
    assert "http://127.0.0.1:9" in result.output
    assert "warm start" not in result.output


@pytest.mark.parametrize(("taught", "share"), [("[]", 1), ("[220]", 0.8), ("[220, 40]", 0.4)])
def test_steps_of_which_most_groups_have_equal_rewards_are_named(
    tmp_path: Path, tiny_model_dir: Path, taught: str, share: float
) -> None:
    path = project(tmp_path, tiny_model_dir, steps="2", groups="5")  # the squares of three tasks have 40 or 220
    (tmp_path / "vowels_env.py").write_text(
        ENVIRONMENT.replace("reward=", f"reward=(self.square[0, 0, 0] in {taught}) * ")
    )
    result = train(path)
    assert [row["equal_rewards"] for _, row in figures(tmp_path) if "equal_rewards" in row] == [share, share]
    assert result.output.count(f"  {share:.0%} of the groups have equal rewards") == (2 if share >= 0.8 else 0)


@pytest.mark.parametrize("options", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("group_size", "1"),
        ("sampling", "{ max_tokens = 8, temperature = 0 }"),
        ("sampling", "{ max_tokens = 8, top_k = 1, top_logprobs = 1 }"),
    ],
)
def test_a_run_in_which_no_group_can_teach_is_refused_unless_it_learns_from_more_than_their_rewards(
    tmp_path: Path, tiny_model_dir: Path, options: list[str], key: str, value: str
) -> None:
    path = project(tmp_path, tiny_model_dir, CONFIG + "kl = 0.0\n", **{key: value})
    refused = train(path, *options)
    assert refused.exit_code == 2
    assert "the episodes of a task are compared with each other" in " ".join(refused.output.split())
    changes = ["train.kl=0.1", "train.lora_rank=2", "train.steps=1", "output.directory=other"]
    kept = train(path, *options, *(part for each in changes for part in ("--set", each)))
    assert kept.exit_code == 0, kept.output


@pytest.mark.parametrize("options", [["--dry-run"], []])
@pytest.mark.parametrize("table", ["tasks", "evaluation.tasks", "supervised.tasks"])
def test_an_empty_list_of_tasks_is_refused_before_anything_runs(
    tmp_path: Path, tiny_model_dir: Path, options: list[str], table: str
) -> None:
    parts = {"tasks": CONFIG, "evaluation.tasks": HELD_OUT, "supervised.tasks": SUPERVISED.format(1)}
    parts[table] = parts[table].replace("conversations", "tasks").replace(JSONL, GENERATOR)
    path = project(tmp_path, tiny_model_dir, "".join(parts.values()))
    (tmp_path / "conversations.jsonl").write_text(CONVERSATION)
    with (tmp_path / "vowels_env.py").open("a") as module:
        module.write("\n\nheld_out = []\n")
    result = train(path, *options)
    assert result.exit_code == 2
    assert f"{table}: there is no task; add at least one" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [["--dry-run"], []])
@pytest.mark.parametrize("table", ["tasks", "evaluation.tasks"])
def test_two_tasks_of_a_list_with_one_id_are_refused_before_anything_runs(
    tmp_path: Path, tiny_model_dir: Path, options: list[str], table: str
) -> None:
    twice = '{ kind = "import", source = "vowels_env:TWICE" }'
    parts = {"tasks": CONFIG, "evaluation.tasks": HELD_OUT}
    parts[table] = parts[table].replace(JSONL, twice)
    path = project(tmp_path, tiny_model_dir, "".join(parts.values()))
    with open(tmp_path / "vowels_env.py", "a") as module:
        module.write("from rollouts import Task\nTWICE = [Task(name, {'rgb': [9, 9, 9]}) for name in 'aba']\n")
    refused = train(path, *options)
    assert refused.exit_code == 2
    assert f"{table}: two tasks have the id 'a'; give each task its own" in " ".join(refused.output.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rank", [0, 4])
def test_a_dry_run_says_what_the_run_will_do_and_need_and_writes_nothing(
    tmp_path: Path, tiny_model_dir: Path, rank: int
) -> None:
    path = project(tmp_path, tiny_model_dir, CONFIG + HELD_OUT + SUPERVISED.format(2), lora_rank=str(rank))
    (tmp_path / "conversations.jsonl").write_text(3 * CONVERSATION)
    torch.set_num_threads(2)
    result = train(path, "--dry-run", "--set", "train.groups=7", "--set", "evaluation.every=2")
    assert torch.get_num_threads() == 1  # as the run, or its seconds would be others
    assert result.exit_code == 0, result.output
    assert "first prompt: task" in result.output
    assert "a step: 28 episodes of at most 1 turns, 8 tokens each turn" in result.output
    assert "supervised: 2 steps of 2 of 3 rows (18 tokens)" in result.output
    assert "evaluation: 3 times 5 tasks, 2 episodes of each" in result.output  # at steps 0, 2 and 3
    parts = dict(re.findall(r"(model|AdamW|copy|adapter|a pass) ([0-9.e-]+)", result.output))
    size = (tiny_model_dir / "model.safetensors").stat().st_size / 1e9
    assert float(parts["model"]) == pytest.approx(size, rel=0.05)
    if rank == 0:
        assert float(parts["AdamW"]) == pytest.approx(3 * size, rel=0.05)
        assert float(parts["copy"]) == pytest.approx(size, rel=0.05)
    else:
        assert 0 < float(parts["adapter"]) < size
    assert float(parts["a pass"]) > 0
    assert re.search(r"a step, estimated: .* s of sampling, .* s of training", result.output)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rows", "batch", "reason"),
    [
        ([CONVERSATION], 7, ""),
        ([CONVERSATION], 1, ""),
        ([], 1, "supervised.tasks: there is no task in"),
        (['{"messages": ["x"]}\n'], 1, 'task 0 has no "messages", each with a role, and one of the assistant'),
        (['{"messages": 3}\n'], 1, 'task 0 has no "messages", each with a role'),
        ([CONVERSATION, CONVERSATION.replace("[", '["x", ')], 1, 'task 1 has no "messages", each with a role'),
        ([CONVERSATION.replace('"role": "user", ', "")], 1, 'task 0 has no "messages", each with a role'),
        ([CONVERSATION.replace('"Sing."', "3")], 1, "task 0: message 0: content is text"),
        ([CONVERSATION, CONVERSATION.replace("Sing.", "Sing. " * 4000)], 1, "task 1: 24,0"),
    ],
)
def test_a_warm_start_takes_few_rows_and_names_the_one_that_it_cannot_learn_from(
    tmp_path: Path, tiny_model_dir: Path, rows: list[str], batch: int, reason: str
) -> None:
    path = project(tmp_path, tiny_model_dir, CONFIG + SUPERVISED.format(batch), lora_rank="2")
    (tmp_path / "conversations.jsonl").write_text("".join(rows))
    result = train(path, "--set", "train.steps=1")
    assert result.exit_code == (2 if reason else 0), result.output
    assert reason in " ".join(result.output.split())
    if not reason:
        assert [step for step, row in figures(tmp_path) if "supervised_loss" in row] == [-1, 0]


def test_a_second_pass_over_the_tasks_has_another_order_and_a_new_process_goes_on_where_the_last_was() -> None:
    tasks = [Task(name) for name in "abcde"]

    async def take(order: TaskOrder, count: int) -> list[str]:
        found: list[str] = []
        async for task in order:
            found.append(task.task_id)
            if len(found) == count:
                break
        return found

    order = TaskOrder(tasks, seed=1, shuffle=True)
    first = asyncio.run(take(order, 10))
    assert sorted(first[:5]) == list("abcde")
    assert sorted(first[5:]) == [f"{name}#2" for name in "abcde"]
    assert [name[0] for name in first[5:]] != first[:5]
    for place in (0, 1, 3, 6):
        order.end(first[place])
    assert order.state() == {"first": 2, "done": [3, 6], "solved": []}
    again = TaskOrder(tasks, seed=1, shuffle=True, **order.state())
    left = [name for place, name in enumerate(first) if place not in (0, 1, 3, 6)]
    assert asyncio.run(take(again, len(left))) == left


def test_no_two_tasks_of_all_passes_have_one_id() -> None:
    async def take() -> list[str]:
        names: list[str] = []
        async for task in TaskOrder([Task(name) for name in ("a", "a#2", "a#2#1", "b#c")], seed=0, shuffle=True):
            names.append(task.task_id)
            if len(names) == 20:
                break
        return names

    names = asyncio.run(take())
    assert len(set(names)) == 20
    assert {"a", "b#c"} < set(names)


def test_a_task_that_every_episode_fails_is_taken_again_and_one_that_every_episode_solves_is_not(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    path = project(tmp_path, tiny_model_dir, f"{CONFIG}revisit_solved = 0.01\n", groups="5")
    environment = tmp_path / "vowels_env.py"
    reward = "float(self.square[0, 0, 0] > 200)"
    environment.write_text(environment.read_text().replace("reward=sum(letter", f"reward={reward} + 0 * sum(letter"))
    assert train(path, "--set", "train.steps=2").exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    solved = [row["task_id"].partition("#")[0] for row in rows if min(row["total_rewards"]) == 1]
    failed = [row["task_id"].partition("#")[0] for row in rows if max(row["total_rewards"]) == 0]
    assert len(solved) == 1
    assert len(failed) == 9 > len(set(failed)) == 4


def test_a_task_whose_episodes_end_with_errors_is_not_solved_where_a_reward_of_0_is_a_success(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = f"retry = {{ max_attempts = 1 }}\n{CONFIG}\n[evaluation]\nthreshold = 0.0\n"
    path = project(tmp_path, tiny_model_dir, config, steps="1", groups="5")
    broken = "        assert self.square[0, 0, 0] != 220\n        text = "
    (tmp_path / "vowels_env.py").write_text(ENVIRONMENT.replace("        text = ", broken))
    result = train(path)
    assert result.exit_code == 0, result.output
    state = json.loads((tmp_path / "out" / "checkpoints" / "step-1" / "state.json").read_text())
    assert state["tasks"]["solved"] == ["1", "2", "3", "4"]


def test_solved_tasks_are_taken_again_less_often() -> None:
    async def shares() -> tuple[float, float]:
        order = TaskOrder([Task(str(number)) for number in range(400)], seed=0, shuffle=True, revisit=0.25)
        taken, passes = order.__aiter__(), 21
        solved = ordinary = 0
        async for task in taken:
            own, _, number = task.task_id.partition("#")
            if int(number or 1) > passes:
                break
            if number:
                solved += int(own) < 200
                ordinary += int(own) >= 200
            order.end(task.task_id, is_solved=int(own) < 200)
        return solved / 200 / (passes - 1), ordinary / 200 / (passes - 1)

    solved, ordinary = asyncio.run(shares())
    assert ordinary == 1.0
    assert solved == pytest.approx(0.25, abs=0.03)


def test_a_correction_leaves_a_step_on_its_own_samples_as_it_is_and_divides_by_what_it_keeps(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """On its own samples every ratio is 1: weights change nothing, a lower limit of 2 rejects every token."""
    losses = {}
    for name, options in {
        "none": "",
        "weights": "token_weights = 2.0, normalise = true",
        "all": "token_low = 2.0",
    }.items():
        config = CONFIG + f"correction = {{ {options} }}\nminibatches = 2\nadam = {{ weight_decay = 0.5 }}\n"
        result = train(project(tmp_path / name, tiny_model_dir, config, steps="1"))
        assert result.exit_code == 0, result.output
        _, losses[name] = figures(tmp_path / name)[0]
    assert losses["weights"]["loss"] == pytest.approx(losses["none"]["loss"], abs=1e-6)
    assert losses["weights"]["grad_norm"] == pytest.approx(losses["none"]["grad_norm"], rel=1e-4)
    assert losses["none"]["grad_norm"] > 0
    assert losses["all"]["grad_norm"] == 0
    assert losses["all"]["correction_rejected"] == 1
    last = load_file(tmp_path / "all" / "out" / "last" / "model.safetensors")
    start = load_file(tiny_model_dir / "model.safetensors")
    assert all(torch.equal(last[name], start[name]) for name in start.keys() & last.keys())  # no step was taken


@pytest.mark.parametrize("loss", ["", "loss = 'gspo'", "loss = 'dro'\nloss_options = { beta = 0.5 }"])
def test_a_correction_that_rejects_nothing_and_has_no_weights_changes_nothing_on_samples_of_older_weights(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    async def label(engine: LocalEngine, weights: Any, version: str, **_: Any) -> None:
        await engine.update_weight_version(version)

    monkeypatch.setattr(LocalEngine, "update_weights", label)
    found = []
    for correction in ("", "correction = { veto = 1e-30 }"):
        config = f"{CONFIG}{loss}\n{correction}\nmax_mismatch = 1e9\n"
        result = train(project(tmp_path / str(len(found)), tiny_model_dir, config, steps="2"))
        assert result.exit_code == 0, result.output
        _, (_, row) = [each for each in figures(tmp_path / str(len(found))) if "loss" in each[1]]
        found.append(row)
    plain, corrected = found
    for name in ("loss", "ratio", "grad_norm"):
        assert corrected[name] == pytest.approx(plain[name], rel=1e-3)
    assert corrected["correction_rejected"] == 0
    assert abs(plain["ratio"] - 1) > 1e-3


@pytest.mark.parametrize("correction", ["", "correction = { token_weights = 2.0 }\n"])
@pytest.mark.parametrize("over", ["tokens", "episodes"])
def test_rows_of_groups_that_teach_nothing_count_in_the_mean_of_the_loss(
    tmp_path: Path, tiny_model_dir: Path, over: str, correction: str
) -> None:
    """Beside two such groups the gradient of the first task is the same, divided by three times as much."""
    lines = f'mean_over = "{over}"\nadam = {{ grad_clip_norm = 0.0 }}\nshuffle = false\n{correction}'
    norms = []
    for groups in ("1", "3"):
        path = project(tmp_path / groups, tiny_model_dir, CONFIG + lines, groups=groups, steps="1")
        environment = (path.parent / "vowels_env.py").read_text()
        of_first = environment.replace("reward=", "reward=(self.square[0, 0, 0] == 220) * ")
        (path.parent / "vowels_env.py").write_text(of_first)
        result = train(path)
        assert result.exit_code == 0, result.output
        _, row = figures(path.parent)[0]
        counted = row["sampled_tokens"] if over == "tokens" else 1  # a mean over the episodes
        norms.append(row["grad_norm"] * int(groups) * counted)
    assert norms[0] > 0
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("ppo", "max_lag = 2"),
        ("ppo", "no_such = 1"),
        ("cross_entropy", "veto = 0.1"),
        ("reverse_kl", "token_weights = 2.0"),
    ],
)
def test_a_correction_that_does_not_exist_or_is_not_defined_for_the_loss_is_refused_before_the_first_step(
    tmp_path: Path, tiny_model_dir: Path, loss: str, options: str
) -> None:
    config = f"{CONFIG}loss = '{loss}'\ncorrection = {{ {options} }}\n"
    result = train(project(tmp_path, tiny_model_dir, config))
    assert result.exit_code == 2
    assert "correction" in result.output
    assert not (tmp_path / "out" / "training.jsonl").exists()


def test_rows_that_are_cut_before_their_first_trained_token_end_the_run_with_the_cure(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    result = train(project(tmp_path, tiny_model_dir, CONFIG + "max_row_tokens = 2\n"))
    assert result.exit_code != 0
    assert "raise train.max_row_tokens" in " ".join(result.output.split())


def test_a_row_that_is_cut_at_the_end_of_an_image_is_trained_on_to_its_last_trained_token(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    path = project(tmp_path, tiny_model_dir, limits="{ max_turns = 2 }", steps="1")
    (tmp_path / "vowels_env.py").write_text(ENVIRONMENT.replace("done=True", "messages=self.reset(0)"))
    assert train(path).exit_code == 0
    with RecordReader(tmp_path / "out" / "trajectories.mmr") as reader:
        episode = reader[0][0]
        _, second = episode.media(episode.leaves()[0])
    norms = []
    for end in (second.placeholder.offset, second.placeholder.end):
        result = train(path, "--set", f"train.max_row_tokens={end}", "--set", f"output.directory={end}/out")
        assert result.exit_code == 0, result.output
        _, row = figures(tmp_path / str(end))[0]
        norms.append(row["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert norms[0] > 0


def test_smaller_weights_of_stale_samples_reach_the_distance_to_the_base_model_too(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW takes the same steps on gradients of a tenth."""
    config = f"{CONFIG}kl = 3.0\nadam = {{ grad_clip_norm = 0.0 }}\n"
    norms = []
    for weight in (1.0, 0.1):
        monkeypatch.setattr(schedule.Schedule, "_ages", lambda _, finished: [1] * len(finished.group.episodes))
        monkeypatch.setattr(schedule, "is_dropped", lambda *_: False)
        monkeypatch.setattr(schedule, "sample_weight", lambda *_, weight=weight: weight)
        path = project(tmp_path / str(weight), tiny_model_dir, config, lora_rank="2", steps="2", learning_rate="0.01")
        result = train(path)
        assert result.exit_code == 0, result.output
        norms.append([row["grad_norm"] for _, row in figures(path.parent) if "grad_norm" in row])
    assert norms[1] == pytest.approx([norm / 10 for norm in norms[0]], rel=1e-3)


def test_smaller_weights_are_refused_for_a_loss_that_they_do_not_reach(tmp_path: Path, tiny_model_dir: Path) -> None:
    mode = '[mode]\nkind = "asynchronous"\nmax_staleness = 1\non_stale = "downweight"\n'
    config = f"{CONFIG}loss = 'dro'\nloss_options = {{ beta = 0.1 }}\n{mode}"
    result = train(project(tmp_path, tiny_model_dir, config), "--dry-run")
    assert result.exit_code == 2
    assert "mode.on_stale: the loss 'dro' has a term without advantages" in " ".join(result.output.split())


def test_an_adapter_is_on_the_layers_that_the_file_names_as_a_model_with_fused_experts_needs(tmp_path: Path) -> None:
    model = save_family("qwen3_vl_moe", tmp_path / "model")
    path = project(tmp_path, model, f"{CONFIG}kl = 0.1\n", lora_rank="2", steps="1")
    result = train(path, "--dry-run")
    assert result.exit_code == 2
    assert "pass train_mlp=False" in " ".join(result.output.split())
    result = train(path, "--set", "train.train_mlp=false", "--set", "train.train_unembed=false")
    assert result.exit_code == 0, result.output
    layers = json.loads((tmp_path / "out" / "last" / "adapter_config.json").read_text())["target_modules"]
    assert layers
    assert all("self_attn" in layer for layer in layers)


def test_a_field_of_adam_leaves_the_others_their_defaults(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[AdamParams] = []
    original = Trainer.optim_step

    def optim_step(trainer: Trainer, model_id: str, params: AdamParams) -> dict[str, float]:
        found.append(params)
        return original(trainer, model_id, params)

    monkeypatch.setattr(Trainer, "optim_step", optim_step)
    for lines in ("", "adam = { weight_decay = 0.1 }\n", "adam = { grad_clip_norm = 0.0 }\n"):
        result = train(project(tmp_path / str(len(found)), tiny_model_dir, CONFIG + lines, steps="1"))
        assert result.exit_code == 0, result.output
    assert [(each.grad_clip_norm, each.weight_decay) for each in found] == [(1, 0), (1, 0.1), (0, 0)]


@pytest.mark.parametrize("kind", ["", "async "])
def test_a_generator_of_held_out_tasks_is_evaluated_at_every_step(
    tmp_path: Path, tiny_model_dir: Path, kind: str
) -> None:
    path = project(tmp_path, tiny_model_dir, CONFIG + HELD_OUT.replace(JSONL, GENERATOR), steps="2")
    with (tmp_path / "vowels_env.py").open("a") as file:
        file.write("\n\nfrom rollouts import Task\n")
        file.write(f"{kind}def held_out():\n    yield Task('one', {{'rgb': [1, 2, 3]}})\n")
    result = train(path)
    assert result.exit_code == 0, result.output
    found = [json.loads((tmp_path / f"out/evaluations/{step}/results.json").read_text()) for step in (0, 1, 2)]
    assert [each["episodes"] for each in found] == [2, 2, 2]


@pytest.mark.parametrize("kind", ["", "async "])
@pytest.mark.parametrize("table", ["evaluation", "supervised"])
def test_a_generator_without_an_end_is_refused_where_all_of_its_tasks_are_needed(
    tmp_path: Path, tiny_model_dir: Path, table: str, kind: str
) -> None:
    config = f"{CONFIG}\n[{table}]\ntasks = {GENERATOR}\n" + ("steps = 2\n" if table == "supervised" else "")
    path = project(tmp_path, tiny_model_dir, config)
    with (tmp_path / "vowels_env.py").open("a") as file:
        file.write("\n\nimport itertools\nfrom rollouts import Task\n")
        file.write(f"{kind}def held_out():\n    for number in itertools.count():\n")
        # The test ends without the limit, too.
        file.write("        if number == 20_000:\n            return\n        yield Task(str(number))\n")
    result = train(path, "--dry-run")
    assert result.exit_code == 2
    assert f"{table}.tasks: it gives more than 10,000 tasks, and may have no end" in " ".join(result.output.split())


def test_every_held_out_group_counts_where_skip_group_leaves_those_of_training_out(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = f'skip_group = "vowels_env:dark"\n{CONFIG}{HELD_OUT}'
    path = project(tmp_path, tiny_model_dir, config, steps="1", groups="1")
    skip = "def dark(group):\n    return group.task.data['rgb'][0] < 200\n"
    (tmp_path / "vowels_env.py").write_text(f"{ENVIRONMENT}\n\n{skip}")
    result = train(path)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "evaluations" / "0" / "results.json").read_text())
    assert (found["tasks"], found["total_reward"]["tasks"]) == (5, 5)
