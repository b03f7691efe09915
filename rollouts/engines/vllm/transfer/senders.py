"""Transports for the tensors of a transfer. vLLM's own classes move the bytes, and are imported when they are used."""

from __future__ import annotations

import base64
import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

from rollouts.engines.vllm.transfer.buckets import NamedTensor
from rollouts.errors import ArgumentError, WeightUpdateError


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


class FileSender:
    """Writes each bucket to a file in the safetensors format, which the servers read: for `rollouts serve`.

    On Linux the file is memory of this process (`memfd_create`) that servers of the same user and machine open as
    `/proc/PID/fd/N`: it has no name in any directory, and is freed when this process ends, however it ends. With a
    `directory`, which trainer and servers share, and on other systems, it is a file there, or in the directory for
    temporary files, which only a process that is killed leaves behind. A bucket is kept until the next one or `close`.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self._directory = directory
        self._file: IO[bytes] | None = None

    def init_info(self, workers_before: int, num_workers: int) -> Mapping[str, Any]:
        return {"rank_offset": 1 + workers_before, "world_size": 1 + num_workers}

    def open(self, num_workers: int) -> None:
        pass

    def update_info(self, bucket: Sequence[NamedTensor]) -> Mapping[str, Any]:
        import torch
        from safetensors.torch import save

        self.close()
        # Copies, because the format refuses tensors that share memory, as an output layer and tied embeddings do.
        copies = {
            name: tensor.detach().to("cpu", copy=True) if torch.is_tensor(tensor) else torch.tensor(tensor)
            for name, tensor in bucket
        }
        data = save({name: tensor.contiguous() for name, tensor in copies.items()})
        if self._directory is None and hasattr(os, "memfd_create"):
            self._file = os.fdopen(os.memfd_create("weights"), "wb")
            path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        else:
            directory = None if self._directory is None else os.path.abspath(self._directory)
            self._file = tempfile.NamedTemporaryFile(prefix="weights-", suffix=".safetensors", dir=directory)  # noqa: SIM115 - closed by `close`
            path = self._file.name
        self._file.write(data)
        self._file.flush()
        return {"path": path}

    def send(self, bucket: Sequence[NamedTensor]) -> None:
        pass  # the servers read the file themselves

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
