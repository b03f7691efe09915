"""New weights for vLLM servers from the tensors of a trainer, by vLLM's weight transfer."""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol, Self

from rollouts.engines.protocol import GenerateRequest, GenerateResult, InFlight, check_update_arguments
from rollouts.engines.vllm.control import ServerControl
from rollouts.engines.vllm.weight_updates import HEAD, Transfer, checkpoint_shapes, ties_embeddings
from rollouts.errors import ArgumentError, EngineError, WeightUpdateError, describe_exception
from rollouts.values import check_integer

__all__ = ["IPCSender", "NCCLSender", "TensorInfo", "TransferEngine", "WeightSender"]


#: A tensor of the trainer with its name in the checkpoint.
NamedTensor = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The name of a tensor, its dtype as torch names it without "torch." ("bfloat16"), and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Any) -> Self:
        """Of a tensor of torch, or of anything with `dtype` and `shape`."""
        return cls(name, str(tensor.dtype).rpartition(".")[2], tuple(int(size) for size in tensor.shape))


def update_info(bucket: Sequence[NamedTensor]) -> dict[str, Any]:
    """What `/update_weights` is told about the tensors of a bucket, in their order."""
    infos = [TensorInfo.of(name, tensor) for name, tensor in bucket]
    return {
        "names": [info.name for info in infos],
        "dtype_names": [info.dtype for info in infos],
        "shapes": [list(info.shape) for info in infos],
    }


def buckets(tensors: Iterable[NamedTensor], max_bytes: int) -> Iterator[list[NamedTensor]]:
    """The tensors in their order, in lists of at most `max_bytes`; a larger tensor has a list of its own."""
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in tensors:
        added = _num_bytes(tensor)
        if bucket and size + added > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += added
    if bucket:
        yield bucket


def _num_bytes(tensor: Any) -> int:
    return int(prod(tensor.shape) * tensor.dtype.itemsize)


class ExpectedTensors:
    """The tensors that a transfer must have: those of a checkpoint of the same model, each once and in its shape.

    A server that receives others loads part of them, and generates garbage or dies. `shapes` None: nothing is known,
    and only names that come twice are refused.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] | None, source: object) -> None:
        self._shapes = shapes
        self._source = source
        self._seen: set[str] = set()

    @classmethod
    def of_checkpoint(cls, directory: str | None) -> Self:
        """Those of the checkpoint that a server was started with, where this process can read it.

        The output layer must come also where the model ties it to its embeddings: vLLM would keep the one of
        before.
        """
        if directory is None or not any(Path(directory).glob("*.safetensors")):
            return cls(None, directory)
        shapes = dict(checkpoint_shapes(Path(directory)))
        if HEAD not in shapes and ties_embeddings(Path(directory)):
            embeddings = [name for name in shapes if name.endswith("embed_tokens.weight") and "visual" not in name]
            shapes.update((HEAD, shapes[name]) for name in embeddings[:1])
        return cls(shapes, directory)

    def checked(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """The tensors, checked as they come. Raises `WeightUpdateError`, which names the first wrong one."""
        for name, tensor in tensors:
            self._check(name, TensorInfo.of(name, tensor).shape)
            yield name, tensor
        if missing := sorted((self._shapes or {}).keys() - self._seen):
            tied = f" ({HEAD} also where the model ties it to its embeddings)" if HEAD in missing else ""
            raise WeightUpdateError(
                f"{len(missing)} tensors of {self._source} were not sent, such as {missing[0]}; send every tensor{tied}"
            )

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `WeightUpdateError` for a tensor that the model has not, has in another shape, or that came before."""
        if name in self._seen:
            raise WeightUpdateError(f"the tensor {name} comes twice; send each once")
        self._seen.add(name)
        if self._shapes is None:
            return
        if name not in self._shapes:
            raise WeightUpdateError(
                f"{self._source} has no tensor {name}; use the names of its checkpoint files, which a model of "
                "transformers may name otherwise (`model.save_pretrained` writes them)"
            )
        if self._shapes[name] != shape:
            raise WeightUpdateError(f"{name} has shape {shape}, in {self._source} it has {self._shapes[name]}")


# Transports for the tensors of a transfer. vLLM's own classes move the bytes, and are imported when they are used.


class WeightSender(Protocol):
    """The trainer's end of a transport. Its methods block, and are called on threads, one at a time.

    A sender that failed is closed, and opened again for the next transfer.
    """

    def init_info(self, workers_before: int, num_workers: int) -> Mapping[str, Any]:
        """What one server needs to join. The servers have `num_workers` in all, `workers_before` at those before it."""
        ...

    def open(self, num_workers: int) -> None:
        """Join. The servers join at the same time."""
        ...

    def update_info(self, bucket: Sequence[NamedTensor]) -> Mapping[str, Any]:
        """What the servers need to receive a bucket, beside the names, dtypes and shapes of its tensors."""
        ...

    def send(self, bucket: Sequence[NamedTensor]) -> None:
        """Send the tensors of a bucket. The servers receive them at the same time."""
        ...

    def close(self) -> None:
        """Leave; also after an error."""
        ...


class NCCLSender:
    """Broadcasts with NCCL from the current GPU of this process to the workers of all servers.

    `address` and `port` are those of this machine, where the servers reach it: they join a store that this process
    opens there. Needs vllm in this environment. Written against vLLM 0.32 (`--weight-transfer-config
    '{"backend": "nccl"}'`); no test runs it.
    """

    def __init__(self, address: str, port: int) -> None:
        if not isinstance(port, int) or not 0 < port < 2**16:
            raise ArgumentError("port", port, "pass a free port of this machine, from 1 to 65535")
        self._address = address
        self._port = port
        self._group: Any = None

    def init_info(self, workers_before: int, num_workers: int) -> Mapping[str, Any]:
        return {
            "rank_offset": 1 + workers_before,
            "master_address": self._address,
            "master_port": self._port,
            "world_size": 1 + num_workers,  # this process has rank 0
            "packed": False,  # each tensor is a broadcast of its own; the buckets bound the memory
        }

    def open(self, num_workers: int) -> None:
        try:
            # Not installed where mypy runs.
            from vllm.distributed.weight_transfer.nccl_common import (  # type: ignore[import-not-found, unused-ignore]
                trainer_init,
            )
        except ImportError as error:
            reason = "NCCLSender uses the transport of vllm, which is not installed here: pip install vllm"
            raise WeightUpdateError(reason) from error
        self._group = trainer_init(dict(self.init_info(0, num_workers)))

    def update_info(self, bucket: Sequence[NamedTensor]) -> Mapping[str, Any]:
        return {}

    def send(self, bucket: Sequence[NamedTensor]) -> None:
        import torch

        stream = torch.cuda.current_stream()
        # NCCL sends the bytes at the address of a tensor: a view with strides has others there.
        contiguous = [tensor.contiguous() for _, tensor in bucket]
        for tensor in contiguous:
            self._group.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.destroy()


class IPCSender:
    """Lends the memory of tensors on this machine's GPUs to the workers on the same GPUs, by CUDA IPC.

    The handles are pickled, as vLLM's own client does: the servers need `VLLM_ALLOW_INSECURE_SERIALIZATION=1`, with
    which whoever reaches them can run code in them. Written against vLLM 0.32 (`--weight-transfer-config
    '{"backend": "ipc"}'`); no test runs it.
    """

    def __init__(self) -> None:
        self._lent: list[Any] = []

    def init_info(self, workers_before: int, num_workers: int) -> Mapping[str, Any]:
        return {"packed": False}

    def open(self, num_workers: int) -> None:
        pass

    def update_info(self, bucket: Sequence[NamedTensor]) -> Mapping[str, Any]:
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        self._lent = [tensor.detach().contiguous() for _, tensor in bucket]  # kept until the servers have read them
        handles = [
            {str(torch.cuda.get_device_properties(tensor.device).uuid): reduce_tensor(tensor)[1]}  # type: ignore[no-untyped-call]
            for tensor in self._lent
        ]
        return {"ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}

    def send(self, bucket: Sequence[NamedTensor]) -> None:
        pass  # the servers read the memory themselves

    def close(self) -> None:
        self._lent = []


log = logging.getLogger("rollouts.engines.vllm")

_BUCKET_BYTES = 2**30


class TransferEngine:
    """An engine whose weights arrive as tensors of a trainer, by vLLM's weight transfer, and not as files.

        engine = TransferEngine(VLLMEngine(url), NCCLSender("10.0.0.1", 29500))
        await engine.update_weights(model.state_dict(), "step-7")

    It takes the place of the engine in `run_episode` and `Runner`. `engine` is a `VLLMEngine` or an `EngineFleet` of
    them; all servers receive each tensor together. They must run in development mode with --weight-transfer-config.
    Tensors are sent in buckets of at most `bucket_bytes`, in each of which `seconds` may pass.

    All servers take the new weights, or none: after a failure, each loads its weights of before again where they came
    from a directory; otherwise it stays paused, and the error says so. `sender` joins the servers at the first update,
    and again after a failure and after servers have come or gone.
    """

    def __init__(
        self, engine: Any, sender: WeightSender, *, bucket_bytes: int = _BUCKET_BYTES, seconds: float = 300.0
    ) -> None:
        check_integer("bucket_bytes", bucket_bytes, rule="pass a number of bytes of at least 1")
        self._engine = engine
        self._sender = sender
        self._bucket_bytes = bucket_bytes
        self._seconds = seconds
        self._joined: tuple[str, ...] = ()  # the addresses of the servers that the sender has joined
        self._updating = False

    @property
    def weight_version(self) -> str:
        """The version of the engine."""
        return str(self._engine.weight_version)

    @property
    def vocab_size(self) -> int | None:
        return getattr(self._engine, "vocab_size", None)

    @property
    def control(self) -> Any:
        """The control calls of the engine."""
        return self._engine.control

    @property
    def media_cache_counts(self) -> Any:
        """Those of the engine."""
        return self._engine.media_cache_counts

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample from the engine. Raises what the engine raises."""
        result: GenerateResult = await self._engine.generate(request)
        return result

    async def update_weights(
        self, weights: Mapping[str, Any] | Iterable[NamedTensor], version: str, *, in_flight: InFlight = "abort"
    ) -> None:
        """Send tensors to all servers: a mapping from names to tensors, or pairs of them, which are read once.

        The names are those of the checkpoint files, and every tensor of the checkpoint must come, in its shape; of
        another dtype the servers cast it. Raises `ArgumentError`, `WeightUpdateError`, and `EngineError` where a server
        cannot be reached before the transfer; `EngineError` while another update runs.
        """
        check_update_arguments(version, in_flight)
        if isinstance(weights, str) or not isinstance(weights, Mapping | Iterable):
            raise ArgumentError("weights", weights, "pass a mapping from names to tensors, or pairs of name and tensor")
        if self._updating:
            raise EngineError("update_weights", "another update runs; wait for it")
        updating = getattr(self._engine, "updating_weights", nullcontext)
        self._updating = True
        try:
            with updating():
                await self._update(weights.items() if isinstance(weights, Mapping) else weights, version, in_flight)
        finally:
            self._updating = False

    async def close(self) -> None:
        """Leave the servers, and close the engine."""
        await self._leave()
        await self._engine.close()

    # One update.

    async def _update(self, tensors: Iterable[NamedTensor], version: str, in_flight: InFlight) -> None:
        servers = await self._servers()
        controls = list(servers.values())
        expected = ExpectedTensors.of_checkpoint(await controls[0].initial_directory())
        await self._join(controls)
        begun = await self._begin(controls, in_flight)
        try:
            await self._send(controls, buckets(expected.checked(tensors), self._bucket_bytes))
        except Exception as error:
            states = await asyncio.shield(self._abandon(controls, begun, error))
            text = f"the weights {version!r} were not taken: {error}. {states}"
            raise WeightUpdateError(text).concern(*(control.base_url for control in controls)) from error
        except BaseException as error:
            reason = WeightUpdateError(f"the transfer was ended by {describe_exception(error)}")
            log.error("%s", await asyncio.shield(self._abandon(controls, begun, reason)))
            raise
        finish = [control.finish_transfer(transfer, version) for control, transfer in zip(controls, begun, strict=True)]
        outcomes = await asyncio.gather(*finish, return_exceptions=True)
        failed = {name: error for name, error in zip(servers, outcomes, strict=True) if isinstance(error, Exception)}
        record = getattr(self._engine, "record_weights", None)
        if record is not None and len(failed) < len(servers):
            record(version, failed)
        if failed:
            listed = "; ".join(map(str, failed.values()))
            text = f"{len(failed)} of {len(servers)} servers have not taken the weights {version!r}: {listed}"
            raise WeightUpdateError(text).concern_servers_of(failed.values()) from next(iter(failed.values()))

    async def _servers(self) -> dict[str, ServerControl]:
        """The control calls of the servers that are healthy, by the names of their members in a fleet."""
        engines = getattr(self._engine, "engines", None) or {self._engine.base_url: self._engine}
        controls = {name: each.control for name, each in engines.items() if isinstance(each.control, ServerControl)}
        healthy = await asyncio.gather(*(control.health() for control in controls.values()))
        serving = {name: controls[name] for name, is_healthy in zip(controls, healthy, strict=True) if is_healthy}
        if not serving:
            addresses = (control.base_url for control in controls.values())
            raise WeightUpdateError("no server is healthy; nothing was sent").concern(*addresses)
        return serving

    async def _join(self, controls: Sequence[ServerControl]) -> None:
        """Connect the sender and the workers of these servers, unless they are connected."""
        addresses = tuple(control.base_url for control in controls)
        if self._joined == addresses:
            return
        await self._leave()
        sizes = await asyncio.gather(*(control.world_size() for control in controls))
        joins = [
            control.init_weight_transfer(self._sender.init_info(sum(sizes[:index]), sum(sizes)))
            for index, control in enumerate(controls)
        ]
        try:
            await self._together([*joins, asyncio.to_thread(self._sender.open, sum(sizes))])
        except BaseException:
            self._sender.close()
            raise
        self._joined = addresses

    async def _leave(self) -> None:
        if not self._joined:
            return
        joined, self._joined = self._joined, ()
        await asyncio.to_thread(self._sender.close)
        for control in (await self._servers()).values():
            if control.base_url in joined:
                try:
                    await control.shutdown_weight_transfer()
                except EngineError as error:
                    log.warning("%s could not leave the transport of the trainer: %s", control.base_url, error)

    async def _begin(self, controls: Sequence[ServerControl], in_flight: InFlight) -> list[Transfer]:
        begin = [control.begin_transfer(in_flight) for control in controls]
        outcomes = await asyncio.gather(*begin, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        started = {
            control: outcome
            for control, outcome in zip(controls, outcomes, strict=True)
            if isinstance(outcome, Transfer)
        }
        if failures:
            listed = "; ".join(map(str, failures))
            states = await self._abandon(list(started), list(started.values()), failures[0])
            error = WeightUpdateError(f"no weights were sent: {listed}. {states}")
            raise error.concern_servers_of(failures) from failures[0]
        return list(started.values())

    async def _send(self, controls: Sequence[ServerControl], parts: Iterable[Sequence[NamedTensor]]) -> None:
        for bucket in parts:
            info = update_info(bucket) | dict(await asyncio.to_thread(self._sender.update_info, bucket))
            receive = [control.receive_weights(info) for control in controls]
            await self._together([*receive, asyncio.to_thread(self._sender.send, bucket)])

    async def _together(self, calls: Iterable[Awaitable[Any]]) -> None:
        """Await calls that wait for each other. Raises what one raises, and `WeightUpdateError` after a time."""
        try:
            async with asyncio.timeout(self._seconds):
                await asyncio.gather(*calls)
        except TimeoutError as error:
            raise WeightUpdateError(f"servers and trainer did not meet within {self._seconds:g} s") from error

    async def _abandon(self, controls: Sequence[ServerControl], begun: Sequence[Transfer], cause: Exception) -> str:
        """Give up a transfer everywhere; what has become of each server."""
        self._sender.close()  # whoever is still in the transport waits for tensors that do not come
        self._joined = ()
        abandon = [control.abandon_transfer(each, cause) for control, each in zip(controls, begun, strict=True)]
        outcomes = await asyncio.gather(*abandon, return_exceptions=True)
        return "; ".join(str(outcome) for outcome in outcomes if isinstance(outcome, Exception))
