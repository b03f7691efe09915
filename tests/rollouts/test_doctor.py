"""The doctor's report and command line, and checks that need no vLLM. Planted faults: vllm/test_doctor_planted."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from rollouts.cli.doctor import command as doctor_command
from rollouts.cli.doctor.command import doctor, print_findings, run_check
from rollouts.cli.doctor.mismatch_check import mismatch
from rollouts.cli.doctor.target import Finding, Target
from rollouts.engines.protocol import Completion, Engine, FinishReason, GenerateResult
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.errors import ContextLengthError, ServerError

CAPABILITIES = ServerCapabilities(
    version="0.32.0",
    model="tiny",
    max_model_len=2048,
    scale_out=True,
    pixel_dtype="uint8",
    placeholder_ids={},
    merge_area=4,
    control=True,
)


def target_of(renderer, directory, *, engine=None):
    connection = SimpleNamespace(base_url="http://server.test")
    return Target("vllm", engine, connection, renderer, directory, CAPABILITIES, "float32")


# Against transformers.


def text_model(directory):
    """A small Qwen3 without images, written into a directory."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=512, **sizes, **heads)).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model.lm_head.weight.normal_(0, 1)  # the initial ones are so small that all tokens are about as likely
    model.save_pretrained(directory)
    return model


class TextEngine(Engine):
    """Samples the likeliest tokens of a model, and reports their log-probabilities with `off_by` added."""

    def __init__(self, model):
        self.model, self.off_by = model, 0.0

    async def generate(self, request, listen=None):
        ids, scores = list(request.prompt_ids), []
        for _ in range(request.sampling.max_tokens):
            logits = self.model(torch.tensor([ids])).logits[0, -1].detach()
            logprobs = torch.log_softmax(logits, -1)
            ids.append(int(logprobs.argmax()))
            scores.append(float(logprobs.max()) + self.off_by)
        drawn = np.array(ids[len(request.prompt_ids) :], np.int32)
        return GenerateResult(
            request.request_id, [Completion(0, drawn, np.array(scores, np.float32), FinishReason.LENGTH)]
        )

    async def close(self): ...


@pytest.mark.slow
async def test_a_model_that_only_reads_text_is_scored_by_its_own_forward(renderer, tmp_path):
    engine = TextEngine(text_model(tmp_path))
    target = target_of(renderer, tmp_path, engine=engine)
    assert (await mismatch(target, max_gigabytes=1)).outcome == "ok"
    engine.off_by = 1e-3
    found = await mismatch(target, max_gigabytes=1)
    assert found.outcome == "failed"
    assert "too large for text: " in found.seen


async def test_a_large_checkpoint_is_not_scored_and_the_option_is_named(renderer, tiny_model_dir):
    found = await mismatch(target_of(renderer, tiny_model_dir), max_gigabytes=1e-6)
    assert found.outcome == "skipped"
    assert "--reference-gb" in found.cure


async def test_a_checkpoint_that_transformers_cannot_read_is_skipped_with_its_words(renderer, tmp_path):
    class ZeroEngine(TextEngine):
        def __init__(self): ...

        async def generate(self, request, listen=None):
            drawn = np.zeros(request.sampling.max_tokens, np.int32)
            logprobs = np.full(len(drawn), -1, np.float32)
            return GenerateResult(request.request_id, [Completion(0, drawn, logprobs, FinishReason.LENGTH)])

    (tmp_path / "config.json").write_text('{"model_type": "of nobody"}')
    (tmp_path / "model.safetensors").write_bytes(b"x" * 64)
    found = await mismatch(target_of(renderer, tmp_path, engine=ZeroEngine()), max_gigabytes=1)
    assert found.outcome == "skipped"
    assert "of nobody" in found.seen


# How checks depend on each other.


@pytest.fixture
def target(renderer, tiny_model_dir):
    return target_of(renderer, tiny_model_dir)


async def finding(target):
    return Finding("failed", "broken", "mend it")


async def test_a_check_is_skipped_with_the_first_cause_where_what_it_needs_failed(target):
    await run_check(target, "bad", finding)
    await run_check(target, "second", finding, ["bad"])
    await run_check(target, "third", finding, ["second"])
    assert target.findings["third"] == Finding("skipped", "not checked, because of: bad failed")
    assert target.findings["second"] == target.findings["third"]


async def test_what_stops_a_check_is_a_failure_and_a_prompt_without_room_is_none(target):
    async def stopped(target):
        raise ServerError("x", "odd", status=400, body="no")

    async def overlong(target):
        raise ContextLengthError("x", 128, 96)

    await run_check(target, "stopped", stopped)
    await run_check(target, "overlong", overlong)
    assert target.findings["stopped"].outcome == "failed"
    assert "HTTP 400 no" in target.findings["stopped"].seen
    assert target.findings["overlong"].outcome == "skipped"
    assert "128 tokens" in target.findings["overlong"].seen


# The report.


def test_the_table_shows_the_cure_beside_every_failure_and_nothing_raw(capsys):
    print_findings({"a": Finding("failed", "bad [red]\x1b[31m", "mend it"), "b": Finding("ok", "")})
    shown = capsys.readouterr().out
    assert "mend it" in shown
    assert "[red]" in shown
    assert "\x1b" not in shown


@pytest.fixture
def command():
    app = typer.Typer()
    app.command()(doctor)
    return lambda *arguments, **options: CliRunner().invoke(app, list(arguments), **options)


@pytest.mark.parametrize(("second", "code"), [("absent", 0), ("skipped", 0), ("failed", 1)])
def test_the_exit_status_says_whether_anything_failed(command, monkeypatch, tmp_path, second, code):
    async def fake_run_checks(url, directory, **options):
        return {"a": Finding("ok", "fine"), "b": Finding(second, "seen", "cure")}

    monkeypatch.setattr(doctor_command, "run_checks", fake_run_checks)
    result = command("http://x", "--model", str(tmp_path))
    assert result.exit_code == code
    assert "fine" in result.output
    assert result.output.endswith(f"1 ok, 1 {second}\n")
    as_data = command("http://x", "--model", str(tmp_path), "--json")
    assert as_data.exit_code == code
    assert json.loads(as_data.stdout)["ok"] is (code == 0)
