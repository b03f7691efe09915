"""The application of `rollouts tinker` for the model of a directory."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from renderers import MediaPolicy
from rollouts.observability.metric_sinks import MetricSink, TensorBoardSink, WandbSink
from rollouts.tinker.app import create_app
from rollouts.tinker.backend import Backend, Limits
from rollouts.tinker.inputs import InputReader
from rollouts.tinker.local_sampler import LocalSampler
from rollouts.tinker.run_directory import RunDirectory
from rollouts.tinker.sample_records import SampleRecords
from rollouts.tinker.sampler import Sampler
from rollouts.tinker.service import Service
from rollouts.tinker.training_records import TrainingRecords
from rollouts.tinker.vllm_sampler import VLLMSampler
from rollouts.training.trainer import Dtype, Trainer


def model_app(
    model: Path,
    run: Path,
    *,
    names: Sequence[str] = (),
    keys: Sequence[str] = (),
    vllm_urls: Sequence[str] = (),
    vllm_api_key: str | None = None,
    sleep: bool = False,
    device: str | None = None,
    dtype: Dtype = "float32",
    tokens_per_pass: int = 8192,
    patches_per_pass: int = 32768,
    limits: Limits | None = None,
    check_mismatch: bool = False,
    record: bool = False,
    tensorboard: bool = False,
    wandb: str | None = None,
    image_hosts: Sequence[str] = (),
    **options: Any,
) -> Starlette:
    """The application that trains the model of a directory, and samples from it or from vLLM servers.

        app = model_app(Path("Qwen3-VL-2B-Instruct"), Path("tinker-runs"))
        uvicorn.run(app, port=8000)

    Requests name the model by one of `names`, or by its directory. `run` keeps checkpoints and metrics; with
    `keys`, a folder of it, whose name is made from the key, keeps those of each user. The other arguments are
    the options of `rollouts tinker`; `options` are those of `create_app`. Raises what
    `Trainer.from_pretrained` raises.
    """
    trainer = Trainer.from_pretrained(
        model, dtype=dtype, device=device, tokens_per_pass=tokens_per_pass, patches_per_pass=patches_per_pass
    )
    sampler: Sampler = LocalSampler(trainer)
    if vllm_urls:
        sampler = VLLMSampler(vllm_urls, model, sleep=sleep, api_key=vllm_api_key)
    policy = None
    if image_hosts:
        policy = MediaPolicy(allowed_schemes=frozenset({"https"}), allowed_hosts=tuple(image_hosts))
    reader = InputReader(model, media_policy=policy)
    backend = Backend(
        trainer, sampler, reader, [*names, str(model)], limits=limits or Limits(), check_mismatch=check_mismatch
    )

    def service(directory: Path) -> Service:
        return Service(
            backend,
            RunDirectory(directory),
            TrainingRecords(directory, sinks=lambda model_id: _sinks(directory / model_id, tensorboard, wandb)),
            SampleRecords(directory / "trajectories.mmr", decode=reader.tokenizer.decode) if record else None,
        )

    # The folder of a user is the same wherever the key stands in its file, and no way back to it.
    services = {key: service(run / f"user-{hashlib.sha256(key.encode()).hexdigest()[:16]}") for key in keys}
    return create_app(services or service(run), **options)


def _sinks(directory: Path, tensorboard: bool, wandb: str | None) -> list[MetricSink]:
    sinks: list[MetricSink] = []
    if tensorboard:
        sinks.append(TensorBoardSink(directory / "tensorboard"))
    if wandb is not None:
        sinks.append(WandbSink(wandb, directory=directory, name=directory.name))
    return sinks
