"""New weights for `rollouts serve`: adapters and tensors of a trainer, while episodes run; refusals and failures."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import tempfile
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_scores import difference
from gallery_runs import Gallery, mismatches, reference_model, samples_of
from make_adapter import make_adapter, merged_checkpoint
from safetensors.torch import load_file, save_file
from served_in_thread import serve_directory
from served_process import served_process
from test_served_engine import TEXT, image_messages, request_of

from renderers.installation import install_command
from rollouts import SamplingParams
from rollouts.engines.lora import LoRAEngine
from rollouts.engines.vllm import HttpLimits, VLLMEngine
from rollouts.engines.vllm.transfer import FileSender, IPCSender, NCCLSender, TransferEngine, update_info
from rollouts.errors import CapabilityError, ServerError, UnknownAdapterError, WeightUpdateError
from rollouts.runner import Asynchronous, EpisodeLimits, Runner, Task
from rollouts.serve.app import create_app
from rollouts.serve.pausable_engine import PausableEngine
from rollouts.serve.served_model import served_model
from rollouts.testing import tiny_qwen3_vl

EPISODES, TURNS, TOKENS = 3, 2, 200
SECONDS = 120
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return [tiny_qwen3_vl(root / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def adapters(checkpoints, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(root / str(seed), checkpoints[0], seed=seed) for seed in (1, 2)]


@pytest.fixture
def server(checkpoints):
    with serve_directory(checkpoints[0], name="tiny") as server:
        yield server


@pytest.fixture
async def engine(server):
    async with VLLMEngine(server.base_url) as engine:
        yield engine


@pytest.fixture
def request_for(renderer):
    return lambda messages=TEXT, adapter=None, **sampling: replace(
        request_of(renderer, messages, **sampling), adapter=adapter
    )


def tensors_of(checkpoint):
    return {name: tensor for path in checkpoint.glob("*.safetensors") for name, tensor in load_file(path).items()}


def versions(completion):
    return [span.version for span in completion.weight_spans]


@asynccontextmanager
async def episodes(policy, engine, renderer):
    """A runner, and the groups that it collects, once all of its requests are in the server."""
    runner = Runner(
        lambda task: Gallery(task, TURNS),
        policy,
        renderer,
        sampling=SamplingParams(max_tokens=TOKENS, extra={"ignore_eos": True}),
        limits=EpisodeLimits(max_turns=TURNS),
        mode=Asynchronous(1),
        tasks=[Task(str(number), number) for number in range(EPISODES)],
    )
    async with runner:
        collecting = asyncio.ensure_future(runner.collect(EPISODES))
        while (await engine.control.metrics()).running < EPISODES:
            assert not collecting.done()
        yield runner, collecting


@pytest.mark.slow
async def test_episodes_continue_with_the_next_adapter_and_every_span_is_of_its_own(
    engine, renderer, checkpoints, adapters, tmp_path
):
    policy = LoRAEngine(engine, "policy")
    await policy.update_weights(adapters[0], "policy@1")
    async with episodes(policy, engine, renderer) as (runner, collecting):
        await runner.update_weights(adapters[1], "policy@2", "abort")
        groups = await asyncio.wait_for(collecting, SECONDS)
    assert list(await engine.adapters()) == ["policy@2"]
    samples = samples_of(groups, checkpoints[0], episodes=EPISODES, turns=TURNS)
    for name, adapter in zip(("policy@1", "policy@2"), adapters, strict=True):
        model = reference_model(merged_checkpoint(tmp_path / name, checkpoints[0], adapter))
        found = mismatches(model, samples, name)
        assert found.size
        assert found.max() < 1e-4
    assert {span.version for sample in samples for span in sample.weight_spans} == {"policy@1", "policy@2"}


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["abort", "wait", "keep"])
async def test_episodes_continue_with_the_tensors_that_the_trainer_sends(engine, renderer, checkpoints, in_flight):
    transfer = TransferEngine(engine, FileSender(), bucket_bytes=30_000)
    async with episodes(transfer, engine, renderer) as (runner, collecting):
        await runner.update_weights(tensors_of(checkpoints[1]), "new", in_flight)
        assert await engine.control.weight_version() == "new"
        groups = await asyncio.wait_for(collecting, SECONDS)
    samples = samples_of(groups, checkpoints[0], episodes=EPISODES, turns=TURNS)
    for version, checkpoint in zip(("default", "new"), checkpoints, strict=True):
        found = mismatches(reference_model(checkpoint), samples, version)
        assert found.size
        assert found.max() < 1e-4
    await transfer.close()


# Adapters.


@pytest.mark.slow
async def test_adapters_and_the_model_sample_at_once_and_streamed(engine, request_for, checkpoints, adapters):
    for name, directory in zip("ab", adapters, strict=True):
        await engine.load_adapter(name, directory)
    by_name = {"a": adapters[0], "b": adapters[1], None: None}
    requests = [request_for(messages, name) for name in by_name for messages in (TEXT, image_messages(0))]
    whole = await asyncio.gather(*(engine.generate(each) for each in requests))
    deltas = []
    streamed = await asyncio.gather(
        *(engine.generate_streamed(replace(each, request_id=f"s{i}"), deltas.append) for i, each in enumerate(requests))
    )
    for request, result, stream in zip(requests, whole, streamed, strict=True):
        (completion,), (other,) = result.completions, stream.completions
        assert difference(checkpoints[0], by_name[request.adapter], request, completion) < 1e-5
        assert versions(completion) == versions(other) == [request.adapter or "default"]
        assert completion.token_ids.tolist() == other.token_ids.tolist()
    await engine.update_weights(checkpoints[1], "v1")
    (completion,) = (await engine.generate(request_for(adapter="a"))).completions
    assert versions(completion) == ["a on v1"]
    assert difference(checkpoints[1], adapters[0], request_for(), completion) < 1e-5
    assert engine.weight_version == "v1"


@pytest.mark.slow
def test_requests_about_adapters_get_the_responses_of_vllm(server, adapters, tmp_path):
    """Status, type and text as vLLM 0.32 gave them."""

    def check(path, body, status, kind=None, text=""):
        answer = server.post(path, body)
        assert answer.status == status
        if kind is None:
            assert answer.body.decode() == text
        else:
            assert answer.json["error"]["type"] == kind
            assert text in answer.json["error"]["message"]

    good, generate = str(adapters[0]), "/inference/v1/generate"
    tokens = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1}}
    check(LOAD, {"lora_name": "x"}, 400, "Bad Request", "body.lora_path")
    check(UNLOAD, {}, 400, "Bad Request", "body.lora_name")
    check(LOAD, {"lora_name": "x", "lora_path": ""}, 400, "InvalidUserInput", "Both 'lora_name' and 'lora_path'")
    check(UNLOAD, {"lora_name": ""}, 400, "InvalidUserInput", "'lora_name' needs to be provided")
    absent = "Loading lora x failed: No adapter found for"
    for path, place in ((tmp_path, "<path>"), ("some/repo", "some/repo"), ("\0", "\0")):
        check(LOAD, {"lora_name": "x", "lora_path": str(path)}, 404, "NotFoundError", f"{absent} {place}")
    conflict = "The lora adapter 'tiny' conflicts with a served base model."
    check(LOAD, {"lora_name": "tiny", "lora_path": good}, 400, "InvalidUserInput", conflict)
    check(UNLOAD, {"lora_name": "tiny"}, 404, "NotFoundError", "The lora adapter 'tiny' cannot be found.")
    check(LOAD, {"lora_name": "a", "lora_path": good}, 200, None, "Success: LoRA adapter 'a' added successfully.")
    twice = "The lora adapter 'a' has already been loaded."
    check(LOAD, {"lora_name": "a", "lora_path": good}, 400, "InvalidUserInput", twice)
    check(LOAD, {"lora_name": "b", "lora_path": good, "load_inplace": True}, 400, "InvalidUserInput", "another name")
    check(LOAD, {"lora_name": "a b", "lora_path": good}, 400, "InvalidUserInput", "printable ASCII")
    cards = {card["id"]: card for card in server.get("/v1/models").json["data"]}
    assert (cards["a"]["parent"], cards["a"]["root"], cards["a"]["max_model_len"]) == ("tiny", good, None)
    assert cards["tiny"]["parent"] is None
    of_adapter = server.post(generate, {**tokens, "model": "a"}).json
    assert of_adapter["model"] == "a"
    assert [span["version"] for span in of_adapter["choices"][0]["weight_versions"]] == ["default"]
    assert server.post("/tokenize", {"model": "a", "prompt": "x"}).status == 200
    messages = [{"role": "user", "content": "hi"}]
    assert server.post("/v1/chat/completions/render", {"model": "a", "messages": messages}).status == 200
    removed = "Success: LoRA adapter 'a' removed successfully."
    check(UNLOAD, {"lora_name": "a"}, 200, None, removed)
    for body in ({**tokens, "model": "a"}, {**tokens, "model": "nope"}):
        check(generate, body, 404, "NotFoundError", f"The model `{body['model']}` does not exist. Valid aliases: tiny.")
    check(UNLOAD, {"lora_name": "a"}, 404, "NotFoundError", "The lora adapter 'a' cannot be found.")


@pytest.mark.slow
async def test_an_adapter_that_the_model_cannot_use_is_refused_and_the_others_go_on(
    engine, request_for, checkpoints, adapters, tmp_path
):
    await engine.load_adapter("good", adapters[0])
    broken = shutil.copytree(adapters[1], tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(WeightUpdateError, match="no complete safetensors file"):
        await engine.load_adapter("broken", broken)
    pickled = shutil.copytree(adapters[1], tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").unlink()
    torch.save({"weight": torch.zeros(1)}, pickled / "adapter_model.bin")
    with pytest.raises(WeightUpdateError, match=r"lacks adapter_model\.safetensors"):
        await engine.load_adapter("pickled", pickled)
    assert list(await engine.adapters()) == ["good"]
    (completion,) = (await engine.generate(request_for(adapter="good"))).completions
    assert difference(checkpoints[0], adapters[0], request_for(), completion) < 1e-5
    with pytest.raises(UnknownAdapterError, match="loaded: 'good'"):
        await engine.generate(request_for(adapter="broken"))


@pytest.mark.slow
async def test_a_server_without_peft_or_without_control_says_how_to_get_adapters(
    engine, checkpoints, adapters, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "peft", None)
        with pytest.raises(WeightUpdateError, match=re.escape(install_command("lora"))):
            await engine.load_adapter("a", adapters[0])
    with serve_directory(checkpoints[0], name="tiny", control=False) as closed:
        async with VLLMEngine(closed.base_url) as other:
            with pytest.raises(CapabilityError, match="without --no-control"):
                await other.load_adapter("a", adapters[0])
            with pytest.raises(CapabilityError, match="VLLM_SERVER_DEV_MODE"):
                await TransferEngine(other, FileSender()).update_weights(tensors_of(checkpoints[1]), "new")


@pytest.mark.slow
async def test_an_adapter_of_requests_that_a_pause_holds_is_not_unloaded(engine, server, request_for, adapters):
    await engine.load_adapter("a", adapters[0])
    begun = asyncio.Event()
    request = request_for(adapter="a", max_tokens=400, extra={"ignore_eos": True})
    task = asyncio.ensure_future(engine.generate_streamed(request, lambda delta: begun.set()))
    await asyncio.wait_for(begun.wait(), SECONDS)
    await engine.control.pause("keep")
    answer = await asyncio.to_thread(server.post, UNLOAD, {"lora_name": "a"})
    assert (answer.status, answer.json["error"]["type"]) == (400, "InvalidUserInput")
    await engine.control.resume()
    answer = await asyncio.to_thread(server.post, UNLOAD, {"lora_name": "a"})  # waits for the request
    assert answer.status == 200
    (completion,) = (await asyncio.wait_for(task, SECONDS)).completions
    assert (versions(completion), len(completion.token_ids)) == (["a"], 400)


# Tensors.


@pytest.mark.slow
async def test_a_transfer_that_fails_leaves_a_server_that_samples_and_takes_the_next_one(
    engine, request_for, checkpoints
):
    transfer = TransferEngine(engine, FileSender())
    old, new = (tensors_of(checkpoint) for checkpoint in checkpoints)
    await transfer.update_weights(old, "first")
    with pytest.raises(WeightUpdateError, match="The server has the weights of before"):
        await transfer.update_weights(dict(list(new.items())[3:]), "partial")
    (completion,) = (await asyncio.wait_for(engine.generate(request_for()), SECONDS)).completions
    assert versions(completion) == ["first"]
    assert difference(checkpoints[0], None, request_for(), completion) < 1e-5
    await transfer.update_weights(new, "second")
    (completion,) = (await asyncio.wait_for(engine.generate(request_for()), SECONDS)).completions
    assert versions(completion) == ["second"]
    assert difference(checkpoints[1], None, request_for(), completion) < 1e-5
    await transfer.close()


@pytest.mark.slow
@pytest.mark.parametrize("head", ["left out", "sent too"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_the_output_layer_is_tied_again_whether_it_is_sent_or_not(
    engine, request_for, checkpoints, head, dtype, tmp_path
):
    tensors = {name: value.to(dtype) for name, value in tensors_of(checkpoints[1]).items()}
    sent = shutil.copytree(checkpoints[1], tmp_path / "sent")  # in this dtype
    save_file(tensors, sent / "model.safetensors", metadata={"format": "pt"})
    if head == "sent too":
        tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"]  # one tensor, as in a trainer
    transfer = TransferEngine(engine, FileSender())
    await transfer.update_weights(tensors, "new")
    (completion,) = (await engine.generate(request_for(image_messages(0)))).completions
    assert difference(sent, None, request_for(image_messages(0)), completion) < 1e-5
    assert versions(completion) == ["new"]
    await transfer.close()


class FailingSender(FileSender):
    """Spoils the file of one bucket."""

    def __init__(self, spoil, number=1):
        super().__init__()
        self._spoil, self._left = spoil, number

    def update_info(self, bucket):
        info = dict(super().update_info(bucket))
        self._left -= 1
        return self._spoil(info) if self._left == -1 else info


def cut_off(info):
    os.truncate(info["path"], 100)
    return info


def enlarged(info):
    os.truncate(info["path"], 2**30)  # sparse
    return info


def renamed(info):
    return {**info, "names": [*info["names"][:-1], "other"]}


def pickled(info):
    path = tempfile.mkdtemp() + "/weights.safetensors"
    torch.save({"a": torch.zeros(1)}, path)
    return {**info, "path": path}


def pipe(info):
    path = tempfile.mkdtemp() + "/pipe"
    os.mkfifo(path)
    return {**info, "path": path}


SPOILED = {
    "a file that is cut off": (cut_off, "is no safetensors file"),
    "a file of more bytes than its tensors": (enlarged, "bytes, its tensors need"),
    "a pickle": (pickled, "is no safetensors file"),
    "a pipe": (pipe, "is not the absolute path of a file"),
    "a device": (lambda info: {**info, "path": "/dev/zero"}, "is not the absolute path of a file"),
    "a directory": (lambda info: {**info, "path": "/"}, "cannot be read|not the absolute path of a file"),
    "a relative path": (lambda info: {**info, "path": "pyproject.toml"}, "absolute path|cannot be read"),
    "no such file": (lambda info: {**info, "path": "/nothing"}, "cannot be read"),
    "no file": (lambda info: {key: value for key, value in info.items() if key != "path"}, "FileSender"),
    "handles of CUDA": (lambda info: {"ipc_handles_pickled": "gASVAA=="}, "FileSender"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", SPOILED)
async def test_a_bucket_that_cannot_be_read_leaves_the_weights_of_before(engine, request_for, checkpoints, fault):
    spoil, reason = SPOILED[fault]
    before = (await engine.generate(request_for())).completions[0]
    transfer = TransferEngine(engine, FailingSender(spoil), bucket_bytes=30_000)
    with pytest.raises(WeightUpdateError, match=rf"({reason})(.|\n)*were loaded again; the server runs with them"):
        await transfer.update_weights(tensors_of(checkpoints[1]), "new")
    after = (await engine.generate(request_for())).completions[0]
    assert after.logprobs.tolist() == before.logprobs.tolist()
    assert versions(after) == ["default"]
    await transfer.update_weights(tensors_of(checkpoints[1]), "new")
    (completion,) = (await engine.generate(request_for())).completions
    assert difference(checkpoints[1], None, request_for(), completion) < 1e-5


@pytest.mark.slow
async def test_a_transfer_given_up_when_all_tensors_have_come_leaves_the_weights_of_before(
    engine, request_for, checkpoints
):
    """As where another server of the fleet fails at the last bucket."""
    await TransferEngine(engine, FileSender()).update_weights(tensors_of(checkpoints[0]), "old")
    control, sender, bucket = engine.control, FileSender(), list(tensors_of(checkpoints[1]).items())
    await control.init_weight_transfer(sender.init_info(0, 1))
    begun = await control.begin_transfer("abort")
    await control.receive_weights(update_info(bucket) | dict(sender.update_info(bucket)))
    with pytest.raises(WeightUpdateError, match="The server has the weights of before"):
        await control.abandon_transfer(begun, ConnectionError("another server"))
    (completion,) = (await engine.generate(request_for())).completions
    assert versions(completion) == ["old"]
    assert difference(checkpoints[0], None, request_for(), completion) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
async def test_a_transfer_with_values_that_are_no_numbers_leaves_the_weights_of_before(
    engine, request_for, checkpoints, value
):
    before = (await engine.generate(request_for())).completions[0]
    tensors = tensors_of(checkpoints[1])
    next(iter(tensors.values()))[0] = value
    with pytest.raises(WeightUpdateError, match="NaN or infinite"):
        await TransferEngine(engine, FileSender()).update_weights(tensors, "new")
    after = (await engine.generate(request_for())).completions[0]
    assert after.logprobs.tolist() == before.logprobs.tolist()


@pytest.mark.slow
def test_a_transfer_takes_vllms_calls_in_vllms_order_and_changes_nothing_before_its_end(server, checkpoints, tmp_path):
    """Status and text as vLLM 0.32 gave them; raw calls, to a server that is not paused."""
    tokens = {"token_ids": [5, 6, 7, 8], "sampling_params": {"max_tokens": 4, "temperature": 0, "logprobs": 0}}

    def sampled():
        (choice,) = server.post("/inference/v1/generate", tokens).json["choices"]
        return [each["logprob"] for each in choice["logprobs"]["content"]], choice["weight_versions"][0]["version"]

    def check(path, body, status, text):
        answer = server.post(path, body)
        assert (answer.status, text in answer.body.decode()) == (status, True), answer.body

    def bucket(part):
        save_file(part, tmp_path / "bucket.safetensors")
        names = list(part)
        dtypes = [str(part[name].dtype).removeprefix("torch.") for name in names]
        shapes = [list(part[name].shape) for name in names]
        path = str(tmp_path / "bucket.safetensors")
        return {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes, "path": path}}

    before = sampled()
    tensors = tensors_of(checkpoints[1])
    first, second = (dict(list(tensors.items())[part]) for part in (slice(30), slice(30, None)))
    no_start = "finish_weight_update called without a matching start_weight_update."
    check("/shutdown_weight_transfer_engine", None, 200, "Weight transfer shut down")
    check(FINISH, None, 500, no_start)
    check(UPDATE, bucket(first), 500, "start_weight_update must be called before update_weights.")
    check("/init_weight_transfer_engine", {"init_info": {}}, 200, "Weight transfer initialized")
    check(START, None, 200, "Weight update started")
    check(START, None, 500, "already active")
    check("/shutdown_weight_transfer_engine", None, 500, "active")
    check(UPDATE, {"update_info": {}}, 500, "Invalid update_info")
    check(FINISH, None, 500, no_start)  # the failed call has ended it
    check(START, None, 200, "Weight update started")
    check(UPDATE, bucket(first), 200, "Weights updated")
    check(UPDATE, bucket(first), 500, "comes twice")
    check(START, None, 200, "Weight update started")
    check(UPDATE, bucket(first), 200, "Weights updated")
    check(FINISH, {"weight_version": 3}, 400, "body.weight_version")
    check(FINISH, {"weight_version": "half"}, 500, "were not sent")
    check(START, None, 200, "Weight update started")
    check("/init_weight_transfer_engine", {"init_info": {}}, 200, "")  # of a trainer that takes the place of another
    check(FINISH, None, 500, no_start)
    check(START, None, 200, "Weight update started")
    check(UPDATE, bucket(first), 200, "Weights updated")
    assert sampled() == before
    check(UPDATE, bucket(second), 200, "Weights updated")
    assert sampled() == before
    check(FINISH, {"weight_version": "whole"}, 200, "Weight update finished")
    after, version = sampled()
    assert version == "whole"
    assert after != before[0]


async def test_senders_of_other_transports_are_refused_with_the_one_that_the_server_has(engine, checkpoints):
    # Before the trainer opens a store in which it would wait for the server.
    with pytest.raises(ServerError, match="FileSender"):
        await engine.control.init_weight_transfer(NCCLSender("127.0.0.1", 29500).init_info(0, 1))
    await engine.control.init_weight_transfer(IPCSender().init_info(0, 1))  # tells nothing of itself
    assert not await engine.control.is_paused()


TRAINER = """
import asyncio, os, sys
from safetensors.torch import load_file
from rollouts.engines.vllm import VLLMEngine
from rollouts.engines.vllm.transfer import FileSender, TransferEngine

url, file = sys.argv[1:]

async def main():
    sent = 0
    def tensors():
        nonlocal sent
        for name, value in load_file(file).items():
            sent += 1
            if sent == 40:  # some buckets have arrived
                print("ready", flush=True)
                sys.stdin.readline()
            yield name, value
    await TransferEngine(VLLMEngine(url), FileSender(), bucket_bytes=30_000).update_weights(tensors(), "new")

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_trainer_that_is_killed_leaves_no_file_and_the_next_one_sends_the_weights(
    engine, server, request_for, checkpoints, tmp_path
):
    before = (await engine.generate(request_for())).completions[0]
    (file,) = checkpoints[1].glob("*.safetensors")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    shared = set(os.listdir("/dev/shm")) if sys.platform == "linux" else set()
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-c", TRAINER, server.base_url, str(file)]
    trainer = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)
    assert await asyncio.wait_for(trainer.stdout.readline(), SECONDS) == b"ready\n"
    trainer.kill()
    await trainer.wait()
    if sys.platform == "linux":
        assert not [name for name in os.listdir("/dev/shm") if name not in shared and "weights" in name]
        assert list(tmp_path.iterdir()) == []
    await engine.control.resume()  # the trainer had paused it
    after = (await engine.generate(request_for())).completions[0]
    assert after.logprobs.tolist() == before.logprobs.tolist()
    assert versions(after) == ["default"]
    await TransferEngine(engine, FileSender()).update_weights(tensors_of(checkpoints[1]), "new")
    (completion,) = (await engine.generate(request_for())).completions
    assert difference(checkpoints[1], None, request_for(), completion) < 1e-5


@pytest.mark.slow
async def test_a_server_that_is_killed_during_a_transfer_leaves_no_file(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with served_process(checkpoints[0], "--name", "tiny") as served:
        engine = VLLMEngine(served.base_url, limits=HttpLimits(retries=1))
        sender = FileSender(tmp_path)

        def tensors():
            for number, pair in enumerate(tensors_of(checkpoints[1]).items()):
                if number == 40:
                    served.process.kill()
                    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]
                yield pair

        with pytest.raises(WeightUpdateError):
            await TransferEngine(engine, sender, bucket_bytes=30_000).update_weights(tensors(), "new")
        assert list(tmp_path.iterdir()) == []
        await engine.close()


@pytest.mark.parametrize("named", [True, False])
def test_a_sender_keeps_one_bucket_and_nothing_after_it_was_closed(tmp_path, named):
    sender = FileSender(tmp_path if named else None)
    for number in range(3):
        info = sender.update_info([("a", torch.full((2,), float(number))), ("b", torch.zeros(3, 2).T)])
        tensors = load_file(info["path"])
        assert tensors["a"].tolist() == [number] * 2
        assert tensors["b"].shape == (2, 3)
        assert len(list(tmp_path.iterdir())) == (1 if named else 0)
        if named:
            assert Path(info["path"]).stat().st_mode & 0o077 == 0
    sender.close()
    assert list(tmp_path.iterdir()) == []
    assert not os.path.exists(info["path"])


@pytest.mark.slow
async def test_a_server_before_a_server_has_the_adapters_of_that_one_and_takes_no_tensors(
    engine, server, serve_app, renderer, request_for, checkpoints, adapters
):
    length = (await engine.capabilities()).max_model_len
    model = served_model(checkpoints[0], renderer, name="tiny", max_model_len=length)
    pausable = PausableEngine(VLLMEngine(server.base_url), max_model_len=length)
    outer = serve_app(create_app(pausable, renderer, model))
    async with VLLMEngine(outer.base_url) as through:
        await through.load_adapter("a", adapters[0])
        assert await engine.adapters() == await through.adapters() == {"a": str(adapters[0])}
        (completion,) = (await through.generate(request_for(adapter="a"))).completions
        assert versions(completion) == ["a"]
        assert difference(checkpoints[0], adapters[0], request_for(), completion) < 1e-5
        await through.update_weights(checkpoints[1], "v1")
        (completion,) = (await through.generate(request_for(adapter="a"))).completions
        assert versions(completion) == ["a on v1"]
        assert difference(checkpoints[1], adapters[0], request_for(), completion) < 1e-5
        await through.unload_adapter("a")
        assert await engine.adapters() == {}
        with pytest.raises(CapabilityError):
            await TransferEngine(through, FileSender()).update_weights(tensors_of(checkpoints[1]), "v2")
