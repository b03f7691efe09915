"""`LocalEngine`: checks requests, queues them for a worker thread that owns the model, and replaces its weights."""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from renderers.errors import MissingExtraError
from renderers.placement import item_placement_error
from renderers.process.caches import ByteLRU
from rollouts.calls import gathered
from rollouts.engines.continuation import completed, with_index
from rollouts.engines.event_loop import EngineLoop
from rollouts.engines.local.request_queue import PromptObserver, RequestQueue, RunningRequest, closed_error
from rollouts.engines.lora import adapter_labels
from rollouts.engines.protocol import (
    Completion,
    Engine,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    InFlight,
    TokenDelta,
    TokenListener,
    check_update_arguments,
    check_version,
)
from rollouts.engines.request_limits import check_limits, check_prompt, check_streamable
from rollouts.engines.weight_deltas import ABOUT
from rollouts.errors import InvalidRequestError, UnsupportedModelError
from rollouts.values import check_integer

try:
    import torch
    import transformers  # noqa: F401
except ImportError as error:
    raise MissingExtraError("LocalEngine", "torch", "torch") from error

from rollouts.engines.local.adapters import LocalAdapters
from rollouts.engines.local.batch import Batch
from rollouts.engines.local.weights import apply_deltas, as_tensor, checkpoint_weights, matched_weights
from rollouts.models.architecture import Architecture
from rollouts.models.forward_pass import ForwardPass
from rollouts.models.item_features import FeatureCache, ItemFeatures
from rollouts.models.loading import load_model
from rollouts.models.lora_modules import inserted


class LocalEngine(Engine):
    """An engine over a model of transformers in this process: a text model, or one that sees or hears.

    Requests that arrive while the model is busy, or in the same round of the event loop, run as one batch.
    Identical prompts are prefilled once; for Qwen3-VL an image is encoded once per weight version. Where the
    model fails on a batch, each of its requests runs alone, and only the one that fails again has an error.

    A request with an `adapter` is sampled with that LoRA adapter, which `load_adapter` has loaded (extra
    `lora`); requests of different adapters run in different batches. The version of its tokens is the name of
    the adapter.

    The engine belongs to the event loop on which it is used first; after that is closed, another one may
    follow.

    `max_batch_rows` bounds how many completions are sampled at once. `lock` is held while the model runs and
    while its weights change, for a model that something else uses as well:
    `LocalEngine(trainer.model, lock=trainer.lock)`. `is_wanted` is asked after each token: True lets others
    have the lock before the next one, where they do not change the weights. Raises `UnsupportedModelError`
    for a model whose hidden states or output layer are not accessible (see `token_logprobs`).
    """

    def __init__(
        self,
        model: Any,
        *,
        weight_version: str = "0",
        max_batch_rows: int = 512,
        lock: AbstractContextManager[Any] | None = None,
        is_wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        check_integer("max_batch_rows", max_batch_rows)
        check_version("weight_version", weight_version)
        self._lock = lock or nullcontext()
        self._is_wanted = is_wanted
        try:
            with self._lock:
                self._forward = ForwardPass(model)
                self._model = self._forward.model.eval()
                self._forward.check_steps()
                self._adapters = LocalAdapters(self._model)
        except UnsupportedModelError as error:
            cure = "To sample from another model, serve it with vLLM and use VLLMEngine"
            raise UnsupportedModelError(error.model_type, f"{error.reason}. {cure}") from error
        # By adapter, which may change the vision tower, version of the weights, and mm_hash.
        # Features of images that are kept on the device of the model.
        self._features: ByteLRU[tuple[Hashable, str], ItemFeatures] = ByteLRU(256 * 2**20)
        self._weight_version = weight_version
        text_config = self._forward.architecture.text_config
        self._max_length = _context_length(self._forward.architecture)
        self._vocab_size = int(text_config.vocab_size)
        self._max_batch_rows = max_batch_rows
        self._begin()

    def _begin(self) -> None:
        """The engine has no requests."""
        self._closed = threading.Event()
        # One thread: batches and weight updates run one after another, so no completion mixes two sets of
        # weights.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="local-engine")
        self._interrupting: deque[str] = deque()  # the versions of updates that wait for the running batch to stop
        self._loop = EngineLoop()
        self._queue = RequestQueue(self._run, self._worker, self._closed, self._max_batch_rows)
        # Request id -> the requests that run for it: itself, or the continuations of its completions.
        self._running: dict[str, list[RunningRequest]] = {}

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, attn_implementation: str | dict[str, str] = "sdpa", **options: Any
    ) -> Self:
        """Load a checkpoint directory in float32. Raises `ArgumentError` where there is none."""
        return cls(load_model(directory, attn_implementation=attn_implementation), **options)

    def beside(self) -> Self:
        """An engine over the same model, whose batches take turns with these (`lock`, `is_wanted`)."""
        other = copy(self)
        other._begin()
        return other

    @property
    def weight_version(self) -> str:
        return self._weight_version

    @property
    def vocab_size(self) -> int:
        """The number of ids of the model, including those that its tokenizer has no token for."""
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        """The largest number of tokens of a prompt and its completion together."""
        return self._max_length

    @property
    def streams(self) -> bool:
        return True

    async def generate(
        self,
        request: GenerateRequest,
        listen: TokenListener | None = None,
        *,
        observe: PromptObserver | None = None,
    ) -> GenerateResult:
        """Sample `n` completions. `listen` receives each token on the event loop, as soon as it is sampled.

        Of a request that `scores_prompt`, `observe(start, logprobs)` is called on the worker thread for each
        part of the prompt: float32 (m, vocabulary), the log-probabilities in the places of its tokens `start
        + 1` to `start + m`. After a failure in a batch with other requests it is called again.

        Raises `InvalidRequestError`, `ContextLengthError`, `EngineClosedError`; `EngineFailedError` for a request on
        which the model fails.
        """
        if listen is not None:
            check_streamable(request)
        return await self._generate(request, listen, observe)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: their `generate` returns the tokens so far, with `FinishReason.ABORT`.

        A running request ends after the token that is sampled now, a waiting one at once, without tokens.
        """
        self._enter("abort")
        for request_id in request_ids:
            for running in self._running.get(request_id, ()):
                running.is_aborted = True
        self._queue.end_aborted()

    async def abort_all(self) -> None:
        """End every request of this engine."""
        await self.abort(list(self._running))

    def expecting_request(self) -> AbstractContextManager[None]:
        """Announce a request that is made at the end of the block, if it is made; the next batch waits for it.

        Episodes whose prompts are rendered on threads then end up in one batch, and what that batch holds
        does not depend on timing. A batch starts without announced requests that take longer than two seconds.
        """
        self._enter("expecting_request")
        return self._queue.expecting_request()

    async def update_weights(
        self, weights: Mapping[str, Any] | str | Path, version: str, *, in_flight: InFlight = "abort"
    ) -> None:
        """Replace every parameter with tensors or arrays of the same shapes, or with those of a checkpoint directory.

        Tensors have the names of `state_dict()`, or those of the files of a checkpoint. They are copied, so
        that a trainer may change its own once the call has returned. Of names that are one tensor in the
        model (`lm_head.weight` where it is tied to the embedding) one is enough; several must agree. Buffers
        may be left out. A directory of `write_weight_delta` has only what changes of the weights in use.

        With `in_flight="wait"` the running batch finishes first. With "abort" and "keep", which are the same
        here, it stops after the token that it samples now, and its completions continue with the new weights,
        after their prompts and tokens have been read again. A call that is cancelled may still replace the
        weights. Raises `ArgumentError`; `WeightUpdateError`, changing nothing, if names, shapes or tied
        tensors differ or the directory holds no checkpoint of this model.
        """
        check_update_arguments(version, in_flight)
        interrupts = in_flight != "wait"
        if interrupts:
            # Before the worker has the update: the batch that runs now stops at its next token.
            self._interrupting.append(version)
        try:
            loading = self._worker.submit(self._load, weights, version, interrupts)
        except RuntimeError as error:  # the worker was shut down
            raise closed_error("update_weights") from error
        # Not cancelled with the caller: a load that never runs would leave its version in `_interrupting`.
        await asyncio.shield(asyncio.wrap_future(loading))

    async def update_weight_version(self, version: str) -> None:
        """Label batches from now on. Raises `ArgumentError` for a version that is no text or empty."""
        check_version("version", version)
        self._weight_version = version

    async def load_adapter(self, name: str, directory: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter, the directory that `save_pretrained` of peft writes, under a name of its own.

        LoRA of linear layers, the output layer excepted, without DoRA and further trained modules. Raises
        `WeightUpdateError` where it is not loaded, also for a name that is in use: a name stands for one set
        of weights. Raises `ArgumentError`, and `MissingExtraError` without PEFT.
        """
        if self._closed.is_set():
            raise closed_error("load_adapter")

        def load() -> None:
            with self._lock:  # PEFT freezes parameters of the model for a moment
                self._adapters.load(name, Path(directory), self._weight_version)

        await asyncio.to_thread(load)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests that have begun with it keep it to their ends. Raises `UnknownAdapterError`."""
        self._adapters.remove(name)

    async def adapters(self) -> Mapping[str, str]:
        """The loaded adapters: the directory of each by its name."""
        return self._adapters.directories()

    async def close(self) -> None:
        """Fail the waiting requests and stop the worker thread once its batch is done."""
        self._enter("close")
        self._closed.set()
        self._queue.fail_all(closed_error("waiting"))
        # On a thread, because the batch that runs may take long and the event loop must go on.
        await asyncio.to_thread(self._worker.shutdown)

    # On the event loop.

    async def _generate(
        self, request: GenerateRequest, listen: TokenListener | None, observe: PromptObserver | None = None
    ) -> GenerateResult:
        self._enter(request.request_id)
        check_limits(request)
        self._check(request)
        adapter = self._adapters.find(request.request_id, request.adapter)
        result = await self._sampled(RunningRequest(request, _on_loop(listen), adapter, observe=observe), listen)
        if adapter is None:
            return result
        return replace(result, completions=adapter_labels(result.completions, adapter.name, adapter.base_version))

    async def _sampled(self, running: RunningRequest, listen: TokenListener | None) -> GenerateResult:
        request = running.request
        with self._registered(request.request_id, running):
            result = await self._queue.generate(running)
            if all(completion.finish_reason is not FinishReason.ABORT for completion in result.completions):
                return result
            completions = await gathered(self._complete(running, partial, listen) for partial in result.completions)
            return replace(result, completions=completions)

    async def _complete(self, cut_off: RunningRequest, partial: Completion, listen: TokenListener | None) -> Completion:
        """A completion, continued as often as it is cut off, until its request is aborted."""

        async def send(rest_request: GenerateRequest) -> Completion:
            listen_to_rest = _on_loop(with_index(listen, partial.index))
            running = RunningRequest(rest_request, listen_to_rest, cut_off.adapter, runs_alone=cut_off.runs_alone)
            with self._registered(cut_off.request.request_id, running):
                return (await self._queue.generate(running)).completions[0]

        async def context_length() -> int | None:
            return None if cut_off.is_aborted else self._max_length

        return await completed(cut_off.request, partial, context_length, send)

    @contextmanager
    def _registered(self, request_id: str, running: RunningRequest) -> Iterator[None]:
        """While the block runs, `abort` of the id ends the request."""
        self._running.setdefault(request_id, []).append(running)
        try:
            yield
        finally:
            self._running[request_id].remove(running)
            if not self._running[request_id]:
                del self._running[request_id]

    def _enter(self, name: str) -> None:
        """Raises `EngineError` for the request or call `name` on another event loop than that of the engine."""
        if self._loop.enter(name):
            self._queue = RequestQueue(self._run, self._worker, self._closed, self._max_batch_rows)

    def _check(self, request: GenerateRequest) -> None:
        name, sampling = request.request_id, request.sampling
        if self._closed.is_set():
            raise closed_error(name)
        if sampling.extra:
            option = min(sampling.extra)
            raise InvalidRequestError(
                name, f"LocalEngine has no sampling option {option!r}; leave it out, or sample with vLLM"
            )
        if sampling.seed is not None and sampling.seed < 0:
            raise InvalidRequestError(name, f"seed is {sampling.seed}; LocalEngine takes 0 or more")
        if (most := max(sampling.top_logprobs, request.prompt_top_logprobs)) > self._vocab_size:
            rule = f"the {most} likeliest tokens are requested and the vocabulary has {self._vocab_size}; ask for fewer"
            raise InvalidRequestError(name, rule)
        ids = check_prompt(request, self._max_length, self._vocab_size)
        if (error := item_placement_error(request.media, len(ids))) is not None:
            raise InvalidRequestError(name, error)
        placeholders = self._forward.architecture.placeholder_ids
        for item, item_range in request.media:
            for start, end in item_range.runs:
                if not placeholders.issuperset(ids[start:end].tolist()):
                    raise InvalidRequestError(name, f"tokens {start}:{end} are not all the {item.modality} placeholder")

    # On the worker thread.

    def _run(self, requests: Sequence[RunningRequest]) -> list[GenerateResult]:
        adapter = requests[0].adapter  # that of all of them

        with torch.inference_mode(), ExitStack() as turn:

            def take_turn() -> None:
                turn.enter_context(self._lock)
                turn.enter_context(inserted(() if adapter is None else adapter.replacements))

            def is_interrupted() -> bool:
                if self._is_wanted():
                    # With the lock goes the adapter: who takes it finds the model's own modules.
                    turn.close()
                    take_turn()
                return bool(self._interrupting)

            take_turn()
            # With the lock held: no update of the weights comes between this and the batch.
            version = self._weight_version
            # Also a trainer that has this model changes weights, in place.
            changes = sum(parameter._version for parameter in self._model.parameters())
            weights = None if adapter is None else adapter.number, version, changes
            features = FeatureCache(self._features, weights)
            return Batch(self._forward, requests, features, self._max_length, is_interrupted).run(version)

    def _load(self, weights: Mapping[str, Any] | str | Path, version: str, interrupts: bool) -> None:
        if interrupts:
            self._interrupting.popleft()
        # In place, because adapters and other engines refer to these tensors.
        if not isinstance(weights, Mapping) and Path(weights, ABOUT).is_file():
            with self._lock:
                apply_deltas(self._model, weights, self._weight_version)
        else:
            if not isinstance(weights, Mapping) or not weights.keys() <= self._model.state_dict().keys():
                weights = checkpoint_weights(self._model, weights)
            with self._lock, torch.no_grad():
                for target, value in matched_weights(self._model, weights):
                    target.copy_(as_tensor(value))
        self._features.clear()
        self._weight_version = version


def _context_length(architecture: Architecture) -> int:
    """The largest number of tokens of prompt and completion. Raises `UnsupportedModelError` where it is not known."""
    length = architecture.max_length
    if length is None:
        raise UnsupportedModelError(
            architecture.text_config.model_type,
            "its configuration has no max_position_embeddings, so the length of a request cannot be "
            "checked. Set it in config.json to the longest prompt and completion that the model can read",
        )
    return int(length)


def _on_loop(listen: TokenListener | None) -> TokenListener | None:
    """A listener for the worker thread that calls `listen` on the running event loop."""
    if listen is None:
        return None
    loop = asyncio.get_running_loop()

    def report(delta: TokenDelta) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody waits for the tokens
            loop.call_soon_threadsafe(listen, delta)

    return report
