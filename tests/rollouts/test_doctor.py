"""The doctor against servers with one fault each: every check must find its own, and none in a sound server."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from rollouts.doctor import examination, server_checks
from rollouts.doctor.commands import doctor
from rollouts.doctor.examination import Options
from rollouts.doctor.finding import Outcome, absent, failed, ok, skipped
from rollouts.doctor.generation_checks import aborting, cache, logprobs_mode, picture_request, text_request
from rollouts.doctor.patient import Patient
from rollouts.doctor.reference_check import mismatch
from rollouts.doctor.report import findings_table, summary
from rollouts.doctor.server_checks import (
    control_routes,
    keep_alive,
    pause_and_resume,
    pixel_dtype,
    reachable,
    scale_out,
    served_model,
    version,
)
from rollouts.doctor.token_checks import picture_tokens_and_features, text_tokens
from rollouts.engines.protocol import Completion, FinishReason, GenerateRequest, GenerateResult
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.connection import Reply
from rollouts.engines.vllm.features import features_segments
from rollouts.errors import ServerError, ServerUnreachableError

CAPABILITIES = ServerCapabilities(
    version="0.32.0",
    model="tiny",
    max_model_len=2048,
    scale_out=True,
    pixel_dtype="uint8",
    placeholder_ids={},
    merge_area=4,
    chat_logprobs=False,
    content_parts=True,
    control=True,
)


class FakeServer:
    """Engine, connection and control of a server that samples `8` at log-probability -1, less a little per picture.

    The attributes are its faults.
    """

    base_url = "http://server.test"

    def __init__(self, renderer):
        self.renderer = renderer
        self.blind = False
        self.own_processing_differs = False
        self.misses = False
        self.mixes_up = False
        self.unknown_status = 500
        self.unknown_kills = False
        self.processed = False
        self.deaf_to_aborts = False
        self.health = 200
        self.template_suffix: list[int] = []
        self.pixel_fault = 0
        self.paused = False
        self.pause_works = True
        self.resume_failures = 0
        self.cleared = False
        self.known: dict[str, float] = {}
        self.aborted = asyncio.Event()

    def seen(self, media) -> float:
        """What pictures change about a log-probability."""
        if media is None or self.blind:
            return 0.0
        return sum(int(item.source.digest[:6], 16) / 2**24 for item, _ in media.placed())

    # Engine.

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        media = request.multi_modal_data
        value = -1.0 - self.seen(media)
        for item, _ in media.placed() if media is not None else ():
            self.known[item.mm_hash] = value
        if self.processed and request.sampling.temperature == 0.5:
            value = -0.4
        count = request.sampling.max_tokens
        logprobs = np.full(count, value, dtype=np.float32)
        completion = Completion(0, np.full(count, 8, np.int32), logprobs, FinishReason.LENGTH)
        scored = np.full(len(request.prompt_ids), -1.0, np.float32) if request.prompt_logprobs else None
        return GenerateResult(request.request_id, [completion], scored)

    async def close(self):
        pass

    # Connection.

    async def request(self, method, path, *, name, body=None, **_):
        sent = None if body is None else json.loads(b"".join(bytes(one) for one in body))
        if path == "/health":
            return Reply(self.health, {}, b"")
        if path == "/tokenize":
            ids = self.renderer.render(sent["messages"], add_generation_prompt=True).token_ids
            return _reply({"tokens": [*ids, *self.template_suffix]})
        if path == "/detokenize":
            return _reply({"prompt": f"<{sent['tokens']}>"})
        if path == "/v1/chat/completions/render":
            return self._rendered(sent)
        if path == "/inference/v1/abort_requests":
            if sent["request_ids"][0].startswith("generate-tokens-") and not self.deaf_to_aborts:
                self.aborted.set()
            return _reply({})
        assert path == "/inference/v1/generate"
        if "features" in sent:
            return self._by_hash(sent)
        try:
            await asyncio.wait_for(self.aborted.wait(), 1.0)
            return _answer([8] * 3, -1.0, "abort")
        except TimeoutError:
            return _answer([8] * 50, -1.0, "length")

    def _by_hash(self, sent):
        assert sent["features"]["kwargs_data"]["image"] == [None]
        (mm_hash,) = sent["features"]["mm_hashes"]["image"]
        if mm_hash not in self.known:
            if self.unknown_kills:
                self.health = 503
            return _answer([8], -1.0, "length") if self.unknown_status == 200 else Reply(self.unknown_status, {}, b"{}")
        if self.misses:
            return Reply(500, {}, b"{}")
        return _answer([8] * 16, self.known[mm_hash] - 0.5 * self.mixes_up, "length")

    def _rendered(self, sent):
        parts = []
        for part in sent["messages"][0]["content"]:
            if part["type"] == "image_url":
                data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                pixels = np.asarray(Image.open(io.BytesIO(data))).copy()
                pixels[0, 0, 0] += np.uint8(self.pixel_fault)
                part = {"type": "image", "image": pixels}
            parts.append(part)
        made = self.renderer.render([{"role": "user", "content": parts}], add_generation_prompt=True)
        features = json.loads(b"".join(features_segments(made.multi_modal_data, pixel_dtype="uint8")))
        return _reply({"token_ids": made.token_ids, "features": features})

    # Control.

    async def is_paused(self):
        return self.paused

    async def pause(self, mode, clear_cache):
        assert mode == "keep"
        self.cleared = self.cleared or clear_cache
        self.paused = self.pause_works

    async def resume(self):
        if self.resume_failures:
            self.resume_failures -= 1
            raise ServerUnreachableError("resume", "gone for a moment")
        self.paused = False


class OwnProcessing:
    """The same server, shown files."""

    def __init__(self, server):
        self.server = server

    async def generate(self, request):
        result = await self.server.generate(request)
        if self.server.own_processing_differs:
            result.completions[0].logprobs[:] += 0.25
        return result

    async def close(self):
        pass


def _reply(answer, status=200):
    return Reply(status, {}, json.dumps(answer).encode())


def _answer(ids: Sequence[int], value: float, reason: str):
    content = [{"token_id": one, "logprob": value, "rank": 1, "top_logprobs": []} for one in ids]
    return _reply({"choices": [{"token_ids": list(ids), "finish_reason": reason, "logprobs": {"content": content}}]})


@pytest.fixture
def server(renderer):
    return FakeServer(renderer)


@pytest.fixture
def patient(server, renderer, tiny_model_dir):
    return Patient(
        engine=server,
        server_side=OwnProcessing(server),
        control=server,
        connection=server,
        renderer=renderer,
        directory=tiny_model_dir,
        capabilities=CAPABILITIES,
        dtype="float32",
        dtype_source="said by the server",
    )


def outcomes(found) -> dict[str, Outcome]:
    return {finding.check: finding.outcome for finding in (found if isinstance(found, list) else [found])}


def changed(patient, **capabilities):
    return replace(patient, capabilities=replace(patient.capabilities, **capabilities))


async def test_nothing_is_found_wrong_with_a_sound_server(patient, server):
    checks = [
        reachable,
        version,
        served_model,
        scale_out,
        control_routes,
        pixel_dtype,
        text_tokens,
        picture_tokens_and_features,
        text_request,
        picture_request,
        cache,
        logprobs_mode,
        aborting,
        pause_and_resume,
    ]
    for check in checks:
        found = await check(patient)
        assert set(outcomes(found).values()) == {Outcome.OK}, found
    assert not server.paused
    assert not server.cleared


# One fault each.


async def test_a_dead_engine_is_found(patient, server):
    server.health = 503
    assert outcomes(await reachable(patient)) == {"reachable": Outcome.FAILED}


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("0.32.0", Outcome.OK),
        ("0.20.2+cpu", Outcome.OK),
        ("0.19.1", Outcome.FAILED),
        ("1.0.0", Outcome.FAILED),
        ("unknown", Outcome.ABSENT),
    ],
)
async def test_a_version_that_is_not_known_is_found(patient, said, outcome):
    assert (await version(changed(patient, version=said))).outcome is outcome


async def test_a_limit_beyond_the_positions_of_the_model_is_found(patient):
    found = await served_model(changed(patient, max_model_len=10**7))
    assert found.outcome is Outcome.FAILED
    assert "10000000" in found.seen


async def test_a_server_without_scale_out_fails_and_one_without_control_lacks_something(patient):
    assert (await scale_out(changed(patient, scale_out=False))).outcome is Outcome.FAILED
    assert (await control_routes(changed(patient, control=False))).outcome is Outcome.ABSENT


async def test_another_tokenizer_or_template_is_found_with_the_first_difference(patient, server):
    server.template_suffix = [4, 5]
    found = await text_tokens(patient)
    assert found.outcome is Outcome.FAILED
    assert "nothing against [4, 5]" in found.seen


async def test_other_pixels_are_found_though_the_tokens_agree(patient, server):
    server.pixel_fault = 1
    found = await picture_tokens_and_features(patient)
    assert outcomes(found) == {"image tokens": Outcome.OK, "image features": Outcome.FAILED}
    assert "of pixel_values differ" in found[1].seen


async def test_a_wrong_pixel_dtype_is_found_by_its_name(patient):
    found = await picture_tokens_and_features(changed(patient, pixel_dtype="float32"))
    assert outcomes(found)["image features"] is Outcome.FAILED
    assert "float32 with us and uint8 with the server" in found[1].seen


async def test_a_server_that_does_not_look_at_pictures_is_found(patient, server):
    server.blind = True
    assert outcomes(await picture_request(patient))["image request"] is Outcome.FAILED


async def test_pixels_that_the_server_would_make_otherwise_are_found(patient, server):
    server.own_processing_differs = True
    found = await picture_request(patient)
    assert outcomes(found) == {"image request": Outcome.OK, "image pixels": Outcome.FAILED}


async def test_a_server_that_keeps_no_pictures_is_found(patient, server):
    server.misses = True
    assert outcomes(await cache(patient))["image cache"] is Outcome.FAILED


async def test_a_cache_that_answers_with_another_picture_is_found(patient, server):
    server.mixes_up = True
    assert outcomes(await cache(patient))["image cache"] is Outcome.FAILED


@pytest.mark.parametrize("status", [200, 400, 503])
async def test_an_unknown_picture_that_is_not_answered_with_500_is_found(patient, server, status):
    server.unknown_status = status
    assert outcomes(await cache(patient))["cache miss"] is Outcome.FAILED


async def test_a_server_that_dies_of_an_unknown_picture_is_found(patient, server):
    server.unknown_kills = True
    found = await cache(patient)
    assert "took the server down" in found[1].seen


async def test_processed_logprobs_are_found(patient, server):
    server.processed = True
    found = await logprobs_mode(patient)
    assert found.outcome is Outcome.FAILED
    assert "raw_logprobs" in found.cure


async def test_an_abort_that_does_nothing_is_found(patient, server):
    server.deaf_to_aborts = True
    found = await aborting(patient)
    assert found.outcome is Outcome.FAILED
    assert "length" in found.seen


async def test_a_pause_that_does_nothing_is_found(patient, server):
    server.pause_works = False
    assert (await pause_and_resume(patient)).outcome is Outcome.FAILED


async def test_a_server_that_others_paused_is_left_as_it_is(patient, server):
    server.paused = True
    assert (await pause_and_resume(patient)).outcome is Outcome.FAILED
    assert server.paused


async def test_the_server_is_resumed_even_if_that_fails_at_first(patient, server, monkeypatch):
    async def at_once(seconds):
        pass

    monkeypatch.setattr(server_checks.asyncio, "sleep", at_once)
    server.resume_failures = 3
    assert (await pause_and_resume(patient)).outcome is Outcome.OK
    assert not server.paused


async def test_a_model_without_pictures_is_not_asked_about_them(patient):
    blind = changed(patient, pixel_dtype=None)
    for check in (picture_tokens_and_features, picture_request, cache):
        assert set(outcomes(await check(blind)).values()) == {Outcome.SKIPPED}


# Connections.


class _Server(ThreadingHTTPServer):
    daemon_threads = True


@pytest.fixture
def http_server(request):
    """A server that closes connections idle for `request.param` seconds."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = request.param

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("http_server", "outcome"), [(0.1, Outcome.FAILED), (10, Outcome.OK)], indirect=["http_server"]
)
async def test_connections_that_are_closed_too_early_are_found(patient, server, http_server, outcome, monkeypatch):
    monkeypatch.setattr(server_checks, "HttpLimits", lambda: type("Limits", (), {"keepalive_seconds": 0.3}))
    server.base_url = http_server
    assert (await keep_alive(patient)).outcome is outcome


# Against transformers.


@pytest.fixture(scope="module")
def local_engine(tiny_model_dir):
    from rollouts.engines.local import LocalEngine

    return LocalEngine.from_pretrained(tiny_model_dir)


async def test_a_sound_engine_agrees_with_transformers_on_text_and_pictures(patient, local_engine):
    found = await mismatch(replace(patient, engine=local_engine), max_gigabytes=1)
    assert outcomes(found) == {"mismatch, text": Outcome.OK, "mismatch, image": Outcome.OK}


async def test_logprobs_of_other_weights_are_found(patient, tiny_model_dir):
    import torch

    from rollouts.engines.local import LocalEngine

    engine = LocalEngine.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        engine._model.model.language_model.norm.weight.mul_(1.01)
    found = await mismatch(replace(patient, engine=engine), max_gigabytes=1)
    assert outcomes(found)["mismatch, text"] is Outcome.FAILED


async def test_a_model_that_only_reads_text_is_scored_by_its_own_forward(patient, tmp_path):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=512, **sizes, **heads)).eval()
    model.save_pretrained(tmp_path)

    class Engine:
        off_by = 0.0

        async def generate(self, request):
            ids, scores = list(request.prompt_ids), []
            for _ in range(request.sampling.max_tokens):
                logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].detach(), -1)
                ids.append(int(logprobs.argmax()))
                scores.append(float(logprobs.max()) + self.off_by)
            drawn = np.array(ids[len(request.prompt_ids) :], np.int32)
            return GenerateResult("x", [Completion(0, drawn, np.array(scores, np.float32), FinishReason.LENGTH)])

    engine = Engine()
    text_only = replace(changed(patient, pixel_dtype=None), engine=engine, directory=tmp_path)
    assert outcomes(await mismatch(text_only, max_gigabytes=1)) == {"mismatch, text": Outcome.OK}
    engine.off_by = 1e-3
    assert outcomes(await mismatch(text_only, max_gigabytes=1)) == {"mismatch, text": Outcome.FAILED}


async def test_a_large_checkpoint_is_not_scored(patient):
    found = await mismatch(patient, max_gigabytes=1e-6)
    assert outcomes(found) == {"mismatch": Outcome.SKIPPED}


# The whole.


async def test_what_stops_a_check_is_a_finding_and_the_others_go_on(patient, server, monkeypatch):
    async def broken(patient):
        raise ServerError("x", "odd", status=400, body="no")

    async def kept(patient):
        return ok("keep-alive", "")

    monkeypatch.setattr(examination, "text_request", broken)
    monkeypatch.setattr(examination, "keep_alive", kept)
    broken.__name__ = "text_request"
    found = await examination._all_findings(patient, Options(reference_gigabytes=0))
    assert outcomes(found)["text request"] is Outcome.FAILED
    assert outcomes(found)["abort"] is Outcome.OK
    assert "pause, resume" not in outcomes(found)


def test_a_secret_in_an_answer_is_never_shown():
    found = failed("a", "the key s3cret is wrong", "not s3cret").without("s3cret")
    assert "s3cret" not in json.dumps(found.as_json())


def test_the_table_shows_the_cure_beside_every_failure_and_nothing_raw():
    from rich.console import Console

    file = io.StringIO()
    found = [failed("a", "bad [red]\x1b[31m", "mend it"), absent("b", "none", "start it"), skipped("c", "not")]
    Console(file=file, width=120).print(findings_table(found))
    shown = file.getvalue()
    assert "mend it" in shown
    assert "start it" in shown
    assert "[red]" in shown
    assert "\x1b" not in shown
    assert summary([ok("a", ""), failed("b", "", "")]) == "1 ok, 1 failed"


@pytest.fixture
def command():
    app = typer.Typer()
    app.command()(doctor)
    return lambda *arguments, **options: CliRunner().invoke(app, list(arguments), **options)


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([ok("a", "fine"), absent("b", "none", "c"), skipped("d", "e")], 0),
        ([ok("a", "fine"), failed("b", "bad", "mend")], 1),
    ],
)
def test_the_exit_status_says_whether_anything_failed(command, monkeypatch, tmp_path, findings, code):
    async def examine(url, directory, options):
        return findings

    monkeypatch.setattr(examination, "examine", examine)
    result = command("http://x", "--model", str(tmp_path))
    assert result.exit_code == code
    assert "fine" in result.output
    as_data = command("http://x", "--model", str(tmp_path), "--json")
    assert as_data.exit_code == code
    assert json.loads(as_data.stdout)["ok"] is (code == 0)


def test_what_could_not_run_exits_with_2_and_without_the_key(command, monkeypatch, tmp_path):
    async def examine(url, directory, options):
        raise ServerUnreachableError("x", f"nobody there, not even with {options.api_key}")

    monkeypatch.setattr(examination, "examine", examine)
    result = command("http://x", "--model", str(tmp_path), "--api-key-env", "KEY", env={"KEY": "s3cret"})
    assert result.exit_code == 2
    assert "s3cret" not in result.output
    assert command("http://x", "--model", str(tmp_path), "--api-key-env", "NO_SUCH_KEY").exit_code == 2


def test_a_directory_without_a_model_exits_with_2(command, tmp_path):
    result = command("http://127.0.0.1:9", "--model", str(tmp_path))
    assert result.exit_code == 2
    assert "could not run" in result.output
