"""The table `[teacher]`: every episode that ends is scored; a teacher that cannot do it is refused before the run."""

import asyncio
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from run_config_files import CONFIG, FOURS, groups_of, rows_of, run, summary_of, write_run

from renderers import load_renderer
from rollouts import LocalEngine
from rollouts.cli.run.summary import print_summary
from rollouts.report.charts import number_text
from rollouts.run_config.config_file import read_config
from rollouts.run_config.errors import RunConfigError
from rollouts.run_config.run_parts import make_parts
from rollouts.testing import tiny_qwen3_vl
from rollouts.training import samples_from_trajectory, score

TEACHER = """
[teacher]
engine = { kind = "local", directory = "teacher" }
top_k = 2
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a teacher, which has ended."""
    directory = tmp_path_factory.mktemp("run")
    tiny_qwen3_vl(directory / "teacher", seed=5)
    result = run(write_run(directory, FOURS + TEACHER))
    assert result.exit_code == 0, result.output
    return directory


@pytest.mark.slow
def test_every_episode_in_the_file_has_the_scores_of_the_teacher(directory: Path) -> None:
    renderer = load_renderer(directory / "teacher")
    samples = [
        sample
        for group in groups_of(directory)
        for episode in group
        for sample in samples_from_trajectory(episode, advantage=1.0, processors=renderer.processors)
    ]

    async def expected() -> list[np.ndarray]:
        engine = LocalEngine.from_pretrained(directory / "teacher")
        try:
            return [each.logprobs for each in await score(samples, engine)]
        finally:
            await engine.close()

    for sample, logprobs in zip(samples, asyncio.run(expected()), strict=True):
        np.testing.assert_allclose(sample.teacher_logprobs, logprobs, atol=1e-5)
        assert sample.teacher_top_ids is not None
        assert sample.teacher_top_ids.shape == (len(sample), 2)
    for episode in (episode for group in groups_of(directory) for episode in group):
        assert np.isfinite(episode.metrics["teacher_kl"])


@pytest.mark.slow
def test_the_divergence_from_the_teacher_is_in_the_files_the_summary_and_the_report(directory: Path) -> None:
    of_episodes = {
        group[0].group_id: [episode.metrics["teacher_kl"] for episode in group] for group in groups_of(directory)
    }
    assert {row["task_id"]: row["teacher_kl"] for row in rows_of(directory)} == of_episodes
    mean = np.mean([value for values in of_episodes.values() for value in values])
    assert mean > 0
    summary = summary_of(directory)
    assert summary["teacher_kl_mean"] == pytest.approx(mean)
    printed = io.StringIO()
    print_summary(summary, Console(file=printed, width=80))
    assert re.search(rf"teacher kl mean +{mean:.3f}", printed.getvalue())
    assert (
        f"<dt>mean teacher_kl</dt><dd>{number_text(float(mean))} nats a token</dd>"
        in (directory / "out/report.html").read_text()
    )


@pytest.mark.slow
def test_a_run_with_a_teacher_is_continued_with_it_and_not_with_another(directory: Path) -> None:
    assert run(directory / "run.toml", "--resume").exit_code == 0
    other = directory / "other.toml"
    other.write_text((FOURS + TEACHER).replace("top_k = 2", "top_k = 3"))
    result = run(other, "--resume")
    assert result.exit_code == 2
    assert "teacher" in result.output


def problem_of(directory: Path, table: str, config: str = CONFIG) -> tuple[str, str]:
    with pytest.raises(RunConfigError) as caught:
        make_parts(read_config(write_run(directory, config + table)), offline=True)
    (problem,) = caught.value.problems
    return problem.key, problem.reason


def test_a_teacher_of_another_template_is_refused_before_the_run(tmp_path: Path) -> None:
    template = tiny_qwen3_vl(tmp_path / "teacher") / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|>the "))
    key, reason = problem_of(tmp_path, TEACHER)
    assert key == "teacher.renderer"
    assert "its chat template prints another prompt" in reason


def test_problems_of_the_tables_of_a_teacher_are_named_as_theirs(tmp_path: Path) -> None:
    key, reason = problem_of(tmp_path / "a", TEACHER)
    assert key == "teacher.engine.directory"
    assert "there is no" in reason
    served = '[teacher]\nengine = { kind = "vllm", base_url = "http://127.0.0.1:1" }\n'
    key, reason = problem_of(tmp_path / "b", served)
    assert key == "teacher.renderer"
    assert "add [teacher.renderer]" in reason
    unset = served + '[teacher.renderer]\nmodel = "model"\n'
    key, _ = problem_of(tmp_path / "c", unset.replace('" }', '", api_key_env = "NO_SUCH_KEY" }'))
    assert key == "teacher.engine.api_key_env"


def test_a_chat_endpoint_has_no_teacher(tmp_path: Path) -> None:
    endpoint = 'kind = "openai"\nbase_url = "http://127.0.0.1:1"\nmodel = "m"'
    config = CONFIG.replace('kind = "scripted"\ncompletions = ["4", "7"]', endpoint).replace(
        '[renderer]\nmodel = "model"\n', ""
    )
    key, reason = problem_of(tmp_path, TEACHER, config)
    assert key == "teacher"
    assert "no tokens to score" in reason


@pytest.mark.slow
def test_a_teacher_that_cannot_be_reached_is_an_error_before_the_run(tmp_path: Path) -> None:
    # The servers of a fleet are tried twice, one server for some 12 seconds.
    served = '[teacher]\nengine = { kind = "fleet", urls = ["http://127.0.0.1:1"] }\nrenderer = { model = "model" }\n'
    result = run(write_run(tmp_path, CONFIG + served))
    assert result.exit_code == 2
    assert "teacher.engine.urls" in result.output
    assert not (tmp_path / "out/metrics.jsonl").exists() or not (tmp_path / "out/metrics.jsonl").read_text()


def refused_run(directory: Path, config: str) -> str:
    """What a run says that is refused before it begins."""
    result = run(write_run(directory, config))
    assert result.exit_code == 2, result.output
    assert not (directory / "out/trajectories.mmr").exists()
    return " ".join(result.output.split())


def test_more_of_the_likeliest_tokens_than_the_teacher_gives_are_refused_before_the_run(tmp_path: Path) -> None:
    tiny_qwen3_vl(tmp_path / "teacher")
    output = refused_run(tmp_path, FOURS + TEACHER.replace("top_k = 2", "top_k = 1025"))
    assert "teacher.top_k" in output
    assert "prompt_top_logprobs is 1025 and an engine takes at most 1024" in output
    assert "1025 is too large: use a smaller one" in output


def shortened_teacher(directory: Path, tokens: int) -> None:
    file = tiny_qwen3_vl(directory / "teacher") / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["max_position_embeddings"] = tokens
    file.write_text(json.dumps(config))


@pytest.mark.slow
def test_a_teacher_whose_context_is_too_short_for_the_run_is_refused_before_it(tmp_path: Path) -> None:
    shortened_teacher(tmp_path, 200)
    config = FOURS.replace("max_tokens = 16", "max_tokens = 50") + TEACHER
    output = refused_run(tmp_path, config)
    assert "teacher.engine" in output
    assert (
        "context has 200 tokens, and an episode may have 201 ([sampling] max_tokens 50, [limits] max_turns 4)" in output
    )
    cured = config.replace("max_turns = 4", "max_turns = 4\nmax_tokens = 199")
    assert "write max_tokens = 199 into [limits]" in output
    assert run(write_run(tmp_path, cured, model=False)).exit_code == 0


@pytest.mark.slow
def test_a_teacher_with_the_context_of_the_sampler_is_accepted_however_many_turns_there_may_be(tmp_path: Path) -> None:
    shortened_teacher(tmp_path, 200)
    local = 'kind = "local"\ndirectory = "teacher"'
    config = FOURS.replace('kind = "scripted"\ncompletions = ["4"]', local).replace("max_turns = 4", "max_turns = 40")
    result = run(write_run(tmp_path, config + TEACHER))
    assert result.exit_code == 0, result.output
