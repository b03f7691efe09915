"""LoRA adapters of the embedded engine: the log-probabilities are those of PEFT's own model."""

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from make_adapter import make_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from renderers.errors import MissingExtraError
from renderers.installation import install_command
from rollouts import Completion, GenerateRequest, SamplingParams
from rollouts.engines.local import LocalEngine
from rollouts.engines.lora import LoRAEngine
from rollouts.errors import ArgumentError, EngineClosedError, UnknownAdapterError, WeightUpdateError
from rollouts.training import TrainingBatch, TrainingSample, token_logprobs

LENGTH = 12


def plain_model(directory: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


def scored(directory: Path, adapter: Path | None, request: GenerateRequest, completion: Completion) -> np.ndarray:
    """The log-probability of each token of a completion by the checkpoint of a directory, with an adapter or None."""
    model = plain_model(directory)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    count, length = len(request.prompt_ids), len(request.prompt_ids) + len(completion.token_ids)
    sample = TrainingSample(
        token_ids=np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int32),
        loss_mask=np.arange(length) >= count,
        logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        media=tuple(request.media),
    )
    with torch.no_grad():
        return token_logprobs(model, TrainingBatch.from_samples([sample], pad_id=0))[0, count:].numpy()


def difference(directory: Path, adapter: Path | None, request: GenerateRequest, completion: Completion) -> float:
    """The largest difference of the log-probabilities of a completion from those of `scored`."""
    return float(np.abs(scored(directory, adapter, request, completion) - completion.logprobs).max())


@pytest.fixture(scope="module")
def adapters(tiny_model_dir, tmp_path_factory):
    """Two adapters of the language layers, one of every linear layer with further options of LoRA, and one of the
    output layer alone."""
    root = tmp_path_factory.mktemp("adapters")
    found = {name: make_adapter(root / name, tiny_model_dir, seed=seed) for seed, name in enumerate("ab")}
    options = {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"down_proj": 7}, "use_rslora": True}
    for name, modules, more in (("everywhere", "all-linear", options), ("output", ["lm_head"], {})):
        config = peft.LoraConfig(r=5, lora_alpha=9, target_modules=modules, init_lora_weights=False, **more)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = peft.get_peft_model(plain_model(tiny_model_dir), config)
        model.save_pretrained(root / name, save_embedding_layers=False)
        found[name] = root / name
    return found


def request(prompt, adapter=None, **sampling):
    sampling = SamplingParams(**{"max_tokens": LENGTH, "seed": 0, **sampling})
    return GenerateRequest(prompt.token_ids, sampling, prompt.multi_modal_data, adapter=adapter)


async def sampled(engine, *arguments, **options):
    (completion,) = (await engine.generate(request(*arguments, **options))).completions
    return completion


def versions(completion):
    return [span.version for span in completion.weight_spans]


@pytest.mark.slow
async def test_requests_of_different_adapters_at_once_have_the_log_probabilities_of_their_own(
    engine, prompt, tiny_model_dir, adapters
):
    for name, directory in adapters.items():
        await engine.load_adapter(name, directory)
    assert await engine.adapters() == {name: str(directory) for name, directory in adapters.items()}
    names = [*adapters, None] * 2
    completions = await asyncio.gather(*(sampled(engine, prompt, name) for name in names))
    found = {}
    for name, completion in zip(names, completions, strict=True):
        assert difference(tiny_model_dir, adapters.get(name), request(prompt), completion) < 1e-5
        assert versions(completion) == [name or "0"]
        found.setdefault(name, completion.token_ids.tolist())
        assert found[name] == completion.token_ids.tolist(), "the same request beside others"
        others = [each for each in (*adapters, None) if each != name]
        for other in others:  # the detector: no other weights give these values
            assert difference(tiny_model_dir, adapters.get(other), request(prompt), completion) > 1e-2


@pytest.mark.slow
async def test_new_weights_of_the_model_are_under_every_adapter_and_named_in_the_version(
    engine, prompt, adapters, other_model_dir
):
    await engine.load_adapter("a", adapters["a"])
    await engine.update_weights(other_model_dir, "1")
    completion, plain = await asyncio.gather(sampled(engine, prompt, "a"), sampled(engine, prompt))
    assert [versions(completion), versions(plain)] == [["a on 1"], ["1"]]
    assert difference(other_model_dir, adapters["a"], request(prompt), completion) < 1e-5
    assert difference(other_model_dir, None, request(prompt), plain) < 1e-5


@pytest.mark.slow
async def test_a_request_keeps_its_adapter_when_another_one_takes_the_name_meanwhile(
    engine, held_batch, prompt, tiny_model_dir, adapters
):
    reached, released = held_batch
    await engine.load_adapter("policy", adapters["a"])
    running = asyncio.ensure_future(sampled(engine, prompt, "policy"))
    assert await asyncio.to_thread(reached.wait, 60)
    waiting = asyncio.ensure_future(sampled(engine, prompt, "policy", seed=1))  # for the next batch
    await asyncio.sleep(0)
    await engine.unload_adapter("policy")
    await engine.load_adapter("policy", adapters["b"])  # while the batch runs
    released.set()
    after = await sampled(engine, prompt, "policy")
    for completion, name in ((await running, "a"), (await waiting, "a"), (after, "b")):
        assert difference(tiny_model_dir, adapters[name], request(prompt), completion) < 1e-5


@pytest.mark.slow
async def test_a_completion_in_flight_continues_with_the_next_adapter_of_a_lora_engine(
    engine, held_batch, prompt, tiny_model_dir, adapters
):
    reached, released = held_batch
    policy = LoRAEngine(engine, "policy")
    await policy.update_weights(adapters["a"], "policy@1")
    running = asyncio.ensure_future(sampled(policy, prompt))
    assert await asyncio.to_thread(reached.wait, 60)
    updating = asyncio.ensure_future(policy.update_weights(adapters["b"], "policy@2"))
    while "policy@2" not in await engine.adapters():  # noqa: ASYNC110 a state that can only be asked for
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    released.set()
    await updating
    completion = await running
    assert versions(completion) == ["policy@1", "policy@2"]
    assert list(await engine.adapters()) == ["policy@2"]
    for name, span in zip("ab", completion.weight_spans, strict=True):
        expected = scored(tiny_model_dir, adapters[name], request(prompt), completion)
        np.testing.assert_allclose(
            completion.logprobs[span.start : span.end], expected[span.start : span.end], atol=1e-5
        )


async def test_an_adapter_leaves_the_model_as_it_was(prompt, tiny_model_dir, adapters):
    model = plain_model(tiny_model_dir)

    def state():
        tensors = model.state_dict(keep_vars=True)
        return {name: (id(value), value.requires_grad) for name, value in tensors.items()}, set(vars(model))

    before = state()
    engine = LocalEngine(model)
    await engine.load_adapter("everywhere", adapters["everywhere"])
    await sampled(engine, prompt, "everywhere")
    await engine.close()
    assert state() == before


def change_config(**fields):
    def change(directory):
        path = directory / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def change_weights(change):
    def changed(directory):
        path = directory / "adapter_model.safetensors"
        save_file(change(load_file(path)), path)

    return changed


def first(tensors, end):
    return next(name for name in sorted(tensors) if name.endswith(end))


WRONG = {
    "no weights": (lambda directory: (directory / "adapter_model.safetensors").unlink(), "lacks adapter_model"),
    "no configuration": (lambda directory: (directory / "adapter_config.json").unlink(), "cannot be read"),
    "a broken configuration": (lambda d: (d / "adapter_config.json").write_text("[1"), "cannot be read"),
    "broken weights": (lambda d: (d / "adapter_model.safetensors").write_bytes(b"\0" * 100), "no complete safetensors"),
    "more bytes than the model": (
        lambda directory: (directory / "adapter_model.safetensors").write_bytes(b"\0" * 2**25),
        "larger than the model",
    ),
    "another method": (change_config(peft_type="IA3"), "no LoRA adapter"),
    "DoRA": (change_config(use_dora=True), "use_dora is 'True'"),
    "biases": (change_config(bias="all"), "bias is 'all'"),
    "trained modules": (change_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "an initialisation that changes the model": (
        change_config(init_lora_weights="pissa"),
        "init_lora_weights is 'pissa'",
    ),
    "an option of later releases": (change_config(future={"x": 1}), "future is"),
    "a module to import": (change_config(megatron_config={"a": 1}, megatron_core="os"), "megatron_config"),
    "a huge rank": (change_config(r=10**9), "rank 1000000000 is not an integer from 1 to 512"),
    "a huge rank of some layers": (change_config(rank_pattern={"q_proj": 10**9}), "rank 1000000000"),
    "another rank than the tensors": (change_config(r=3), "has shape"),
    "a scale that is no number": (change_config(lora_alpha="x"), "PEFT cannot use it"),
    "a scale that is infinite": (change_config(lora_alpha=float("inf")), "no finite number"),
    "a module that the model lacks": (
        change_weights(lambda t: {name.replace("layers.0", "layers.9"): value for name, value in t.items()}),
        "no lora_A or lora_B of a linear layer",
    ),
    "one tensor of two": (
        change_weights(lambda t: {name: value for name, value in t.items() if name != first(t, "lora_A.weight")}),
        "only one of lora_A and lora_B",
    ),
    "no tensors": (change_weights(lambda t: {}), "has no tensors"),
    "not a number": (
        change_weights(lambda t: {**t, first(t, "lora_B.weight"): t[first(t, "lora_B.weight")] * torch.nan}),
        "NaN or infinite",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
async def test_a_directory_that_is_no_adapter_of_the_model_is_refused_and_nothing_changes(
    engine, prompt, adapters, tmp_path, fault
):
    change, reason = WRONG[fault]
    directory = shutil.copytree(adapters["a"], tmp_path / "adapter")
    before = await sampled(engine, prompt)
    change(directory)
    with pytest.raises(WeightUpdateError, match=rf"{reason}.*Nothing was changed"):
        await engine.load_adapter("a", directory)
    assert await engine.adapters() == {}
    assert (await sampled(engine, prompt)).logprobs.tolist() == before.logprobs.tolist()


async def test_names_that_are_unknown_taken_or_no_names_are_refused(engine, prompt, adapters):
    with pytest.raises(UnknownAdapterError, match=r"'a' is not loaded \(loaded: none\)"):
        await engine.generate(request(prompt, "a"))
    await engine.load_adapter("a", adapters["a"])
    with pytest.raises(WeightUpdateError, match="there is an adapter 'a' already"):
        await engine.load_adapter("a", adapters["b"])
    with pytest.raises(ArgumentError, match="printable ASCII"):
        await engine.load_adapter("a b", adapters["b"])
    with pytest.raises(UnknownAdapterError, match=r"'b' is not loaded \(loaded: 'a'\)"):
        await engine.unload_adapter("b")


async def test_two_loads_of_one_name_at_once_give_one_adapter(engine, adapters):
    outcomes = await asyncio.gather(
        *(engine.load_adapter("a", adapters[name]) for name in "ab"), return_exceptions=True
    )
    assert sorted(type(each) for each in outcomes if each is not None) == [WeightUpdateError]
    assert len(await engine.adapters()) == 1


async def test_a_model_that_has_adapters_of_peft_already_takes_no_further_ones(tiny_model_dir, adapters):
    model = peft.PeftModel.from_pretrained(plain_model(tiny_model_dir), adapters["a"])
    engine = LocalEngine(model)
    with pytest.raises(WeightUpdateError, match="merge_and_unload"):
        await engine.load_adapter("b", adapters["b"])
    await engine.close()
    with pytest.raises(EngineClosedError):
        await engine.load_adapter("b", adapters["b"])


async def test_without_peft_the_error_names_what_to_install(engine, adapters, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("lora"))):
        await engine.load_adapter("a", adapters["a"])
