"""The code of the pages on environments, trajectories, training runs and concepts, the values that its comments state,
and the limits on the page on security."""

import ast
import contextlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sysconfig
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from evaluation.compared_runs import write_run

from renderers import MediaPolicy, MediaStore, load_renderer
from renderers.base import load_tokenizer
from rollouts.engines import ChatEndpoint
from rollouts.engines.vllm import HttpLimits
from rollouts.environments import ToolEnvironment
from rollouts.observability import METRICS
from rollouts.serve.gateway.limits import GatewayLimits
from rollouts.testing import ScriptedEngine
from transport import DecodeLimits

DOCS = Path(__file__).parent.parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def run_page(page):
    """Runs the page's blocks in order, as one program, and returns its global names.

    A value, or the text that is printed, is as the comment behind its statement says.
    """
    text = (DOCS / page).read_text("utf-8")
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python")
    names = {"__name__": page}
    for number, block in enumerate(blocks):
        run_block(block, names, f"{page}, block {number}")
    return names


def run_block(block, names, place):
    lines = block.split("\n")
    for statement in ast.parse(block).body:
        comment = lines[statement.end_lineno - 1].partition("  # ")[2]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if isinstance(statement, ast.Expr):
                value = eval(compile(ast.Expression(statement.value), place, "eval"), names)
            else:
                exec(compile(ast.Module([statement], []), place, "exec"), names)
                value = names.get(next((node.id for node in ast.walk(statement) if isinstance(node, ast.Name)), None))
        print(printed.getvalue(), end="")
        if printed.getvalue() and re.match(r"[\d\[({]", comment):
            assert printed.getvalue().startswith(re.split(": |, and", comment)[0]), f"{place}: {comment}"
        elif printed.getvalue() == "":
            for stated in stated_values(comment, names):
                assert agrees(stated, value), f"{place}: {comment}, not {value!r}"


def stated_values(comment, names):
    """The value of constants with which a comment begins, if it does. A comparison in its place must hold."""
    for text in (comment, comment.partition(": ")[0], comment.partition(", ")[0]):
        with contextlib.suppress(SyntaxError):
            expression = ast.parse(text, mode="eval")
            if isinstance(expression.body, ast.Compare):
                assert eval(text, names), comment
            elif not any(isinstance(node, ast.Name | ast.Call) for node in ast.walk(expression)):
                yield eval(text)
            return


def agrees(stated, found):
    """Whether a value is the stated one, to three digits; `...` stands for anything."""
    if stated is ... or not isinstance(stated, str | float | list | tuple | dict):
        return stated is ... or found == stated
    if isinstance(stated, str):
        return re.fullmatch(re.escape(stated).replace(re.escape("..."), ".*"), str(found), re.DOTALL) is not None
    if isinstance(stated, float):
        return found == pytest.approx(stated, rel=2e-3)
    if isinstance(stated, dict):
        return stated.keys() == found.keys() and all(agrees(value, found[key]) for key, value in stated.items())
    return len(stated) == len(found) and all(map(agrees, stated, found))


@pytest.mark.parametrize(
    "block", ["1 + 1  # 3: the sum", "a = [0.5]  # [0.25]", "print([1, 2])  # [1, 3]", "a = 1  # a == 2"]
)
def test_another_value_than_a_comment_states_is_found(block):
    with pytest.raises(AssertionError):
        run_block(block, {}, "page")


pytestmark = pytest.mark.usefixtures("empty_working_directory")


@pytest.mark.slow
def test_the_first_hour(tmp_path, monkeypatch):
    """Its files are written and its commands run, but for the two that the README has."""
    monkeypatch.setenv("PATH", f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = (DOCS / "first-hour.md").read_text("utf-8")
    blocks = FILE.findall(text)
    assert [name for name, _ in blocks] == ["vowels.py", "train.toml"]
    prose = re.sub("```.*?```", "", text, flags=re.DOTALL)
    commands = re.findall(r"^ {4}((?:rollouts|python|pytest)\b.*)$", prose, re.MULTILINE)
    assert commands[:2] == ["rollouts demo", "rollouts init my-project"]
    printed = [run_command(commands[1], tmp_path)]
    project = tmp_path / "my-project"
    for name, code in blocks:
        (project / name).write_text(code.replace("steps = 40", "steps = 2"), "utf-8")
    printed += [run_command(command, project) for command in commands[2:]]
    trained = printed[commands.index("rollouts train train.toml") - 1]
    assert [float(found) < 1e-5 for found in re.findall(r"mismatch (\S+)", trained)] == [True, True]
    assert "over 3 shared tasks" in printed[commands.index("rollouts compare before after") - 1]
    assert (project / "after" / "trajectories.mmr.html").is_file()


def run_command(command, directory):
    """What a command prints."""
    ran = subprocess.run(shlex.split(command), cwd=directory, check=True, stdout=subprocess.PIPE, text=True)
    return ran.stdout


def test_the_page_on_comparing_runs(capsys):
    write_run(Path("before"), {"1": [0, 0], "2": [0, 1]})
    write_run(Path("after"), {"1": [1, 0], "2": [1, 1], "3": [1, 1]})
    run_page("comparing-runs.md")
    note, figures, *_ = capsys.readouterr().out.splitlines()
    assert note == "1 task only in after: '3'"
    value, low, high, p_value = map(float, figures.split())
    assert (value, p_value) == (0.5, 0.5)  # of two tasks, each of which gained 0.5
    assert -1 <= low < 0 < value < high <= 1


@pytest.mark.slow
def test_the_page_on_models_that_hear():
    names = run_page("audio.md")
    assert names["report"].max_abs < 1e-5
    assert names["report"].tokens == 12


@pytest.mark.slow
def test_the_page_on_environments():
    names = run_page("environments.md")
    assert [t.reward for t in names["trajectories"]] == [0.0] * 8 + [1.0] * 4
    assert names["rewards"] == dict.fromkeys(names["scripts"], 1.0)
    assert names["essay"].reward == 2.25


def test_the_page_on_trajectories():
    names = run_page("trajectories.md")
    assert (names["trajectory"].forks, names["trajectory"].num_turns) == (2, 4)
    assert names["packed"].pixels == "source"


@pytest.mark.slow
def test_the_page_on_the_trainer():
    names = run_page("trainer.md")
    assert names["losses"][-1] < names["losses"][0] / 2
    assert names["mismatch"] < 1e-4
    assert list(names["trainer"].models()) == ["policy", "again"]
    assert sorted(path.name for path in Path("checkpoint").iterdir()) == ["checkpoint.safetensors"]


def test_the_page_on_prefix_trees():
    names = run_page("prefix-trees.md")
    assert (names["logprobs"] - names["separate"]).abs().max() < 1e-5


@pytest.mark.slow
def test_the_page_on_training():
    names = run_page("training.md")
    assert len(names["samples"]) == 8
    assert not any(t.error for t in names["trajectories"])
    assert names["report"].tokens == sum(int(sample.loss_mask.sum()) for sample in names["samples"])
    assert names["batch"].input_ids.shape == names["batch"].advantages.shape
    assert [len(part) <= 3 for part in names["parts"]] == [True] * len(names["parts"])
    assert sum(report.tokens for report in names["reports"]) == names["trained"] > 0
    assert max(report.max_abs for report in names["reports"]) < 1e-4
    assert [len(names["last"]), len(names["joined"])] == [1, 8]
    assert names["TrainingBatch"].load("batch.mmr") == names["one_row"]
    assert len(names["of_rank"]) == len(names["plan"].steps)
    assert names["plan"].summary().endswith("; 0 left out")
    assert names["inputs"]["num_images"] == [1] * 8
    assert int((names["supervised"]["labels"] != -100).sum()) == names["trained"]
    assert all(torch.isfinite(loss) for loss in names["losses"].values())
    correction, trained = names["correction"].mask, names["batch"].loss_mask
    assert 0 < correction.sum() <= trained.sum() == (correction | trained).sum()
    assert (len(names["kept"]), len(names["stale"])) == (8, 0)


def test_failed_episodes_are_in_no_baseline_of_the_page_on_training(tiny_model_dir):
    first, *blocks = BLOCK.findall((DOCS / "training.md").read_text("utf-8"))
    renderer = load_renderer(tiny_model_dir)
    engine = ScriptedEngine([*["yes", TimeoutError("too slow"), "no, no", "perhaps"] * 2], renderer=renderer)
    names = {"renderer": renderer, "engine": engine}
    program = first[first.index("class ShortAnswers") :].replace("max_turns=1", "max_turns=1, concurrency=1")
    used = [block for block in blocks if "group_advantages(" in block]
    exec("\n".join(["from rollouts import *", "import asyncio", "import numpy as np", program, *used]), names)
    assert [bool(trajectory.error) for trajectory in names["trajectories"]] == [False, True, False, False] * 2
    for name in ("advantages", "grpo", "dr_grpo", "rloo"):
        assert names[name].reshape(2, 3).sum(axis=1) == pytest.approx(0, abs=1e-5)
    assert len(names["samples"]) == 6


def test_the_page_on_migrating(tiny_model_dir, monkeypatch):
    monkeypatch.setattr("renderers.base.load_tokenizer", lambda name: load_tokenizer(str(tiny_model_dir)))
    names = run_page("migrating-from-renderers.md")
    assert names["renderer"].config.name == "default"


@pytest.mark.slow
def test_the_page_on_weight_updates():
    names = run_page("weight-updates.md")
    for versions, limit in ((names["one_step"], 1), (names["asynchronous"], 2)):
        assert [len(of_step) for of_step in versions] == [3] * 4
        assert all(0 <= step - oldest <= limit for step, of_step in enumerate(versions) for oldest in of_step)
        assert any(step > oldest for step, of_step in enumerate(versions) for oldest in of_step)
    assert names["metrics"]["weight_updates"] == 4


@pytest.mark.slow
def test_the_page_on_observability(capsys):
    names = run_page("observability.md")
    ended = [line for line in names["lines"] if line["event"] == "EpisodeEnded"]
    assert [line["outcome"] for line in ended] == ["done"] * 3
    printed = capsys.readouterr().out.splitlines()
    assert "groups 3 of 3 finished, 0 queued, 3 delivered; episodes 0 running, 6 done" in printed[-1]


def test_the_page_on_observability_has_a_row_for_each_metric():
    text = (DOCS / "observability.md").read_text("utf-8")
    for metric in METRICS:
        name = f"{metric.name}/{metric.label.upper()}" if metric.label else metric.name
        assert f"| `{name}` | {metric.kind} | {metric.unit} | {metric.meaning} |" in text


@pytest.mark.slow
def test_the_page_on_the_runner():
    names = run_page("runner.md")
    assert sorted(group.task.data[0] for group in [*names["first"], *names["second"]]) == list(range(6))
    assert names["before"] == names["after"][:1]
    assert sorted(names["after"]) == sorted(task.task_id for task in names["tasks"])


def test_the_page_on_the_viewer(tmp_path):
    names = run_page("viewer.md")
    assert names["trajectory"].nodes[1].extras["entropy"].tolist() == [0.5] * len(names["ids"])
    assert (tmp_path / "episode.html").read_text("utf-8").startswith("<!doctype html>")


def test_the_page_on_reports(tmp_path):
    names = run_page("report.md")
    assert names["written"].path.read_text("utf-8").startswith("<!doctype html>")
    assert len((tmp_path / "runner_metrics.jsonl").read_text("utf-8").splitlines()) == 2
    assert [path.name.startswith("events.out.tfevents") for path in (tmp_path / "logs").iterdir()] == [True]


def test_the_page_on_the_gateway():
    names = run_page("gateway.md")
    assert (names["trajectory"].reward, names["trajectory"].finished) == (1.0, True)
    assert names["response"].content.startswith(b"MMRRECS\n")
    assert len(names["samples"]) == 1


def test_each_concept_has_a_drawing_that_its_page_shows():
    pages = {path.stem for path in (DOCS / "concepts").glob("*.md")}
    assert pages == {"token", "image", "bridging", "branches", "staleness", "mismatch"}
    for page in pages:
        assert f"]({page}.svg)" in (DOCS / "concepts" / f"{page}.md").read_text("utf-8")
        assert (DOCS / "concepts" / f"{page}.svg").is_file()


@pytest.mark.parametrize("page", ["token", "image", "bridging", "staleness"])
def test_a_page_on_a_concept(page):
    run_page(f"concepts/{page}.md")


def test_the_page_on_fleets():
    run_page("fleet.md")


# The limits that docs/security.md states are those of the code.

CLASSES = (*(MediaPolicy, DecodeLimits, HttpLimits, GatewayLimits, MediaStore, ToolEnvironment, ChatEndpoint),)
#: Classes all of whose numbers are limits.
COMPLETE = (MediaPolicy, DecodeLimits, GatewayLimits)
ROW = re.compile(r"^\| `(\w+)\.(\w+)` \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)


def stated_limits(text):
    return {(owner, name): default for owner, name, default in ROW.findall(text)}


def as_stated(name, value):
    """A default as the page writes it."""
    if "bytes" in name:
        size, unit = (value >> 30, "GiB") if value >= 1 << 30 else (value >> 20, "MiB")
        return f"{size} {unit}"
    return f"{value:,.0f} s" if name == "timeout" or name.endswith("seconds") else f"{value:,}"


def differences(text):
    defaults = {
        (owner.__name__, parameter.name): parameter.default
        for owner in CLASSES
        for parameter in inspect.signature(owner).parameters.values()
    }
    return [
        f"{owner}.{name}: {stated}"
        for (owner, name), stated in stated_limits(text).items()
        if stated != as_stated(name, defaults[owner, name])
    ]


@pytest.fixture(scope="module")
def page():
    return (DOCS / "security.md").read_text("utf-8")


def test_the_page_states_the_default_of_each_limit(page):
    assert stated_limits(page)
    assert differences(page) == []


def test_another_default_on_the_page_is_found(page):
    assert differences(page.replace("| 32 MiB |", "| 33 MiB |")) == ["MediaPolicy.max_bytes: 33 MiB"]
    assert differences(page.replace("| 3,600 s | a call", "| 60 s | a call")) == ["HttpLimits.total_seconds: 60 s"]


def test_the_page_leaves_no_limit_out(page):
    numbers = {
        (owner.__name__, field.name)
        for owner in COMPLETE
        for field in fields(owner)
        if isinstance(field.default, int | float)
    }
    assert numbers - stated_limits(page).keys() == set()
