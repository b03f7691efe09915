"""The code of the guides in docs/how-to, and the values that its comments state."""

import math
import os
import runpy
import sys
import sysconfig
from pathlib import Path

import pytest
from planted_mismatches import sampled, scored
from test_docs_pages import DOCS, FILE, run_command, run_page

from renderers import load_renderer
from renderers.formats import detection
from renderers.formats.families import Family
from rollouts.testing import tiny_qwen3_vl
from transport import read_records

HELLO = [{"role": "user", "content": "Hello."}]


pytestmark = pytest.mark.usefixtures("empty_working_directory")


@pytest.mark.slow
def test_the_guide_to_an_own_model():
    names = run_page("how-to/own-model.md")
    assert names["report"].max_abs < 1e-4
    assert names["report"].tokens == len(names["trajectory"].nodes[-1])
    assert Path("episode.html").read_text("utf-8").startswith("<!doctype html>")


def test_the_guide_to_an_own_environment():
    run_page("how-to/own-environment.md")


PRINTS_ITS_CALLS = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.reasoning_content -%}{{- '[thoughts]' + message.reasoning_content + '[/thoughts]' -}}{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '[call]' + call.function.name + ' ' + call.function.arguments | tojson + '[/call]' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


@pytest.fixture
def files_of_the_guide():
    """The files of docs/how-to/extend.md and a model, in the working directory."""
    for name, content in FILE.findall((DOCS / "how-to/extend.md").read_text("utf-8")):
        Path(name).write_text(content, "utf-8")
    tiny_qwen3_vl("model", weights=False)


@pytest.mark.slow
def test_the_guide_to_an_own_environment_and_engine_and_format(files_of_the_guide, monkeypatch):
    monkeypatch.setenv("PATH", f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
    run_command("rollouts run run.toml", Path.cwd())
    episodes = [episode for group in read_records("out/trajectories.mmr") for episode in group]
    assert len(episodes) == 4
    for episode in episodes:
        answer = episode.turns[0].message["content"]
        assert (len(answer), answer.isdecimal(), episode.error) == (3, True, "")
        assert episode.reward == (int(answer) % 2 == 0)
        assert episode.nodes[-1].logprobs == pytest.approx([math.log(1 / 10)] * 3)
    assert run_command("python read.py", Path.cwd()) == "Left? Now. ['look']\n"


def test_a_format_of_the_table_is_that_of_each_model_that_prints_it(files_of_the_guide, monkeypatch):
    Path("template.jinja").write_text(PRINTS_ITS_CALLS, "utf-8")
    assert load_renderer("model", chat_template=Path("template.jinja")).format.name != "mine"
    own = Family(runpy.run_path("named_calls.py")["FORMAT"])
    monkeypatch.setattr(detection, "FAMILIES", (own, *detection.FAMILIES))
    assert load_renderer("model", chat_template=Path("template.jinja")).format.name == "mine"


@pytest.mark.slow
def test_the_guide_to_tools():
    names = run_page("how-to/tools.md")
    trajectory = names["trajectory"]
    assert trajectory.reward == 1.0
    assert [turn.info["tool_calls"][0]["outcome"] for turn in trajectory.turns[:2]] == ["failed", "ok"]
    assert len(list(trajectory.all_media())) == 1


def test_the_guide_to_judges():
    usage = run_page("how-to/judges.md")["judge"].usage
    assert (usage.verdicts, usage.judged, usage.requests, usage.unreadable) == (2, 2, 2, 0)


@pytest.mark.slow
def test_the_guide_to_the_flags_of_vllm(tmp_path, monkeypatch):
    # It starts `vllm` by its name; here that is a scripted server over the same checkpoint.
    program = Path(__file__).parent / "vllm" / "engine_vllm_serve.py"
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    path = os.pathsep.join(sys.path)
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec "{sys.executable}" "{program}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    names = run_page("how-to/vllm-flags.md")
    assert not names["trajectory"].error


@pytest.mark.slow
def test_the_guide_to_supervised_training():
    names = run_page("how-to/supervised-fine-tuning.md")
    assert names["losses"][-1] < names["losses"][0]
    assert [int(sample.loss_mask.sum()) for sample in names["several"]] == [11]
    assert Path("trained/model.safetensors").is_file()
    assert load_renderer("trained").render_ids(HELLO) == names["renderer"].render_ids(HELLO)


@pytest.mark.slow
def test_the_guide_to_a_loop():
    names = run_page("how-to/rl-loop.md")
    assert len(names["history"]) == 3
    assert max(mismatch for _, mismatch in names["history"]) < 1e-4
    assert names["reloaded"].render_ids(HELLO) == names["renderer"].render_ids(HELLO)
    batch = scored(names["model"], sampled(names["model"], names["renderer"], seeds=range(2)))
    assert names["mismatch_of_equal_weights"](*batch, "0") < 1e-4
    assert names["mismatch_of_equal_weights"](*batch, "1") is None


@pytest.mark.slow
def test_the_guide_to_analysis(monkeypatch):
    monkeypatch.setenv("PATH", f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
    names = run_page("how-to/analyse-a-run.md")
    easy, hard = names["by_level"].loc["easy"], names["by_level"].loc["hard"]
    assert (hard.environment_reward, hard.group_reward, hard.total_reward) == pytest.approx((0.0, 0.1, 0.1))
    assert easy.total_reward == pytest.approx(easy.environment_reward + 0.1)
    assert sorted(names["parts"].columns) == ["right", "short"]
    assert names["parts"].right.sum() == names["episodes"].environment_reward.sum() == len(names["best"])
    assert names["hardest"][0] == ("6+6", "hard", pytest.approx(0.1), 0)
    means = [mean for _, mean in names["of_all"]]
    assert means == pytest.approx([names["episodes"].total_reward.mean()] * 2)
    assert type(names["dataset"].features["image_files"].feature).__name__ == "Image"


def test_the_guide_for_users_of_verifiers():
    run_page("how-to/migrate-from-verifiers.md")


def test_every_guide_is_run_here_or_with_the_packages_of_other_trainers():
    tests = [Path(__file__), Path(__file__).parent / "adapters" / "test_migration_guides.py"]
    source = "".join(test.read_text("utf-8") for test in tests)
    guides = sorted(page.name for page in (DOCS / "how-to").glob("*.md"))
    assert guides
    assert [name for name in guides if f'"how-to/{name}"' not in source] == []
