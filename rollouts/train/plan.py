"""What a training run will do, and about how much memory and time it needs, as `--dry-run` prints it."""

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from rich.console import Console
from safetensors import safe_open
from torch.autograd.graph import saved_tensors_hooks

from rollouts.engines.local import LocalEngine
from rollouts.engines.protocol import GenerateRequest
from rollouts.run_config.output import OutputDirectory
from rollouts.run_config.run_parts import RunParts
from rollouts.run_config.sections import LocalEngineSection, TrainSection
from rollouts.run_config.tasks import TaskSource
from rollouts.task import Task
from rollouts.train.learning import Learner, supervised_samples
from rollouts.train.policy import NAME, Policy
from rollouts.training.trainer import Datum

_MEASURED_TOKENS: Final = 32
_MEASURED_SECONDS: Final = 1.0


def print_plan(
    parts: RunParts,
    section: TrainSection,
    output: OutputDirectory,
    request: GenerateRequest,
    held_out: TaskSource | None,
    conversations: Sequence[Task] | None,
    console: Console,
) -> None:
    """Print steps, evaluations, supervised rows, memory, and seconds of the first step. `request` is the first one.

    Raises as the run would for what is found before its first step.
    """
    file, config = parts.file, parts.file.config
    assert config.renderer is not None
    episodes, turns = section.groups * config.group_size, config.limits.max_turns
    of_turns = "" if turns is None else f" of at most {turns} turns"
    lines = [f"a step: {episodes:,} episodes{of_turns}, {config.sampling.max_tokens:,} tokens each turn"]
    if (supervised := config.supervised) is not None and conversations is not None and parts.renderer is not None:
        rows = supervised_samples(parts.renderer, conversations, supervised)
        trained = sum(int(row.loss_mask.sum()) for row in rows)
        size = min(supervised.batch, len(rows))
        lines.append(f"supervised: {supervised.steps:,} steps of {size:,} of {len(rows):,} rows ({trained:,} tokens)")
    if held_out is not None:
        evaluation = config.evaluation
        times = 1 + math.ceil(section.steps / evaluation.every)
        count = f"{sum(1 for _ in held_out):,}" if not hasattr(held_out, "__aiter__") else "the"
        lines.append(f"evaluation: {times:,} times {count} tasks, {evaluation.samples:,} episodes of each")
    console.print(*lines, sep="\n", soft_wrap=True, highlight=False)
    directory = file.resolve(getattr(config.engine, "directory", config.renderer.model))
    is_local = isinstance(config.engine, LocalEngineSection)
    memory = _memory(directory, section, is_local=is_local)
    if sum(memory.values()) > (there := _memory_of_device()):
        _print_memory(memory, f", of {there / 1e9:.3g} GB; a pass was not measured", console)
        return
    policy = Policy(parts, section, output.weights)
    Learner(policy, file, section)
    row_tokens = len(request.prompt_ids) + config.sampling.max_tokens * (turns or 1)
    tokens = episodes * min(row_tokens, section.max_row_tokens or row_tokens)
    training, kept = _training_of_a_token(policy, request, config.group_size)
    _print_memory(memory | {"a pass": kept * min(tokens, section.tokens_per_pass)}, "", console)
    seconds = f"{tokens * section.epochs * training:.2g} s of training"
    if is_local:
        sampled = section.groups * (turns or 1) * config.sampling.max_tokens
        sampling = sampled * _sampling_seconds_of_a_token(policy, request, config.group_size)
        seconds = f"{sampling:.2g} s of sampling, {seconds}"
    console.print(f"the first step, estimated from a few rows: about {seconds}", soft_wrap=True, highlight=False)


def _print_memory(memory: Mapping[str, float], more: str, console: Console) -> None:
    listed = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in memory.items())
    line = f"memory, estimated: at least {sum(memory.values()) / 1e9:.3g} GB ({listed}){more}"
    console.print(line, soft_wrap=True, highlight=False)


def _memory(directory: Path, section: TrainSection, *, is_local: bool) -> dict[str, float]:
    """Bytes by what needs them in every step, from the shapes in the files of the model."""
    shapes: list[list[int]] = []
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            shapes += [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118 - not a mapping
    size = 4 if section.dtype == "float32" else 2
    parameters = sum(math.prod(shape) for shape in shapes)
    # An adapter has two matrices for each of the model's.
    adapter = sum(section.lora_rank * sum(shape) for shape in shapes if len(shape) == 2)
    trained = adapter if section.lora_rank else parameters
    memory = {"weights": size * parameters, "gradients and AdamW": 12 * trained}
    if section.lora_rank:
        memory["adapter"] = 4 * adapter
    elif is_local:
        memory["the engine's copy"] = 4 * parameters
    return dict(memory)


def _memory_of_device() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _training_of_a_token(policy: Policy, request: GenerateRequest, most: int) -> tuple[float, float]:
    """Seconds of forward and backward passes, and bytes that the forward pass keeps for the other, of a token.

    Measured on 1, 2, 4... rows, until they take a second or there are `most`.
    """
    model = policy.trainer.model
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    rows, seconds, tokens = 0, 0.0, 1
    while rows < most and seconds < _MEASURED_SECONDS:
        rows = min(max(1, 2 * rows), most)
        data = []
        for row in range(rows):
            # Rows of a group begin with the same prompt, and have other completions.
            completion = (np.arange(_MEASURED_TOKENS) + row) % 50
            ids = np.concatenate([np.asarray(request.prompt_ids), completion])
            data.append(Datum(ids[:-1], ids[1:], media=request.media))
        kept.clear()
        started = time.perf_counter()
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            policy.trainer.forward_backward(NAME, data, "cross_entropy")
        seconds, tokens = time.perf_counter() - started, sum(map(len, data))
    return seconds / tokens, sum(kept.values()) / tokens


def _sampling_seconds_of_a_token(policy: Policy, request: GenerateRequest, group_size: int) -> float:
    """Of `group_size` completions that are sampled together."""

    async def sample() -> float:
        engine = LocalEngine(policy.trainer.model, lock=policy.trainer.lock)
        sampling = replace(
            request.sampling, n=group_size, max_tokens=min(request.sampling.max_tokens, _MEASURED_TOKENS)
        )
        started = time.perf_counter()
        await engine.generate(replace(request, sampling=sampling))
        seconds = time.perf_counter() - started
        await engine.close()
        return seconds / sampling.max_tokens

    return asyncio.run(sample())
