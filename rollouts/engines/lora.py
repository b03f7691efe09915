"""A LoRA adapter of an engine as an engine of its own, whose weights a trainer replaces."""

import asyncio
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rollouts.calls import gathered
from rollouts.engines.continuation import completed
from rollouts.engines.forwarding import ForwardingEngine
from rollouts.engines.protocol import (
    Completion,
    Engine,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    InFlight,
    TokenListener,
    WeightSpan,
    check_adapter_name,
    check_update_arguments,
)
from rollouts.errors import (
    ArgumentError,
    CapabilityError,
    EngineClosedError,
    EngineError,
    UnknownAdapterError,
    WeightUpdateError,
)

log = logging.getLogger("rollouts.engines.lora")

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def adapter_labels(completions: Iterable[Completion], name: str, base_version: str | None) -> list[Completion]:
    """The completions with the name of an adapter as the version of their tokens.

    Tokens over other base weights than `base_version`, those that the adapter was loaded with, are labelled
    "NAME on VERSION". None: not known.
    """

    def label(span: WeightSpan) -> WeightSpan:
        version = name if base_version in (None, span.version) else f"{name} on {span.version}"
        return WeightSpan(version, span.start, span.end)

    return [replace(each, weight_spans=tuple(map(label, each.weight_spans))) for each in completions]


def adapter_exists_error(holder: str, name: str, directory: object) -> WeightUpdateError:
    """The error for a name that `holder` has an adapter of `directory` under."""
    return WeightUpdateError(
        f"{holder} an adapter {name!r} already (of {directory}), and a name stands for one set of weights; load the "
        'new ones under another name, such as "policy@2", and unload the old'
    )


def checked_adapter_directory(directory: str | os.PathLike[str]) -> str:
    """The absolute path of a directory with an adapter. Raises `WeightUpdateError`."""
    path = Path(directory).absolute()
    absent = [] if (path / _CONFIG).is_file() else [_CONFIG]
    if not any((path / name).is_file() for name in _WEIGHTS):
        absent.append(_WEIGHTS[0])
    if absent:
        raise WeightUpdateError(
            f"{path} holds no adapter: it lacks {' and '.join(absent)}. Pass a directory that "
            "`save_pretrained` of peft has written. Where the server sees other files than this process, "
            "check=False leaves out this check"
        )
    return str(path)


class LoRAEngine(ForwardingEngine):
    """Samples with one LoRA adapter of another engine, and replaces it where another engine replaces its weights.

        policy = LoRAEngine(VLLMEngine(url), "policy")
        await policy.update_weights(directory, "policy@1")

    It takes the place of an engine in `run_episode` and `Runner`. Before the first update it samples with the
    weights of the model alone, as an adapter that training has not changed yet does. A version begins with
    the name of the adapter and "@", and is the name under which the server has these weights: the tokens are
    labelled with it, and `GenerateRequest.adapter` can name it elsewhere. Requests that name an adapter
    themselves are passed on unchanged.

    `close` unloads the adapter; the other engine stays open, because it may have further adapters.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        check_adapter_name(name)
        super().__init__(engine)
        self.name = name
        self._adapter: str | None = None  # the version in use
        self._running: dict[str, str | None] = {}  # by request id: the adapter that samples it
        self._interrupted: set[str] = set()
        # Updates in the order of their calls: a load that takes longer must not end behind a later one.
        self._updating = asyncio.Lock()
        self._closed = False

    @property
    def weight_version(self) -> str:
        """The version in use; before the first update that of the other engine."""
        return self._adapter or self.engine.weight_version

    @property
    def streams(self) -> bool:
        return False

    async def served_version(self) -> str | None:
        return self._adapter or await super().served_version()

    async def generate(self, request: GenerateRequest, listen: TokenListener | None = None) -> GenerateResult:
        """Sample `n` completions with the adapter. Raises what the other engine raises."""
        if self._closed:
            raise EngineClosedError(request.request_id, f"the adapter {self.name!r} is closed")
        if request.adapter is not None:
            return await self.engine.generate(request)
        result, interrupted = await self._sample(request)
        if not interrupted or all(each.finish_reason is not FinishReason.ABORT for each in result.completions):
            return result
        completions = await gathered(self._complete(request, partial) for partial in result.completions)
        return replace(result, completions=completions)

    async def update_weights(
        self, weights: str | os.PathLike[str], version: str, *, in_flight: InFlight = "abort"
    ) -> None:
        """Load the adapter of the directory `weights` as `version`, sample with it from now on, and unload the old one.

        No pause: with "wait", requests in flight end with the old weights, beside new ones that have the new
        weights; with "abort" and "keep", which are the same here, they continue from their tokens with the
        new weights. Raises `ArgumentError` for a version without the name of the adapter; `WeightUpdateError`
        and `EngineError` where the adapter was not loaded: the old one is in use then.
        """
        check_update_arguments(version, in_flight)
        if not version.startswith(f"{self.name}@"):
            rule = f'the version of an adapter names the adapter; pass one such as "{self.name}@3"'
            raise ArgumentError("version", version, rule)
        async with self._updating:
            await self.engine.load_adapter(version, weights)
            old, self._adapter = self._adapter, version
            if in_flight != "wait":  # `generate` continues the requests of the old one with the one in use
                requests = [name for name, used in self._running.items() if used == old]
                self._interrupted.update(requests)
                await self._abort(requests)
            if old is not None:
                await self._unload(old)

    async def abort_all(self) -> None:
        """End every request of this adapter, and none of others."""
        await self._abort(list(self._running))

    async def close(self) -> None:
        """Refuse further requests, and unload the adapter once its requests have ended."""
        self._closed = True
        async with self._updating:
            old, self._adapter = self._adapter, None
            if old is not None:
                await self._unload(old)

    async def _sample(self, request: GenerateRequest) -> tuple[GenerateResult, bool]:
        """Sample with the adapter in use; also whether an update has cut the request off."""
        while True:
            adapter = self._adapter
            self._running[request.request_id] = adapter
            try:
                result = await self.engine.generate(replace(request, adapter=adapter))
                return result, request.request_id in self._interrupted
            except UnknownAdapterError:
                if adapter == self._adapter:
                    raise
                # The adapter was replaced before the request reached the server: sample with the new one.
            finally:
                del self._running[request.request_id]
                self._interrupted.discard(request.request_id)

    async def _complete(self, request: GenerateRequest, partial: Completion) -> Completion:
        """A completion, continued with the adapter in use as often as updates cut it off."""
        interrupted = True

        async def send(rest_request: GenerateRequest) -> Completion:
            nonlocal interrupted
            result, interrupted = await self._sample(rest_request)
            return result.completions[0]

        async def context_length() -> int | None:
            # An abort that no update asked for is the caller's: None leaves the completion as it is.
            return (await self.engine.context_length() or 2**31) if interrupted else None

        return await completed(request, partial, context_length, send)

    async def _abort(self, request_ids: list[str]) -> None:
        if request_ids:
            with suppress(CapabilityError):
                await self.engine.abort(request_ids)

    async def _unload(self, adapter: str) -> None:
        try:
            await self.engine.unload_adapter(adapter)
        except (EngineError, WeightUpdateError) as error:
            log.warning("the adapter %s is not used any more, but could not be unloaded: %s", adapter, error)
