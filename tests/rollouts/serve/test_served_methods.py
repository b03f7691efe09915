"""Every public method of `VLLMEngine` and of its `control` against `rollouts serve` of a `LocalEngine`.

What is sampled is compared with the model itself: with the log-probabilities of a checkpoint by transformers, and of an
adapter over it by PEFT.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_scores import difference
from make_adapter import make_adapter
from safetensors.torch import load_file
from served_in_thread import serve_directory
from test_served_engine import TEXT, image_messages, request_of

from rollouts.engines.protocol import FinishReason
from rollouts.engines.vllm import VLLMEngine
from rollouts.engines.vllm.control import ServerControl
from rollouts.engines.vllm.transfer import FileSender, update_info
from rollouts.errors import EngineClosedError, UnknownAdapterError, WeightUpdateError
from rollouts.testing import tiny_qwen3_vl

SECONDS = 60


@dataclass
class Served:
    """An engine of a server of its own, over `first`; `second` is another checkpoint of the same model."""

    engine: VLLMEngine
    renderer: Any
    first: Path
    second: Path
    adapter: Path

    @property
    def control(self) -> ServerControl:
        return self.engine.control

    def request(self, messages=TEXT, adapter=None, **sampling):
        return replace(request_of(self.renderer, messages, **sampling), adapter=adapter)

    async def is_sampled_by(self, checkpoint: Path, adapter: Path | None = None, name: str | None = None) -> bool:
        """Whether the server samples with these weights."""
        request = self.request(image_messages(0), name)
        (completion,) = (await self.engine.generate(request)).completions
        return difference(checkpoint, adapter, request, completion) < 1e-5


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    checkpoints = [tiny_qwen3_vl(root / f"checkpoint-{seed}", seed=seed) for seed in (0, 1)]
    return *checkpoints, make_adapter(root / "adapter", checkpoints[0], seed=3)


@pytest.fixture
async def served(directories, renderer):
    with serve_directory(directories[0], name="tiny") as server:
        async with VLLMEngine(server.base_url) as engine:
            yield Served(engine, renderer, *directories)


@pytest.fixture
def called(monkeypatch):
    """The names of the methods and properties that are used, as "method" and "control.method"."""
    names: set[str] = set()

    def recording(name, function):
        @functools.wraps(function)
        def wrapper(*arguments, **options):
            names.add(name)
            return function(*arguments, **options)

        return wrapper

    for prefix, cls in (("", VLLMEngine), ("control.", ServerControl)):
        for name in public(cls):
            attribute = inspect.getattr_static(cls, name)
            if isinstance(attribute, property):
                replacement = property(recording(prefix + name, attribute.fget))
            else:
                replacement = recording(prefix + name, attribute)
            monkeypatch.setattr(cls, name, replacement)
    return names


def public(cls):
    return [name for name in dir(cls) if not name.startswith("_")]


USES = {}


def uses(*names):
    """A scenario in which these methods are called."""

    def register(scenario):
        USES[scenario] = set(names)
        return scenario

    return register


def test_every_public_method_has_a_scenario():
    methods = {*public(VLLMEngine), *(f"control.{name}" for name in public(ServerControl))}
    assert set().union(*USES.values()) == methods


@uses("base_url", "vocab_size", "capabilities", "media_cache_counts", "media_payload", "generate", "control.base_url")
async def the_server_says_what_it_is_and_samples_texts_and_images(served):
    capabilities = await served.engine.capabilities()
    assert (capabilities.model, capabilities.control, capabilities.scale_out) == ("tiny", True, True)
    assert capabilities.is_rollouts_serve
    assert served.engine.base_url == served.control.base_url
    assert served.engine.vocab_size is None
    assert await served.is_sampled_by(served.first)
    assert not await served.is_sampled_by(served.second)  # the detector
    counts = served.engine.media_cache_counts
    assert (counts.included_items, counts.omitted_items) == (1, 1)


@uses("generate_streamed", "stream")
async def tokens_are_received_as_they_are_sampled(served):
    request = served.request()
    received = []
    result = await served.engine.generate_streamed(request, received.append)
    yielded = [delta async for delta in served.engine.stream(replace(request, request_id="again"))]
    (completion,) = result.completions
    for deltas in (received, yielded):
        assert np.concatenate([each.token_ids for each in deltas]).tolist() == completion.token_ids.tolist()
        assert len(deltas) > 1
    assert difference(served.first, None, request, completion) < 1e-5


async def running(served, request_id):
    """A long request that has begun, as a task."""
    request = replace(served.request(max_tokens=3000, extra={"ignore_eos": True}), request_id=request_id)
    begun = asyncio.Event()
    task = asyncio.ensure_future(served.engine.generate_streamed(request, lambda delta: begun.set()))
    await asyncio.wait_for(begun.wait(), SECONDS)
    return task


@uses("abort", "abort_all")
async def requests_of_the_engine_end_with_the_tokens_that_they_have(served):
    for abort in (lambda: served.engine.abort(["long"]), served.engine.abort_all):
        task = await running(served, "long")
        await abort()
        (completion,) = (await asyncio.wait_for(task, SECONDS)).completions
        assert completion.finish_reason is FinishReason.ABORT
        assert 0 < len(completion.token_ids) < 3000


@uses("control.abort", "control.abort_all", "control.load", "control.metrics")
async def requests_are_counted_and_ended_by_the_server(served):
    task = await running(served, "long")
    assert await served.control.load() >= 1
    assert (await served.control.metrics()).running == 1
    await served.control.abort(["long"])  # the engine continues what it has not ended itself
    assert not task.done()
    assert await served.control.abort_all() <= 1
    await served.engine.abort_all()
    await asyncio.wait_for(task, SECONDS)
    assert (await served.control.metrics()).running == 0


@uses("control.pause", "control.resume", "control.is_paused")
async def a_pause_holds_requests_back(served):
    await served.control.pause("abort")
    assert await served.control.is_paused()
    task = asyncio.ensure_future(served.is_sampled_by(served.first))
    while (await served.control.metrics()).waiting == 0:  # noqa: ASYNC110 a state that can only be asked for
        await asyncio.sleep(0.01)
    assert not task.done()
    await served.control.resume()
    assert not await served.control.is_paused()
    assert await asyncio.wait_for(task, SECONDS)


@uses("control.sleep", "control.wake_up", "control.is_sleeping", "control.reload_weights")
async def a_server_that_sleeps_wakes_up_with_other_weights(served):
    await served.control.sleep(2)
    assert await served.control.is_sleeping()
    await served.control.wake_up(["weights"])
    await served.control.reload_weights(served.second)
    await served.control.wake_up()
    assert not await served.control.is_sleeping()
    assert await served.is_sampled_by(served.second)


@uses("control.reset_mm_cache", "control.reset_prefix_cache", "control.reset_encoder_cache")
async def caches_are_emptied(served):
    assert await served.is_sampled_by(served.first)
    await served.control.reset_mm_cache()
    await served.control.reset_prefix_cache()
    await served.control.pause("keep")
    await served.control.reset_encoder_cache()
    await served.control.resume()
    assert await served.is_sampled_by(served.first)
    assert served.engine.media_cache_counts.included_items == 2


@uses("control.health", "control.check_health", "control.world_size", "control.initial_directory")
async def the_server_is_monitored(served):
    await served.control.check_health()
    assert await served.control.health()
    assert await served.control.world_size() == 1
    assert await served.control.initial_directory() == str(served.first)


@uses("update_weights", "weight_version", "control.update_weights_from_directory", "control.reties_output_layer")
async def a_checkpoint_without_its_tied_output_layer_replaces_the_weights(served):
    (file,) = served.second.glob("*.safetensors")
    assert "lm_head.weight" not in load_file(file)  # nobody has called write_tied_head
    assert await served.control.reties_output_layer()
    await served.engine.update_weights(served.second, "v1")
    assert served.engine.weight_version == "v1"
    assert await served.is_sampled_by(served.second)
    await served.control.update_weights_from_directory(served.first, "v2")
    assert served.engine.weight_version == "v2"
    assert await served.is_sampled_by(served.first)


@uses("update_weight_version", "control.update_weight_version", "control.weight_version")
async def labels_of_the_weights_are_set_and_read(served):
    assert await served.control.weight_version() == "default"
    for number, update in enumerate((served.engine.update_weight_version, served.control.update_weight_version)):
        await update(f"v{number}")
        assert await served.control.weight_version() == served.engine.weight_version == f"v{number}"


@uses("load_adapter", "unload_adapter", "adapters")
async def an_adapter_samples_beside_the_model(served):
    await served.engine.load_adapter("policy@1", served.adapter)
    assert await served.engine.adapters() == {"policy@1": str(served.adapter)}
    assert await served.is_sampled_by(served.first, served.adapter, "policy@1")
    assert await served.is_sampled_by(served.first)
    assert not await served.is_sampled_by(served.first, None, "policy@1")  # the detector
    await served.engine.unload_adapter("policy@1")
    assert await served.engine.adapters() == {}
    with pytest.raises(UnknownAdapterError):
        await served.engine.generate(served.request(adapter="policy@1"))


@uses(
    *("control.init_weight_transfer", "control.begin_transfer", "control.receive_weights", "control.finish_transfer"),
    *("control.abandon_transfer", "control.shutdown_weight_transfer"),
)
async def tensors_of_a_trainer_replace_the_weights(served):
    sender = FileSender()
    tensors = [(name, value) for file in served.second.glob("*.safetensors") for name, value in load_file(file).items()]
    await served.control.init_weight_transfer(sender.init_info(0, 1))
    begun = await served.control.begin_transfer("abort")
    bucket = tensors[:5]
    await served.control.receive_weights({**update_info(bucket), **sender.update_info(bucket)})
    with pytest.raises(WeightUpdateError, match="were loaded again"):
        await served.control.abandon_transfer(begun, RuntimeError("the trainer has failed"))
    assert await served.is_sampled_by(served.first)
    begun = await served.control.begin_transfer("abort")
    for start in range(0, len(tensors), 20):
        bucket = tensors[start : start + 20]
        await served.control.receive_weights({**update_info(bucket), **sender.update_info(bucket)})
    await served.control.finish_transfer(begun, "v1")
    await served.control.shutdown_weight_transfer()
    sender.close()
    assert await served.control.weight_version() == "v1"
    assert await served.is_sampled_by(served.second)


@uses("close")
async def a_closed_engine_sends_nothing(served):
    await served.engine.close()
    with pytest.raises(EngineClosedError):
        await served.engine.generate(served.request())


@pytest.mark.slow
@pytest.mark.parametrize("scenario", USES, ids=lambda scenario: scenario.__name__)
async def test_the_methods_of_an_engine_on_a_server_in_process(served, called, scenario):
    await scenario(served)
    assert called >= USES[scenario]
