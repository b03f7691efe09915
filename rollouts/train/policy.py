"""The model that is trained, and how its weights reach the engine that samples from it."""

import copy
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch

from renderers import TemplateRenderer
from rollouts.engines.local import LocalEngine
from rollouts.engines.local.adapters import LocalAdapters
from rollouts.engines.lora import LoRAEngine
from rollouts.engines.protocol import Engine
from rollouts.models.lora_modules import LoraOptions, inserted
from rollouts.run_config.engines import connect, local_directory, server_kind
from rollouts.run_config.group_files import write_errors_name
from rollouts.run_config.run_parts import RunParts
from rollouts.run_config.sections import LocalEngineSection, TrainSection
from rollouts.training.trainer import Trainer

#: The id of the trained model in its `Trainer`, and the name of its adapter at a server.
NAME: Final = "policy"


class Policy:
    """A `Trainer` with one model, and an engine with the same weights.

    An adapter is loaded by the engine under the name of its version, "policy@3" after three steps. With all
    parameters trained, a local engine has a copy of the model, and a server loads a directory. `directory` is
    that of the weights for engines, of which the last two versions are kept: a server may load those of
    before again.
    """

    def __init__(self, parts: RunParts, section: TrainSection, directory: Path) -> None:
        file, engine = parts.file, parts.file.config.engine
        assert file.config.renderer is not None  # engines that take weights have one
        self._parts = parts
        self._directory = directory
        self._kept: list[Path] = []
        self._is_adapter = section.lora_rank > 0
        self._is_local = isinstance(engine, LocalEngineSection)
        if isinstance(engine, LocalEngineSection):
            model = local_directory(file, engine)
        else:
            model = file.resolve(file.config.renderer.model)
            if not (model / "config.json").is_file():
                reason = f"there is no {model / 'config.json'}; write the directory of the model that is trained"
                raise file.error(("renderer", "model"), reason)
        if section.threads is not None:
            torch.set_num_threads(section.threads)
        with file.naming("train"):
            self.trainer = Trainer.from_pretrained(model, dtype=section.dtype, tokens_per_pass=section.tokens_per_pass)
            self.lora = LoraOptions(
                rank=section.lora_rank or 1,
                alpha=section.lora_alpha,
                seed=file.config.seed,
                train_attn=section.train_attn,
                train_mlp=section.train_mlp,
                train_unembed=section.train_unembed,
            )
            self.trainer.create_model(NAME, lora=self.lora if self._is_adapter else None)

    @property
    def renderer(self) -> TemplateRenderer:
        assert self._parts.renderer is not None
        return self._parts.renderer

    def version(self, step: int) -> str:
        """The version of the weights after a step, by which their tokens are labelled."""
        return f"{NAME}@{step}" if self._is_adapter else str(step)

    def save(self, directory: Path) -> None:
        """Write the weights to a directory that engines load, in place of one that is there when they are complete."""
        new, old = (directory.with_name(f".{directory.name}.{age}") for age in ("new", "old"))
        with write_errors_name(directory):
            for left in (new, old):  # by a killed process
                shutil.rmtree(left, ignore_errors=True)
            self.trainer.save_for_sampler(NAME, new)
            if directory.exists():
                directory.rename(old)
            new.rename(directory)
            shutil.rmtree(old, ignore_errors=True)

    def weights(self, step: int) -> Any:
        """What `Engine.update_weights` takes: tensors for a local engine, else a new directory."""
        if self._is_local and not self._is_adapter:
            return self.trainer.model.state_dict()
        directory = self._directory / self.version(step)
        self.save(directory)
        engine: Any = self._parts.file.config.engine
        if not self._is_adapter and server_kind(engine) == "vllm":
            from rollouts.engines.vllm import write_tied_head

            write_tied_head(directory)
        self._kept.append(directory)
        if len(self._kept) > 2:
            shutil.rmtree(self._kept.pop(0))
        return directory.resolve()

    async def server(self) -> Engine | None:
        """The engine of servers, which were asked what they are; None for the one in this process."""
        if self._is_local:
            return None
        engine = cast(Engine, self._parts.make_engine())
        await connect(self._parts.file, engine)
        return engine

    async def engines(self, server: Engine | None, step: int) -> list[Engine]:
        """The engine that samples from the weights after `step`, and behind it those to close after it."""
        if server is None and not self._is_adapter:
            model = copy.deepcopy(self.trainer.model).requires_grad_(False)
            return [LocalEngine(model, weight_version=self.version(step))]
        base: Any = server or LocalEngine(self.trainer.model, lock=self.trainer.lock)
        engine: Engine = base
        if self._is_adapter:
            for name in await base.adapters():  # of a killed process; a name stands for one set of weights
                if name.startswith(f"{NAME}@"):
                    await base.unload_adapter(name)
            engine = LoRAEngine(base, NAME)
        shutil.rmtree(self._directory, ignore_errors=True)  # also of a killed process
        await engine.update_weights(self.weights(step), self.version(step))
        return [engine] if engine is base else [engine, base]

    @contextmanager
    def applied(self) -> Iterator[Any]:
        """The model with the weights that the engine has, for a block that computes with it."""
        with ExitStack() as stack:
            stack.enter_context(self.trainer.lock)
            if self._is_adapter:
                adapters = LocalAdapters(self.trainer.model)
                adapters.load(NAME, self._kept[-1], "")
                adapter = adapters.find("", NAME)
                assert adapter is not None
                stack.enter_context(inserted(adapter.replacements))
            yield self.trainer.model
