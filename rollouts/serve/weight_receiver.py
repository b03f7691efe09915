"""Collects the tensors that a trainer sends by the calls of vLLM's weight transfer, through files.

Nothing of the model changes before all tensors are there: a transfer that fails, or whose trainer ends, leaves the
weights as they are. The names and shapes are those of the checkpoint that the server was started with, so that a
transfer takes no more memory than the model. A file has the safetensors format; nothing in it is run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, NonNegativeInt, ValidationError

from rollouts.engines.vllm.transfer import ExpectedTensors
from rollouts.errors import WeightUpdateError
from rollouts.serve.errors import RequestError

if TYPE_CHECKING:
    import torch

# The header of a file: for each tensor its name, and some text of bounded length.
_HEADER_BYTES, _ENTRY_BYTES = 2**16, 2**10
_LARGEST_ITEM = 8  # bytes


class _UpdateInfo(BaseModel):
    """What `/update_weights` is told: the tensors of a bucket, and the file that has them."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[NonNegativeInt]]
    path: str


class WeightReceiver:
    """The transfers to one server; `directory` holds the checkpoint that it was started with.

    Its methods block, and are to be called one at a time.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._expected: ExpectedTensors | None = None  # None: no transfer is active
        self._tensors: dict[str, torch.Tensor] = {}

    def join(self, init_info: Mapping[str, Any]) -> None:
        """A trainer begins; what an earlier one has left unfinished is dropped. Raises `RequestError`."""
        if "master_address" in init_info:
            raise _refusal("this server has no NCCL; it reads tensors from files, as FileSender sends them")
        self._end()

    def leave(self) -> None:
        """The trainer ends. Raises `RequestError` during a transfer."""
        if self._expected is not None:
            raise _refusal("shutdown_weight_transfer_engine called while a weight update is active.")

    def start(self) -> None:
        """Begin a transfer. Raises `RequestError`, and `WeightUpdateError` for a checkpoint that cannot be read."""
        if self._expected is not None:
            raise _refusal("start_weight_update called while a weight update is already active.")
        expected = ExpectedTensors.of_checkpoint(str(self._directory), reties=True)
        if not expected.are_known:
            raise _refusal(f"{self._directory} has no .safetensors files, so that tensors cannot be checked")
        self._expected = expected

    def receive(self, update_info: Mapping[str, Any]) -> None:
        """Read the tensors of a bucket. Raises `RequestError` and `WeightUpdateError`, which end the transfer."""
        if self._expected is None:
            raise _refusal("start_weight_update must be called before update_weights.")
        try:
            self._tensors |= _read_bucket(update_info, self._expected)
        except BaseException:
            self._end()
            raise

    def finish(self) -> Mapping[str, torch.Tensor]:
        """End the transfer; its tensors. Raises `RequestError`, and `WeightUpdateError` where some are missing."""
        expected, tensors = self._expected, self._tensors
        if expected is None:
            raise _refusal("finish_weight_update called without a matching start_weight_update.")
        self._end()
        expected.check_complete()
        return tensors

    def _end(self) -> None:
        self._expected, self._tensors = None, {}


def _read_bucket(update_info: Mapping[str, Any], expected: ExpectedTensors) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        info = _UpdateInfo.model_validate(update_info)
    except ValidationError as error:
        reason = "Invalid update_info: it must have names, dtype_names, shapes, and the path of a file (FileSender)"
        raise _refusal(f"{reason}; {str(error)[:500]}") from error
    if not len(info.names) == len(info.dtype_names) == len(info.shapes):
        raise _refusal("Invalid update_info: names, dtype_names and shapes must have the same length")
    for name, shape in zip(info.names, info.shapes, strict=True):
        expected.check(name, tuple(shape))
    entries = sum(len(name.encode()) + _ENTRY_BYTES for name in info.names)
    limit = _HEADER_BYTES + entries + sum(prod(shape) * _LARGEST_ITEM for shape in info.shapes)
    try:
        tensors: dict[str, torch.Tensor] = load(_read_file(info.path, limit))
    except SafetensorError as error:
        raise WeightUpdateError(f"{info.path} is no safetensors file ({error})") from error
    found = {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()}
    if found != dict(zip(info.names, zip(info.dtype_names, info.shapes, strict=True), strict=True)):
        raise WeightUpdateError(f"the tensors of {info.path} are not those that update_info names")
    return tensors


def _read_file(path: str, limit: int) -> bytes:
    """The bytes of a regular file. Raises `WeightUpdateError` for one that has more than `limit`.

    It is read, and not mapped: this process would end if another one cut a mapped file off.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for a program at its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not os.path.isabs(path) or not stat.S_ISREG(status.st_mode):
                raise WeightUpdateError(f"{path[:300]} is not the absolute path of a file")
            if status.st_size > limit:
                raise WeightUpdateError(f"{path[:300]} has {status.st_size} bytes, its tensors need {limit} at most")
            return file.read(limit)
    except (OSError, ValueError) as error:  # a null byte in the path
        raise WeightUpdateError(f"{path[:300]} cannot be read ({error})") from error


def _refusal(message: str) -> RequestError:
    return RequestError(500, message)
