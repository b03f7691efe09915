"""The tensors of a transfer in buckets of bounded size, and what the servers are told about them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

from rollouts.engines.vllm.control.checkpoint_files import HEAD, checkpoint_shapes, ties_embeddings
from rollouts.errors import WeightUpdateError

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
    and only names that come twice are refused. Those of `optional` need not come.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]] | None, source: object, optional: Collection[str] = ()
    ) -> None:
        self._shapes = shapes
        self._source = source
        self._optional = frozenset(optional)
        self._seen: set[str] = set()

    @classmethod
    def of_checkpoint(cls, directory: str | None, *, reties: bool = False) -> Self:
        """Those of the checkpoint that a server was started with, where this process can read it.

        `reties`: the server ties the output layer to new embeddings, so that it need not come; vLLM would keep the
        output layer that it had before.
        """
        if directory is None or not any(Path(directory).glob("*.safetensors")):
            return cls(None, directory)
        shapes = dict(checkpoint_shapes(Path(directory)))
        tied = ties_embeddings(Path(directory))
        if HEAD not in shapes and tied:
            embeddings = [name for name in shapes if name.endswith("embed_tokens.weight") and "visual" not in name]
            shapes.update((HEAD, shapes[name]) for name in embeddings[:1])
        return cls(shapes, directory, {HEAD} if reties and tied else ())

    @property
    def are_known(self) -> bool:
        """Whether names and shapes are known."""
        return self._shapes is not None

    def checked(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """The tensors, checked as they come. Raises `WeightUpdateError`, which names the first wrong one."""
        for name, tensor in tensors:
            self.check(name, TensorInfo.of(name, tensor).shape)
            yield name, tensor
        self.check_complete()

    def check_complete(self) -> None:
        """Raise `WeightUpdateError` unless every tensor has come."""
        if missing := sorted((self._shapes or {}).keys() - self._seen - self._optional):
            tied = f" ({HEAD} also where the model ties it to its embeddings)" if HEAD in missing else ""
            raise WeightUpdateError(
                f"{len(missing)} tensors of {self._source} were not sent, such as {missing[0]}; send every tensor{tied}"
            )

    def check(self, name: str, shape: tuple[int, ...]) -> None:
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
