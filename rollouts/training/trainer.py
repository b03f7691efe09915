"""`Trainer`: one base model in this process, and LoRA adapters or all of its parameters trained with AdamW."""

import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from safetensors.torch import save_file

from rollouts.engines.local.weights import checkpoint_weights, matched_weights
from rollouts.errors import ArgumentError
from rollouts.files import replaced_path
from rollouts.models.expert_routing import check_replay
from rollouts.models.forward_pass import ForwardPass
from rollouts.models.loading import load_model, without_progress_bars
from rollouts.models.lora_modules import (
    ADAPTER,
    LoraOptions,
    Replacement,
    inserted,
    linear_layers,
    lora_modules,
    peft_package,
    replacements_by,
)
from rollouts.training.checkpoints import ADAM_STATE, Checkpoint, read_checkpoint, write_checkpoint
from rollouts.training.datums import CORRECTED, Datum, check_data, corrected_data, datum_from_sample, passes
from rollouts.training.kept_tokens import padded_ids, scored_among
from rollouts.training.named_losses import Given, NamedLoss, Outcome, check_correction, loss_options, named_loss
from rollouts.training.position_logprobs import position_logprobs
from rollouts.trajectory.token_node import SAMPLING_MASK
from rollouts.values import Bounded, check_choice, check_integer, number_field

__all__ = ["AdamParams", "Datum", "LoraOptions", "LossResult", "Trainer", "datum_from_sample"]

Dtype = Literal["float32", "bfloat16"]
#: Files of a checkpoint directory that have weights, and no place beside new ones.
_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


@dataclass(frozen=True, slots=True)
class AdamParams(Bounded):
    """The numbers of one step of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); the defaults are Tinker's.

    `grad_clip_norm` is the largest norm of all gradients together; 0: no limit. Raises `ArgumentError`.
    """

    # A step is computed in float32.
    learning_rate: float = number_field(1e-4, least=0, most=10**15)
    beta1: float = number_field(0.9, least=0, below=1)
    beta2: float = number_field(0.95, least=0, below=1)
    eps: float = number_field(1e-12, above=0, most=10**15)
    weight_decay: float = number_field(0.0, least=0, most=10**15)
    grad_clip_norm: float = number_field(0.0, least=0, most=10**15)


class LossResult(NamedTuple):
    """`logprobs`: for each row log p of its targets, float32, in their shape. `metrics`: numbers by name.

    `loss:sum` is the loss; a loss with ratios adds `ratio:mean` and `clipped:mean`, the mean ratio of the
    tokens that count, and the fraction of them whose ratio was limited.
    """

    logprobs: list[np.ndarray]
    metrics: dict[str, float]


@dataclass(slots=True, eq=False)
class _Trained:
    """A trained model: parameters by name, gradients, AdamW; `replacements` put in its adapter."""

    lora: LoraOptions | None
    parameters: Mapping[str, torch.nn.Parameter]
    replacements: Sequence[Replacement]
    optimizer: torch.optim.AdamW
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Add the gradients of the block to those so far; after an error of the block they are what they were."""
        try:
            yield
            for name, parameter in self.parameters.items():
                if parameter.grad is None:
                    continue
                if name in self.gradients:
                    self.gradients[name].add_(parameter.grad)
                else:
                    # The tensor itself, which `zero_grad` below lets go and does not change.
                    self.gradients[name] = parameter.grad
        finally:
            self.optimizer.zero_grad(set_to_none=True)


class Trainer:
    """Trains LoRA adapters over one base model, or all parameters of that model, with AdamW.

        trainer = Trainer.from_pretrained("Qwen3-VL-2B-Instruct", dtype="bfloat16")
        trainer.create_model("policy", lora=LoraOptions(rank=16))
        for samples in batches:
            data = [datum_from_sample(sample, "ppo") for sample in samples]
            result = trainer.forward_backward("policy", data, "ppo")
            trainer.optim_step("policy", AdamParams(learning_rate=1e-4))
        trainer.save("policy", "checkpoints/last")

    Any model that `token_logprobs` takes. Each adapter has gradients and a state of AdamW of its own; those
    that wait need the memory of these and of their parameters, in float32, and no more. Dropout is off.

    - `tokens_per_pass` and `patches_per_pass`: the largest number of tokens, padding included, and of patches
      and frames in one forward pass. They bound the memory; the sum over the passes is that of one large
      pass.
    - `share_prefixes`: rows that begin with the same tokens and media share these in a pass.
    - `routed_experts`: a mixture of experts computes each row with the experts that the sampler took, as
      `token_logprobs(routed_experts=True)`; `datum_from_sample` takes them from samples.
    - `directory`: that of the base model.
    - `lock`: held by every call that uses the model. An engine that samples from the same model shares it:
      `LocalEngine(trainer.model, lock=trainer.lock)`.

    One thread at a time should call it. Arguments raise `ArgumentError`, rows `SampleError`, and neither
    changes anything.
    """

    def __init__(
        self,
        model: Any,
        directory: str | Path,
        *,
        tokens_per_pass: int = 8192,
        patches_per_pass: int = 32768,
        share_prefixes: bool = True,
        routed_experts: bool = False,
    ) -> None:
        self._tokens_per_pass = check_integer("tokens_per_pass", tokens_per_pass)
        self._patches_per_pass = check_integer("patches_per_pass", patches_per_pass)
        self._share_prefixes = share_prefixes
        self._routed_experts = routed_experts
        self.directory = Path(directory)
        self._forward = ForwardPass(model)
        self.model = self._forward.model.eval().requires_grad_(False)
        if routed_experts:
            check_replay(self._forward.architecture)
        # Re-entrant: who needs several calls with nothing between them holds it around them.
        self.lock = threading.RLock()
        self._modules = dict(self.model.named_modules())
        self._trained: dict[str, _Trained] = {}

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        dtype: Dtype = "float32",
        device: str | torch.device | None = None,
        **options: Any,
    ) -> Self:
        """The trainer of a checkpoint directory; by default on the GPU, if there is one.

        `dtype` is that of the base model, `options` are those of the class. Raises `ArgumentError` where
        there is no checkpoint, and `UnsupportedModelError`.
        """
        check_choice("dtype", dtype, Dtype)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        model = load_model(directory, dtype=getattr(torch, dtype))
        return cls(model.to(device), directory, **options)

    @property
    def model_type(self) -> str:
        """The architecture of the base model, by transformers' name of it."""
        return self._forward.architecture.model_type

    @property
    def max_length(self) -> int | None:
        """The largest number of tokens of a row; None: the model names none."""
        return self._forward.architecture.max_length

    def models(self) -> dict[str, LoraOptions | None]:
        """The models that are trained: by id the options of the adapter, None where all parameters are trained."""
        return {model_id: trained.lora for model_id, trained in self._trained.items()}

    def num_parameters(self, model_id: str) -> int:
        """How many numbers of a model are trained."""
        return sum(parameter.numel() for parameter in self._find(model_id).parameters.values())

    def create_model(self, model_id: str, *, lora: LoraOptions | None) -> None:
        """Begin a model: an adapter with `lora`, which changes nothing yet; None: all parameters of the base model.

        Full training changes the base model, so that it is alone: nothing else is trained beside it, and
        `unload` reads the base model again. Raises `ArgumentError` for an id that is in use, and
        `UnsupportedModelError` for a model without the layers that `lora` names.
        """
        with self.lock:
            if not isinstance(model_id, str) or not model_id or model_id in self._trained:
                raise ArgumentError("model_id", model_id, "pass a text that is the id of no other model")
            full = next((name for name, trained in self._trained.items() if trained.lora is None), None)
            if full is not None or (lora is None and self._trained):
                other = full or next(iter(self._trained))
                rule = f"full training changes the weights under every adapter; unload {other!r} first"
                raise ArgumentError("model_id", model_id, rule)
            parameters, replacements = self._all_parameters() if lora is None else self._new_adapter(lora)
            # The numbers of a step come with it (`optim_step`): they are set in the groups before each.
            optimizer = torch.optim.AdamW(parameters.values())
            self._trained[model_id] = _Trained(lora, parameters, replacements, optimizer)

    def unload(self, model_id: str) -> None:
        """Forget a model, its gradients and its state of AdamW. After full training the base model is read again."""
        with self.lock:
            trained = self._find(model_id)
            if trained.lora is None:
                weights = matched_weights(self.model, checkpoint_weights(self.model, self.directory))
                self.model.requires_grad_(False)
                for target, value in weights:
                    target.copy_(value)
            del self._trained[model_id]

    def forward(
        self,
        model_id: str,
        data: Sequence[Datum],
        loss: str,
        options: Mapping[str, float] | None = None,
        *,
        correction: Mapping[str, float] | None = None,
    ) -> LossResult:
        """Log-probabilities and loss, without gradients; the arguments are those of `forward_backward`."""
        with self.lock, torch.no_grad():
            return self._computed(self._find(model_id), data, loss, options, correction, backward=False)

    def forward_backward(
        self,
        model_id: str,
        data: Sequence[Datum],
        loss: str,
        options: Mapping[str, float] | None = None,
        *,
        correction: Mapping[str, float] | None = None,
    ) -> LossResult:
        """Add the gradient of a loss, which is a sum over all tokens of the rows, to the gradients of a model.

        `loss` is a name, `options` are its numbers, as the guide lists them: "cross_entropy",
        "importance_sampling", "ppo", "cispo", "dro", "gspo"; with a teacher "reverse_kl", "forward_kl",
        "jsd".

        `correction` has the options of `rollout_correction`, over all rows of the call. It compares the
        log-probabilities that the model has now with `logprobs`; weights take the place of the loss's ratio,
        which is 1 then (DRO has none, and reverse_kl takes no weights). Rows with `sampler_logprobs` spare it
        the forward pass for this: it compares their `logprobs`, of the model before its steps on them, with
        these, and the loss's ratio is to `logprobs`. The metrics have the figures as `correction_ess:mean`
        and so on.

        All rows are checked before the first of them is computed; `SampleError` names the index of the
        row. After any error, of memory too, the gradients are what they were.
        """
        with self.lock, torch.enable_grad():
            trained = self._find(model_id)
            with trained.accumulating():
                return self._computed(trained, data, loss, options, correction, backward=True)

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Change the parameters of a model by the gradients so far, and forget these.

        Returns `grad_norm`, the norm of all gradients before `grad_clip_norm` limits it. Raises
        `ArgumentError` for a model without gradients, and for gradients that are not finite: these are
        forgotten, the parameters stay.
        """
        with self.lock:
            trained = self._find(model_id)
            if not trained.gradients:
                raise ArgumentError("model_id", model_id, "it has no gradients; call forward_backward first")
            for group in trained.optimizer.param_groups:
                group |= {
                    "lr": params.learning_rate,
                    "betas": (params.beta1, params.beta2),
                    "eps": params.eps,
                    "weight_decay": params.weight_decay,
                }
            # Taken out first: whatever fails below, a second step does not apply the same gradients again.
            gradients, trained.gradients = trained.gradients, {}
            try:
                for name, gradient in gradients.items():
                    trained.parameters[name].grad = gradient
                limit = params.grad_clip_norm or float("inf")
                norm = float(torch.nn.utils.clip_grad_norm_(trained.parameters.values(), limit))
                if not np.isfinite(norm):
                    rule = "leave out the rows that have it; the gradients were forgotten, and the parameters stay"
                    raise ArgumentError(f"the norm of the gradients of {model_id!r}", norm, rule)
                trained.optimizer.step()
            finally:
                trained.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm}

    def save(self, model_id: str, directory: str | os.PathLike[str]) -> None:
        """Write the parameters, and the state of AdamW, to a file in `directory`, in place of one that is there.

        A process that is killed while it writes leaves the file of before. Gradients are not saved.
        """
        with self.lock:
            trained = self._find(model_id)
            by_parameter = trained.optimizer.state
            state = {
                key: {
                    name: by_parameter[each][key] for name, each in trained.parameters.items() if each in by_parameter
                }
                for key in ADAM_STATE
            }
            checkpoint = Checkpoint(trained.parameters, state)
            write_checkpoint(directory, checkpoint, trained.lora, self.model_type)

    def load(self, model_id: str, directory: str | os.PathLike[str], *, with_optimizer: bool = True) -> None:
        """Continue from what `save` has written for a model with the same options: as if it had never stopped.

        Without `with_optimizer` AdamW begins anew. Gradients are forgotten. Raises `ArgumentError`, changing
        nothing, for a directory without a checkpoint of this model.
        """
        with self.lock:
            trained = self._find(model_id)
            checkpoint = read_checkpoint(
                directory, trained.lora, self.model_type, trained.parameters, with_optimizer=with_optimizer
            )
            optimizer = torch.optim.AdamW(trained.parameters.values())
            # Into a new optimizer first: an error until then leaves the model as it was.
            for name in checkpoint.optimizer["step"]:
                parameter = trained.parameters[name]
                optimizer.state[parameter] = {
                    # AdamW has its number of steps on the CPU, and its averages beside the parameter.
                    key: checkpoint.optimizer[key][name].to("cpu" if key == "step" else parameter.device)
                    for key in ADAM_STATE
                }
            with torch.no_grad():
                for name, value in checkpoint.parameters.items():
                    trained.parameters[name].copy_(value)
            trained.optimizer, trained.gradients = optimizer, {}

    def save_for_sampler(self, model_id: str, directory: str | os.PathLike[str]) -> None:
        """Write a new directory that engines load: a LoRA adapter in PEFT's format (`load_adapter`), or a checkpoint.

        The directory appears whole or not at all. PEFT's own `from_pretrained` converts adapters of some
        models with fused experts (DeepSeek-V3, GLM-4-MoE, Qwen3-Next) and reads other layers than were
        trained, with a warning of missing adapter keys; `LocalEngine.load_adapter` reads them as they are.
        Raises `ArgumentError` for a directory that exists: a path stands for one set of weights.
        """
        with self.lock:
            trained = self._find(model_id)
            if os.path.lexists(directory):
                raise ArgumentError("directory", os.fspath(directory), "it exists already; pass another one")
            Path(directory).parent.mkdir(parents=True, exist_ok=True)
            with replaced_path(directory) as unfinished:
                if trained.lora is None:
                    self._write_model(unfinished)
                else:
                    _write_adapter(unfinished, trained, trained.lora, self.directory)

    # What the calls are made of; all of it under the lock.

    def _find(self, model_id: str) -> _Trained:
        trained = self._trained.get(model_id)
        if trained is None:
            known = ", ".join(map(repr, self._trained)) or "none"
            raise ArgumentError("model_id", model_id, f"no such model is trained here (there are: {known})")
        return trained

    def _all_parameters(self) -> tuple[dict[str, torch.nn.Parameter], tuple[Replacement, ...]]:
        if self.model.dtype != torch.float32:
            rule = 'AdamW would lose small changes of its parameters; load the model with dtype="float32", or pass lora'
            raise ArgumentError("the dtype of a model whose parameters are all trained", str(self.model.dtype), rule)
        self.model.requires_grad_(True)
        return dict(self.model.named_parameters()), ()

    def _new_adapter(self, lora: LoraOptions) -> tuple[dict[str, torch.nn.Parameter], tuple[Replacement, ...]]:
        layers = linear_layers(self._forward.architecture, lora)
        # Adapters are made on the CPU; the random numbers of the program go on as if a seed had not been set.
        with torch.random.fork_rng(devices=[], enabled=lora.seed is not None):
            if lora.seed is not None:
                torch.default_generator.manual_seed(lora.seed)
            modules = lora_modules(self._modules, layers, r=lora.rank, lora_alpha=lora.alpha)
        parameters: dict[str, torch.nn.Parameter] = {}
        for name, module in modules.items():
            for part in ("lora_A", "lora_B"):
                linear = getattr(module, part)[ADAPTER].float()  # AdamW of bfloat16 would lose small changes
                parameters[f"{name}.{part}.weight"] = linear.weight.requires_grad_(True)
        return parameters, replacements_by(self._modules, modules)

    def _computed(
        self,
        trained: _Trained,
        data: Sequence[Datum],
        loss: str,
        options: Mapping[str, float] | None,
        correction: Mapping[str, float] | None,
        *,
        backward: bool,
    ) -> LossResult:
        named, numbers = named_loss(loss), loss_options(loss, options)
        if correction is not None:
            check_correction(loss, correction)
            of_rows = CORRECTED.intersection(*(datum.inputs for datum in data[:1]))
            named = replace(named, required=named.required | of_rows)
        known, vocabulary = self._forward.architecture, len(self._forward.head.weight)
        data = check_data(data, named, known, vocabulary, routed_experts=self._routed_experts)
        if correction is None:
            return self._summed(trained, data, named, numbers, backward=backward)
        forward = partial(self._summed, trained, data, named, numbers, backward=False)
        data, figures = corrected_data(data, named, correction, forward)
        result = self._summed(trained, data, named, numbers, backward=backward)
        return result._replace(
            metrics=result.metrics | {f"correction_{name}:mean": value for name, value in figures.items()}
        )

    def _summed(
        self,
        trained: _Trained,
        data: Sequence[Datum],
        loss: NamedLoss,
        options: Mapping[str, float],
        *,
        backward: bool,
    ) -> LossResult:
        logprobs: list[np.ndarray] = [np.empty(0, np.float32)] * len(data)
        outcomes: list[Outcome] = []
        with inserted(trained.replacements):
            for rows in self._passes(data):
                values, outcome = self._pass([data[row] for row in rows], loss, options)
                if backward:
                    outcome.loss.backward()  # type: ignore[no-untyped-call]
                # Detached, or the graph of every pass would be kept until the last one.
                outcomes.append(outcome._replace(loss=outcome.loss.detach()))
                ends = np.cumsum([len(data[row]) for row in rows])
                for row, part in zip(rows, np.split(values.detach().cpu().numpy(), ends[:-1]), strict=True):
                    logprobs[row] = part
        metrics = {"loss:sum": sum(float(outcome.loss) for outcome in outcomes)}
        if tokens := sum(outcome.tokens for outcome in outcomes):
            metrics["ratio:mean"] = sum(outcome.ratios for outcome in outcomes) / tokens
            metrics["clipped:mean"] = sum(outcome.clipped for outcome in outcomes) / tokens
        return LossResult(logprobs, metrics)

    def _passes(self, data: Sequence[Datum]) -> Iterator[list[int]]:
        """The numbers of the rows of each forward pass, all with one number of targets for each token."""
        widths = [datum.target_ids.shape[1:] for datum in data]
        for width in sorted(set(widths)):
            numbers = [number for number, own in enumerate(widths) if own == width]
            rows = [data[number] for number in numbers]
            trees = self._forward.trees(rows, self._tokens_per_pass if self._share_prefixes else 0)
            for found in passes(rows, trees, self._tokens_per_pass, self._patches_per_pass):
                yield [numbers[index] for index in found]

    def _pass(
        self, data: Sequence[Datum], loss: NamedLoss, options: Mapping[str, float]
    ) -> tuple[torch.Tensor, Outcome]:
        """The log-probabilities of all targets of some rows, one row after another, and the loss."""
        device = self.model.device
        rows = np.repeat(np.arange(len(data)), [len(datum) for datum in data])
        places = np.concatenate([np.arange(len(datum)) for datum in data])
        targets = np.concatenate([datum.target_ids for datum in data])
        if loss.has_candidates:
            candidates = np.concatenate([datum.inputs["teacher_top_ids"] for datum in data])
            targets = np.concatenate([targets[:, None], candidates], axis=1)
        score = partial(
            position_logprobs,
            self._forward,
            data,
            (rows, places),
            pad_id=self._forward.architecture.neutral_id,
            max_row_tokens=self._tokens_per_pass if self._share_prefixes else 0,
        )
        kept = padded_ids([datum.inputs.get(SAMPLING_MASK) for datum in data], map(len, data))
        values = scored_among(kept, torch.from_numpy(targets.astype(np.int64)), score).logprobs
        of_rows = [(datum.target_ids.shape, loss.inputs_of(datum.inputs)) for datum in data]
        inputs = {
            name: np.concatenate([one.get(name, np.ones(shape)) for shape, one in of_rows])
            for name in dict.fromkeys(name for _, one in of_rows for name in one if name != SAMPLING_MASK)
        }
        tensors = {name: torch.from_numpy(array.astype(np.float32)).to(device)[None] for name, array in inputs.items()}
        if loss.has_candidates:
            values, tensors["candidate_logprobs"] = values[:, 0], values[None, :, 1:]
        return values, loss.compute(Given(values[None], tensors, torch.from_numpy(rows).to(device)[None], options))

    def _write_model(self, directory: Path) -> None:
        with without_progress_bars():
            self.model.save_pretrained(directory)
        for path in self.directory.iterdir():  # the tokenizer, the template, the processor
            if path.is_file() and not path.name.endswith(_WEIGHT_FILES) and not (directory / path.name).exists():
                shutil.copy(path, directory)


def _write_adapter(directory: Path, trained: _Trained, lora: LoraOptions, base: Path) -> None:
    directory.mkdir()
    modules = sorted({name.rsplit(".lora_", 1)[0] for name in trained.parameters})
    config = peft_package().LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=modules,
        base_model_name_or_path=str(base),
        inference_mode=True,
    )
    config.save_pretrained(directory)
    tensors = {f"base_model.model.{name}": value.detach() for name, value in trained.parameters.items()}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
