"""The routes of `rollouts tinker`: what is accepted, in which order, for whom, and how a request is refused."""

import asyncio
import json
import math
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tinker
import zstandard
from images import png
from served_in_thread import ServedInThread
from tinker import types
from tinker.proto import tinker_public_pb2 as messages
from tinker.proto.request_conv import forward_backward_request_to_proto

from rollouts.engines.local.batch import Batch
from rollouts.serve.errors import RequestError
from rollouts.tinker import app as app_module
from rollouts.tinker import futures as futures_module
from rollouts.tinker import model_requests
from rollouts.tinker import service as service_module
from rollouts.tinker import turns as turns_module
from rollouts.tinker.backend import Limits
from rollouts.tinker.futures import Futures
from rollouts.tinker.local_sampler import LocalSampler
from rollouts.tinker.model_app import model_app
from rollouts.tinker.run_directory import RunDirectory
from rollouts.training.trainer import Trainer

IDS = list(range(5, 25))
STEP = types.AdamParams(learning_rate=1e-2)
PROTOBUF = "application/x-protobuf"
SESSION = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}


@pytest.fixture(scope="module")
def app_of(tiny_model_dir, tmp_path_factory):
    """Applications of one model by their options, which are stopped at the end."""
    served = []

    def start(directory=None, **options):
        options = {"names": ["tiny"], "device": "cpu", "max_body_bytes": 1 << 16} | options
        app = model_app(tiny_model_dir, directory or tmp_path_factory.mktemp("run"), **options)
        served.append(ServedInThread(app))
        return served[-1]

    yield start
    for each in served:
        each.stop()


@pytest.fixture(scope="module")
def server(app_of):
    return app_of()


@pytest.fixture(scope="module")
def client(server):
    client = client_of(server)
    yield client
    client.close("success").result()


def client_of(server, key="tml-any"):
    return tinker.ServiceClient(base_url=server.base_url, api_key=key)


def rest_of(server, key="tml-any"):
    return tinker.RestClient(base_url=server.base_url, api_key=key)


@pytest.fixture
def training(client):
    return client.create_lora_training_client("tiny", rank=4, seed=1).result()


def row(ids=IDS, **inputs):
    count = len(ids) - 1
    inputs = inputs or {"weights": [1.0] * count}
    return types.Datum(types.ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], **inputs})


def body_of(training, seq_id, data, loss="cross_entropy"):
    rows = types.ForwardBackwardInput(data=data, loss_fn=loss)
    request = types.ForwardBackwardRequest(forward_backward_input=rows, model_id=training.model_id, seq_id=seq_id)
    return forward_backward_request_to_proto(request)


def send(server, body, **headers):
    headers = {"Content-Type": PROTOBUF} | {name.replace("_", "-"): value for name, value in headers.items()}
    return server.post("/api/v1/forward_backward", body, headers)


def result_of(server, answer):
    request = {"request_id": answer.json["request_id"]}
    return server.post("/api/v1/retrieve_future", request)


def sampling_session(server):
    """The id of a sampling session of a new session that asks for nothing else."""
    session = server.post("/api/v1/create_session", SESSION).json["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    return server.post("/api/v1/create_sampling_session", body).json["sampling_session_id"]


def test_a_client_is_told_the_names_of_the_model(server):
    (first, second) = rest_of(server).get_server_capabilities().result().supported_models
    assert first.model_name == "tiny"
    assert first.max_context_length == second.max_context_length == 4096
    assert server.get("/api/v1/healthz").json == {"status": "ok"}


def test_numbers_of_a_loss_named_correction_are_those_of_a_correction(training):
    (scored,) = training.forward([row()], "cross_entropy").result().loss_fn_outputs
    nearer = [value - gap for value, gap in zip(scored["logprobs"].data, [0.0, 0.4, 1.5] * 9, strict=False)]
    data = [row(advantages=[1.0] * len(nearer), logprobs=nearer)]
    options = {"clip_high_threshold": 9.0, "correction.token_high": 2.0, "correction.token_weights": 1.2}
    metrics = training.forward_backward(data, "ppo", options).result().metrics
    kept = [min(math.exp(gap), 1.2) for gap in ([0.0, 0.4, 1.5] * 9)[: len(nearer)] if gap < math.log(2)]
    assert metrics["loss:sum"] == pytest.approx(-sum(kept), rel=1e-4)
    assert metrics["correction_rejected:mean"] == pytest.approx(1 - len(kept) / len(nearer))
    with pytest.raises(tinker.RequestFailedError, match=r"'limit'.*there is no such option; pass token_weights"):
        training.forward_backward(data, "ppo", {"correction.limit": 2.0}).result()


@pytest.mark.slow
def test_samples_have_the_log_probabilities_of_the_trainer(app_of):
    server = app_of(check_mismatch=True)
    client = client_of(server)
    training = client.create_lora_training_client("tiny", rank=4, seed=1).result()
    training.forward_backward([row()], "cross_entropy")
    training.optim_step(STEP).result()
    sampling = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, seed=3)
    found = sampling.sample(types.ModelInput.from_ints(IDS[:5]), 2, params).result().sequences
    assert [len(each.tokens) for each in found] == [6, 6]
    data = []
    for each in found:
        zeros = [0.0] * 4
        advantages, logprobs = [*zeros, *[1.0] * 6], [*zeros, *each.logprobs]
        data.append(row([*IDS[:5], *each.tokens], advantages=advantages, logprobs=logprobs))
    metrics = training.forward_backward(data, "importance_sampling").result().metrics
    assert 0 < metrics["mismatch:max"] < 1e-4
    wrong = row([*IDS[:5], *each.tokens], advantages=advantages, logprobs=[value - 0.5 for value in logprobs])
    metrics = training.forward([wrong], "importance_sampling").result().metrics
    assert metrics["mismatch:max"] == pytest.approx(0.5, abs=1e-4)
    client.close("success").result()


@pytest.mark.slow
def test_a_model_goes_on_from_a_checkpoint_of_a_server_that_was_stopped(app_of, tmp_path):
    server = app_of(tmp_path)
    client = client_of(server)
    training = client.create_lora_training_client("tiny", rank=4, seed=1).result()
    training.forward_backward([row()], "cross_entropy")
    training.optim_step(STEP).result()
    path = training.save_state("here").result().path
    training.forward_backward([row()], "cross_entropy")
    training.optim_step(STEP).result()
    expected = training.forward([row()], "cross_entropy").result().metrics
    server.stop()
    restarted = app_of(tmp_path)
    client = client_of(restarted)
    again = client.create_training_client_from_state_with_optimizer(path).result()
    assert again.get_info().lora_rank == 4
    again.forward_backward([row()], "cross_entropy")
    again.optim_step(STEP).result()
    assert again.forward([row()], "cross_entropy").result().metrics == pytest.approx(expected, rel=1e-5)
    assert [run.training_run_id for run in rest_of(restarted).list_training_runs().result().training_runs] == [
        again.model_id, training.model_id,
    ]  # fmt: skip
    client.close("success").result()


# Refusals.


def bare(chunk, **inputs):
    return types.Datum(types.ModelInput(chunks=[chunk]), inputs)


WRONG = [
    ([row()], "nonsense", None, "'nonsense'"),
    ([row()], "cross_entropy", {"clip": 1.0}, "clip"),
    ([row(), row(weights=[1.0, float("nan"), *[1.0] * 17])], "cross_entropy", None, r"data\[1\].*weights\[1\] is nan"),
    ([row(weights=[1.0] * 3)], "cross_entropy", None, r"data\[0\].*\(3,\)"),
    ([row(), row(wieghts=np.ones(19, np.float32))], "cross_entropy", None, r"data\[1\].*wieghts"),
    ([row([5, 6, 10**6])], "cross_entropy", None, r"data\[0\].*1000000"),
    ([row(target_tokens=IDS[2:])], "cross_entropy", None, r"data\[0\].*target_ids is .* .18,.; pass integers .19,."),
    ([bare(types.EncodedTextChunk(tokens=IDS), weights=[1.0] * 20)], "cross_entropy", None, "no target_tokens"),
    (
        [bare(types.ImageChunk(data=png("red"), format="png", expected_tokens=7), target_tokens=[1] * 7)],
        "cross_entropy", None, r"data\[0\].*expects 7 tokens",
    ),
    ([bare(types.ImageChunk(data=b"no image", format="png"), target_tokens=[1])], "cross_entropy", None, r"data\[0\]"),
]  # fmt: skip


@pytest.mark.slow
def test_a_bad_row_or_loss_fails_by_its_place_and_changes_no_gradient(client, training):
    training.forward_backward([row()], "cross_entropy").result()
    for data, loss, config, text in WRONG:
        with pytest.raises(tinker.RequestFailedError, match=text) as failed:
            training.forward_backward(data, loss, config).result()
        assert failed.value.category is types.RequestErrorCategory.User
    norm = training.optim_step(STEP).result().metrics["grad_norm"]
    other = client.create_lora_training_client("tiny", rank=4, seed=1).result()
    other.forward_backward([row()], "cross_entropy").result()
    assert other.optim_step(STEP).result().metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_step_with_parameters_that_adam_has_not_fails_and_the_next_one_has_its_turn(training):
    training.forward_backward([row()], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="beta1"):
        training.optim_step(types.AdamParams(learning_rate=1e-2, beta1=2.0)).result()
    assert training.optim_step(STEP).result().metrics["grad_norm"] > 0  # the gradients are still there


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda message: message.data[0].loss_fn_inputs["weights"].sparse_csr.SetInParent(), "sparse"),
        (lambda message: message.data[0].loss_fn_inputs["target_tokens"].shape.append(2), "shape"),
        (lambda message: setattr(message.data[0].loss_fn_inputs["weights"], "dtype", 0), "dtype 0"),
        (lambda message: setattr(message.data[0].model_input[0].encoded_text, "tokens", b"abc"), "3 bytes"),
        (lambda message: setattr(message.data[0].model_input[0].dmel, "dmel", b"abc"), "dmel"),
    ],
)
def test_a_row_that_cannot_be_read_fails_with_its_place_and_the_next_request_has_its_turn(
    server, training, change, text
):
    message = body_of(training, 1, [row()])
    change(message)
    failed = result_of(server, send(server, message.SerializeToString())).json
    assert failed["category"] == "user"
    assert text in failed["error"]
    answer = send(server, body_of(training, 2, [row()]).SerializeToString())
    assert result_of(server, answer).headers["content-type"] == PROTOBUF


def test_a_request_without_a_number_is_refused(server, training):
    answer = send(server, body_of(training, 0, [row()]).SerializeToString())
    assert answer.status == 400
    assert "seq_id is 0" in answer.json["detail"]
    assert training.forward([row()], "cross_entropy").result().metrics


def _chunked(server, body):
    """The answer to a body that does not tell its size."""
    host, port = server.base_url.removeprefix("http://").split(":")
    head = f"POST /api/v1/optim_step HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body)
        connection.sendall(b"\r\n0\r\n\r\n")
        return connection.recv(1000)


def test_bodies_of_other_forms_are_refused(server, training):
    body = body_of(training, 1, [row()]).SerializeToString()
    assert send(server, b"\xff" * 40).status == 400
    assert send(server, body, Content_Type="application/json").status == 415
    assert send(server, body, Content_Encoding="gzip").status == 415
    assert send(server, body, Content_Encoding="zstd").status == 400
    assert server.post("/api/v1/create_session", b"{").status == 400
    assert send(server, b"\0" * ((1 << 16) + 1)).status == 413
    assert server.post("/api/v1/optim_step", b" " * ((1 << 16) + 1)).status == 413
    assert _chunked(server, b" " * ((1 << 16) + 1)).startswith(b"HTTP/1.1 413")
    cut = send(server, zstandard.ZstdCompressor().compress(body)[:-3], Content_Encoding="zstd")
    assert cut.status == 400
    assert f"of {len(body)} bytes" in cut.json["detail"]


def test_a_compressed_body_is_read_and_a_bomb_is_not(server, training):
    body = body_of(training, 1, [row()]).SerializeToString()
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (64 << 20))
    assert len(bomb) < 1 << 16
    assert send(server, bomb, Content_Encoding="zstd").status == 413
    answer = send(server, zstandard.ZstdCompressor().compress(body), Content_Encoding="zstd")
    result = result_of(server, answer)
    assert result.headers["content-type"] == PROTOBUF
    output = messages.ForwardBackwardOutput.FromString(result.body)
    logprobs = np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, np.float32)
    assert output.metrics["loss:sum"] == pytest.approx(-logprobs.sum(), rel=1e-5)


MODEL = {"base_model": "tiny", "model_seq_id": 900}
NO_LAYERS = {"train_mlp": False, "train_attn": False, "train_unembed": False}
SAMPLE = {"base_model": "tiny", "prompt": {"chunks": []}, "sampling_params": {}}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("create_model", MODEL | {"base_model": "other"}, "'other'"),
        ("create_model", MODEL | {"lora_config": {"rank": 513}}, "rank is 513"),
        ("create_model", MODEL | {"lora_config": {"rank": 4} | NO_LAYERS}, "train_mlp"),
        ("create_model", MODEL | {"optimizer_config": {"type": "dimuon"}}, "'dimuon'"),
        ("create_model", MODEL | {"unknown": 1}, "unknown"),
        ("asample", SAMPLE | {"record_stability_info": True}, "loss_fn=ppo"),  # the default of the recipes
        ("asample", SAMPLE | {"num_samples": 5000}, "num_samples"),
    ],
)
def test_models_and_options_of_sampling_that_are_not_there_are_refused(server, client, path, body, text):
    own = {"session_id": client.holder.get_session_id()} if path == "create_model" else {}
    answer = server.post(f"/api/v1/{path}", own | body)
    assert answer.status == 400
    assert text in answer.json["detail"]


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("tinker://../weights/x", "no checkpoint"),
        ("tinker://a/weights/..", "no checkpoint"),
        ("file:///etc/passwd", "tinker://"),
        ("tinker://a/b", "tinker://"),
    ],
)
def test_a_path_outside_of_the_directory_is_no_checkpoint(client, uri, text):
    with pytest.raises(tinker.RequestFailedError, match=text):
        client.create_training_client_from_state(uri).result()


def test_weights_of_a_sampler_are_no_state_of_training(client, training):
    path = training.save_weights_for_sampler("sampler").result().path
    with pytest.raises(tinker.RequestFailedError, match="this needs weights"):
        client.create_training_client_from_state(path).result()


def test_what_the_service_has_and_this_server_has_not_fails_by_its_name_and_the_next_request_has_its_turn(training):
    for call, text in [
        (lambda: training.save_weights_and_get_sampling_client(kind="inflight"), "kind is 'inflight'"),
        (lambda: training.optim_step(types.DimuonParams(learning_rate=1e-3)), "AdamW"),
    ]:
        with pytest.raises(tinker.RequestFailedError, match=text):
            call().result()
    assert training.forward([row()], "cross_entropy").result().metrics


# Users and limits.


@pytest.mark.slow
def test_users_see_only_their_own_models_and_checkpoints(app_of, tmp_path):
    server = app_of(tmp_path, keys=("tml-one", "tml-two"))
    assert server.get("/api/v1/get_server_capabilities").status == 401
    assert server.get("/api/v1/healthz").json == {"status": "ok"}  # of programs that wait for a server
    one, two = client_of(server, "tml-one"), client_of(server, "tml-two")
    training = one.create_lora_training_client("tiny", rank=4).result()
    path = training.save_state("mine").result().path
    headers = {"X-API-Key": "tml-two", "Content-Type": PROTOBUF}
    answer = server.post("/api/v1/forward_backward", body_of(training, 2, [row()]).SerializeToString(), headers)
    assert answer.status == 404
    assert training.model_id in answer.json["detail"]
    with pytest.raises(tinker.RequestFailedError, match="no checkpoint"):
        two.create_training_client_from_state(path).result()
    assert rest_of(server, "tml-two").list_training_runs().result().training_runs == []
    assert len(rest_of(server, "tml-one").list_training_runs().result().training_runs) == 1
    for each in (one, two):
        each.close("success").result()
    server.stop()
    restarted = app_of(tmp_path, keys=("tml-three", "tml-one"))  # another place in the file
    runs = {
        key: rest_of(restarted, key).list_training_runs().result().training_runs for key in ("tml-three", "tml-one")
    }
    assert [len(each) for each in runs.values()] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("files", [[], ["config.json"], ["tokenizer.json"]])
def test_a_directory_without_a_model_is_an_error_before_torch_is_imported(tmp_path, files):
    for file in files:
        (tmp_path / file).write_text("{}")
    code = "import sys; sys.modules['torch'] = None; from rollouts.cli.main import main; main()"
    command = [sys.executable, "-c", code, "tinker", "--model", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert f"error: --model: {tmp_path} has no " in ran.stderr


@pytest.mark.slow
async def test_a_session_that_ends_leaves_no_request_behind(app_of):
    server = app_of(limits=Limits(pending=3))
    for _ in range(3):  # each of them leaves what no client fetches
        client = client_of(server)
        training = client.create_lora_training_client("tiny", rank=4).result()
        sampling = training.save_weights_and_get_sampling_client().result()
        sampling.sample(types.ModelInput.from_ints(IDS), 1, types.SamplingParams(max_tokens=1)).result()
        client.close("success").result()


def test_a_client_that_asks_for_a_result_keeps_its_session(app_of, monkeypatch):
    """Also one that sends no heartbeat; one that asks for nothing is over."""
    passed = 0.0
    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed))
    server = app_of()
    sessions = [server.post("/api/v1/create_session", SESSION).json["session_id"] for _ in range(3)]
    asked = [f"{sessions[0]}:train:0-begin", f"{sessions[1]}:sample:0/1"]
    for _ in range(2):
        passed += 600.0
        for request_id in asked:
            server.post("/api/v1/retrieve_future", {"request_id": request_id})
    server.post("/api/v1/create_session", SESSION)
    statuses = [server.post("/api/v1/session_heartbeat", {"session_id": each}).status for each in sessions]
    assert statuses == [200, 200, 404]


@pytest.mark.parametrize(
    ("route", "method", "overwrite"),
    [
        ("save_weights", "save", False),
        ("save_weights", "save", True),
        ("save_weights_for_sampler", "save_for_sampler", False),
    ],
)
def test_a_save_that_runs_when_the_server_is_stopped_is_a_checkpoint(
    app_of, tmp_path, monkeypatch, route, method, overwrite
):
    began, go_on, save, close = threading.Event(), threading.Event(), getattr(Trainer, method), Futures.close
    server = app_of(tmp_path)
    model = client_of(server).create_lora_training_client("tiny", rank=4).result().model_id
    body = {"model_id": model, "path": "a", "user_metadata": {"which": "first"}}
    if overwrite:
        assert "path" in result_of(server, server.post(f"/api/v1/{route}", body | {"seq_id": 1})).json
        body |= {"overwrite": True}

    def saved(*args):
        began.set()
        assert go_on.wait(60)
        save(*args)

    async def closed(self):
        asyncio.get_running_loop().call_later(0.1, go_on.set)  # what runs is cancelled by then
        await close(self)

    monkeypatch.setattr(Trainer, method, saved)
    monkeypatch.setattr(Futures, "close", closed)
    server.post(f"/api/v1/{route}", body | {"seq_id": 2 if overwrite else 1, "user_metadata": {"which": "last"}})
    assert began.wait(60)
    server.stop()
    (found,) = RunDirectory(tmp_path).all_checkpoints()
    assert found.user_metadata == {"which": "last"}


def test_sessions_and_models_are_limited(app_of):
    server = app_of(limits=Limits(sessions=1, models=1))
    client = client_of(server)
    client.create_lora_training_client("tiny", rank=4).result()
    refused = server.post("/api/v1/create_session", SESSION)
    assert refused.status == 429
    for text in ("ServiceClient.close", "idle 15 min", "--max-sessions"):
        assert text in refused.json["detail"]
    with pytest.raises(tinker.RequestFailedError, match=r"1 models are .*ServiceClient\.close.*--max-models"):
        client.create_lora_training_client("tiny", rank=4).result()
    client.close("success").result()
    client = client_of(server)  # what the error says helps
    client.create_lora_training_client("tiny", rank=4).result()
    client.close("success").result()


# Futures and turns.


async def test_what_idle_sessions_hold_is_released_again_after_any_error(monkeypatch, caplog):
    monkeypatch.setattr(app_module, "_TIDY_SECONDS", 0.0)
    again, times = asyncio.Event(), []

    async def tidy():
        times.append(None)
        if len(times) == 1:
            raise TypeError("of one service")
        again.set()

    tidying = asyncio.create_task(app_module._tidy([SimpleNamespace(tidy=tidy)]))
    await asyncio.wait_for(again.wait(), 60)
    tidying.cancel()
    assert "of one service" in caplog.text


@pytest.mark.slow
def test_a_client_that_was_killed_keeps_nobody_waiting_and_its_samples_end(app_of, monkeypatch):
    monkeypatch.setattr(app_module, "_TIDY_SECONDS", 0.05)
    server, began, ended = app_of(), threading.Event(), threading.Event()
    client, run, sizes = client_of(server), Batch.run, []

    def noted(self, version):
        if len(self._samples) == 64:
            began.set()
        results = run(self, version)
        if len(self._samples) == 64:
            sizes.extend(len(each.token_ids) for result in results for each in result.completions)
            ended.set()
        return results

    monkeypatch.setattr(Batch, "run", noted)
    sampling_id = sampling_session(server)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS}]}
    body = {"sampling_session_id": sampling_id, "seq_id": 0, "num_samples": 64, "prompt": prompt}
    request_id = server.post("/api/v1/asample", body | {"sampling_params": {"max_tokens": 4000}}).json["request_id"]
    asked = json.dumps({"request_id": request_id}).encode()
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(asked)}\r\n"
    killed = socket.create_connection(("127.0.0.1", int(server.base_url.rpartition(":")[2])))
    killed.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + asked)
    assert began.wait(60)
    sampling = client.create_sampling_client(base_model="tiny").result()
    params = types.SamplingParams(max_tokens=2)
    assert len(sampling.sample(types.ModelInput.from_ints(IDS), 1, params).result().sequences[0].tokens) == 2
    assert not ended.is_set()
    monkeypatch.setattr(futures_module, "UNASKED_SECONDS", 0.5)
    killed.close()
    assert ended.wait(60)
    assert max(sizes) < 4000
    assert sampling.sample(types.ModelInput.from_ints(IDS), 1, params).result().sequences
    client.close("success").result()


def test_weights_that_a_client_saves_last_are_saved_though_it_has_ended_meanwhile(app_of, tmp_path, monkeypatch):
    passed, began, go_on, saved = 0.0, threading.Event(), threading.Event(), threading.Event()
    compute, save = Trainer.forward_backward, Trainer.save

    def forward_backward(*args, **options):
        began.set()
        assert go_on.wait(60)
        return compute(*args, **options)

    def noted(*args):
        save(*args)
        saved.set()

    for module in (service_module, model_requests):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed))
    monkeypatch.setattr(Trainer, "forward_backward", forward_backward)
    monkeypatch.setattr(Trainer, "save", noted)
    server = app_of(tmp_path)
    session = server.post("/api/v1/create_session", SESSION).json["session_id"]
    body = {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 4}}
    model = SimpleNamespace(model_id=server.post("/api/v1/create_model", body).json["model_id"])
    result_of(server, SimpleNamespace(json={"request_id": f"{model.model_id}-begin"}))
    for number in (1, 2):
        send(server, body_of(model, number, [row()]).SerializeToString())
    server.post("/api/v1/save_weights", {"model_id": model.model_id, "path": "last", "seq_id": 3})
    assert began.wait(60)
    passed = 300.0  # the session is kept for as long
    go_on.set()
    assert saved.wait(30)


def test_a_session_with_many_requests_leaves_room_for_another(app_of, monkeypatch):
    server, go_on = app_of(limits=Limits(pending=8)), asyncio.Event()
    monkeypatch.setattr(LocalSampler, "sample", lambda *args, **options: go_on.wait())
    accepted = []
    for _ in range(2):
        body = {"sampling_session_id": sampling_session(server), "prompt": {"chunks": []}, "sampling_params": {}}
        statuses = [server.post("/api/v1/asample", body | {"seq_id": number}).status for number in range(8)]
        accepted.append(statuses.index(429))
        assert {*statuses[accepted[-1] :]} == {429}
    assert accepted == [4, 2]


def _sampling_bodies(server):
    """What a session and a client without one send, as often as they like."""
    common = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": IDS}]}, "sampling_params": {"max_tokens": 1}}
    return common | {"sampling_session_id": sampling_session(server)}, common | {"base_model": "tiny"}


def test_cancelled_requests_and_results_that_nobody_fetches_leave_room_for_others(app_of, monkeypatch):
    monkeypatch.setattr(app_module, "_TIDY_SECONDS", 0.05)
    server = app_of(limits=Limits(pending=4))
    for body in _sampling_bodies(server):
        monkeypatch.setattr(futures_module, "UNASKED_RESULT_SECONDS", 900.0)
        for number in range(8):
            answer = server.post("/api/v1/asample", body | {"seq_id": number})
            assert answer.status == 200, answer.json
            server.post("/api/v1/cancel_future", {"request_id": answer.json["request_id"]})
        monkeypatch.setattr(futures_module, "UNASKED_RESULT_SECONDS", 0.0)
        for number in range(8, 16):
            while server.post("/api/v1/asample", body | {"seq_id": number}).status == 429:
                pass


async def test_results_that_were_fetched_are_kept_within_a_bound(monkeypatch):
    monkeypatch.setattr(futures_module, "KEPT_BYTES", 250)
    futures = Futures()

    async def work():
        return b"x" * 100

    for name in "abc":
        futures.submit(name, work)
    for name in "abc":
        await futures.result(name, 60.0)
    with pytest.raises(RequestError, match="'a'"):
        await futures.result("a", 60.0)
    assert await futures.result("c", 60.0) == b"x" * 100


def _fails_in_the_client(training):
    with pytest.raises(ValueError, match="path"):
        training.save_state(120).result()


def _fails_in_the_client_twice(training):
    with pytest.raises(ValueError, match="ttl_seconds"):
        training.save_weights_for_sampler("a", ttl_seconds="soon").result()
    _fails_in_the_client(training)


def _is_too_large(training):
    with pytest.raises(tinker.APIStatusError, match="65536"):
        training.forward_backward([row([*IDS] * 400)], "cross_entropy").result()


@pytest.mark.parametrize("mistake", [_fails_in_the_client, _fails_in_the_client_twice, _is_too_large])
def test_a_model_is_saved_after_a_request_that_the_client_counted_and_the_server_never_read(
    training, monkeypatch, mistake
):
    monkeypatch.setattr(turns_module, "GAP_SECONDS", 0.05)
    training.forward_backward([row()], "cross_entropy").result()
    mistake(training)
    assert training.optim_step(STEP).result().metrics["grad_norm"] > 0
    assert training.save_state("after").result().path.endswith("/after")


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("save_weights", {"field_of_a_later_client": 1}),
        ("save_weights_for_sampler", {"ttl_seconds": "soon"}),
        ("optim_step", {"adam_params": {"learning_rate": float("nan")}}),  # which is no JSON
        ("load_weights", {"path": None}),
    ],
)
def test_a_refused_body_has_the_turn_that_the_client_has_counted(server, training, path, wrong):
    answer = server.post(f"/api/v1/{path}", {"model_id": training.model_id, "seq_id": 1} | wrong)
    assert result_of(server, answer).json["category"] == "user"
    answer = send(server, body_of(training, 2, [row()]).SerializeToString())
    assert result_of(server, answer).headers["content-type"] == PROTOBUF


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"model_id": 1, "seq_id": 1}', b'{"model_id": "a", "seq_id": "x"}'])
def test_a_refused_body_without_a_model_and_a_number_is_refused_at_once(server, body):
    assert server.post("/api/v1/save_weights", body).status == 400


def test_errors_are_json_with_the_reason(server):
    answer = server.get("/api/v1/nothing")
    assert answer.status == 404
    assert "no route" in json.loads(answer.body)["detail"]


# What clients may send by mistake.


@pytest.mark.slow
def test_models_that_are_begun_together_are_limited_together(app_of):
    server = app_of(limits=Limits(models=2))
    client = client_of(server)
    futures = [client.create_lora_training_client("tiny", rank=4) for _ in range(6)]
    refused = []
    for future in futures:
        try:
            future.result()
        except tinker.RequestFailedError as error:
            refused.append(str(error))
    assert len(refused) == 4
    assert all("2 models are being trained" in error for error in refused)
    client.close("success").result()


def test_a_model_whose_session_ends_while_it_is_made_gives_its_place_back(app_of, monkeypatch):
    server = app_of(limits=Limits(models=1))
    session_id = server.post("/api/v1/create_session", SESSION).json["session_id"]
    created, ended = Trainer.create_model, threading.Event()

    def create_model(*args, **options):
        assert ended.wait(60)
        created(*args, **options)

    monkeypatch.setattr(Trainer, "create_model", create_model)
    body = {"session_id": session_id, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 4}}
    answer = server.post("/api/v1/create_model", body)
    server.post(f"/api/v1/sessions/{session_id}/finish", {"reason": {"type": "success"}})
    while server.get(f"/api/v1/sessions/{session_id}").status == 200:
        pass
    ended.set()
    assert "there is no session" in result_of(server, answer).json["error"]
    client = client_of(server)
    client.create_lora_training_client("tiny", rank=4).result()
    client.close("success").result()


def test_metadata_that_is_no_unicode_is_listed_and_large_metadata_is_refused(app_of):
    server = app_of(max_body_bytes=1 << 18)
    answer = server.post("/api/v1/create_session", SESSION | {"user_metadata": {"a": "\ud800"}})
    listed = server.get(f"/api/v1/sessions/{answer.json['session_id']}").json
    assert listed["user_metadata"] == {"a": r"\ud800"}
    answer = server.post("/api/v1/create_session", SESSION | {"user_metadata": {"a": "b" * 2**16}})
    assert answer.status == 400
    assert "65537 characters" in answer.json["detail"]


@pytest.mark.slow
def test_the_last_tokens_of_a_prompt_are_scored_alone(client, server):
    sampling = client.create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints(IDS[:6])
    params = types.SamplingParams(max_tokens=1)
    options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    whole = sampling.sample(prompt, 1, params, **options).result()
    last = sampling.sample(prompt, 1, params, **options, prompt_logprobs_last_n=2).result()
    assert last.prompt_logprobs == [None] * 4 + whole.prompt_logprobs[4:]
    assert last.topk_prompt_logprobs == [None] * 4 + whole.topk_prompt_logprobs[4:]
    with pytest.raises(tinker.RequestFailedError, match="pass 1 to 5"):
        sampling.sample(prompt, 1, params, **options, prompt_logprobs_last_n=6).result()


@pytest.mark.slow
def test_extreme_options_of_sampling_are_taken_or_are_errors_of_the_user(server):
    body = {"base_model": "tiny", "prompt": {"chunks": [{"type": "encoded_text", "tokens": IDS[:3]}]}}

    def sampled(**params):
        return result_of(server, server.post("/api/v1/asample", body | {"sampling_params": {"max_tokens": 2} | params}))

    assert sampled(top_k=2**70).headers["content-type"] == PROTOBUF
    assert sampled(stop=["\ud800"]).json["category"] == "user"


@pytest.mark.slow
def test_a_client_that_goes_away_while_it_sends_is_no_failure_of_the_server(server, caplog):
    host, port = server.base_url.removeprefix("http://").split(":")
    head = f"POST /api/v1/asample HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        assert server.get("/api/v1/healthz").status == 200  # the server has read the head by then
    assert server.get("/api/v1/healthz").status == 200
    assert not caplog.records
