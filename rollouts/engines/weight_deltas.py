"""Weight deltas: directories with the values of a checkpoint that differ from those of another one, its base.

`delta.json` has the version, the directory and the names of the base, shapes, and the digest of
`delta.tensors`, which has for each tensor that differs the values at flat places with the distances between
these (`NAME:gaps`), or it where that is shorter; and the digests of the values that the base has there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from rollouts.engines.protocol import check_version
from rollouts.errors import WeightUpdateError
from rollouts.files import replaced_path

if TYPE_CHECKING:  # the engine of vLLM imports this module without torch
    import torch

ABOUT = "delta.json"
_VALUES = "delta.tensors"
_GAPS = ":gaps"
_MAX_GAP = 2**15 - 1  # of int16
_PART_BYTES = 2**22


@dataclass(frozen=True, slots=True, eq=False)
class WeightDelta:
    """What is in a directory: version, directory and names of the base; shapes, values and places of the
    tensors that differ, and the digests of their values before."""

    directory: Path
    base: str
    base_directory: Path
    names: Sequence[str]
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Mapping[str, torch.Tensor]
    replaced: Mapping[str, str]

    def change(self, name: str, target: torch.Tensor) -> None:
        """Write the new values of a tensor into it."""
        values, gaps = self.tensors[name], self.tensors.get(f"{name}{_GAPS}")
        if gaps is None:
            target.copy_(values)
        else:
            _bits(target).scatter_(0, gaps.to(target.device).cumsum(0), _bits(values.to(target)))

    def check_replaced(self, name: str, tensor: torch.Tensor) -> None:
        """Raise `WeightUpdateError` unless a tensor of the base has the values that the delta was written for."""
        gaps = self.tensors.get(f"{name}{_GAPS}")
        if gaps is not None and self.replaced[name] != _digest_at(tensor, gaps.cumsum(0)):
            reason = f"{name} of the base {self.base_directory} has other values than when {self.directory} was written"
            raise WeightUpdateError(f"{reason}; pass a whole checkpoint")


def write_weight_delta(
    weights: Mapping[str, Any],
    directory: str | os.PathLike[str],
    *,
    base: str,
    base_directory: str | os.PathLike[str],
) -> None:
    """Write the values of weights that differ from those of a checkpoint, for `Engine.update_weights`.

        write_weight_delta(model.state_dict(), "weights/8", base="7", base_directory="weights/7")
        await engine.update_weights("weights/8", "8")

    `base` is the version that the engine has for the weights of `base_directory`, a whole checkpoint or
    another delta. `weights` are tensors or arrays by the names in the files of the base, as many of them as
    may have changed; they are compared in the dtypes of these files. The directory must be new, and appears
    when it is complete. A value takes its own size and 2 bytes.

    Raises `WeightUpdateError` for other names or shapes, and for a base that cannot be read; `ArgumentError`
    for a `base` that is no version; `OSError`.
    """
    import torch
    from safetensors.torch import save

    check_version("base", base)
    # Without links: the way from one directory to the other is another one through a link.
    target, origin = Path(os.path.realpath(directory)), Path(os.path.realpath(base_directory))
    tensors: dict[str, torch.Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    replaced: dict[str, str] = {}
    names: list[str] = []

    def wanted(name: str) -> bool:
        names.append(name)
        return name in weights

    for name, old in checkpoint_tensors(*delta_chain(origin), wanted):
        new = torch.as_tensor(weights[name]).detach().to("cpu", old.dtype).contiguous()
        if new.shape != old.shape:
            reason = f"{name} has shape {tuple(new.shape)}, in {origin} it has {tuple(old.shape)}"
            raise WeightUpdateError(reason)
        differs = _bits(new) != _bits(old)  # -0.0 from 0.0 too
        if not differs.any():
            continue
        shapes[name] = tuple(new.shape)
        differs[::_MAX_GAP] = True  # place 0, from which distances count, and so many that each fits
        places = differs.nonzero()[:, 0]
        gaps = places.diff(prepend=places[:1]).to(torch.int16)
        if gaps.nbytes + len(gaps) * new.itemsize < new.nbytes:
            tensors[name], tensors[f"{name}{_GAPS}"] = new.flatten()[places], gaps
            replaced[name] = _digest_at(old, places)
        else:
            tensors[name] = new
    missing = weights.keys() - set(names)
    for name in sorted(missing):
        # Files have tied parameters under one of their names.
        own = torch.as_tensor(weights[name])
        others = (torch.as_tensor(weights[other]) for other in weights if other not in missing)
        if not any(own.shape == other.shape and torch.equal(own, other.to(own)) for other in others):
            raise WeightUpdateError(f"{origin} has no tensor {name}; write a whole checkpoint")
    with replaced_path(target) as unfinished:
        unfinished.mkdir()
        data = save(tensors, metadata={"format": "pt"})
        (unfinished / _VALUES).write_bytes(data)
        about = {
            "base": base,
            "base_directory": os.path.relpath(origin, target),
            "names": names,
            "shapes": shapes,
            "replaced": replaced,
            "digest": _digest(data),
        }
        (unfinished / ABOUT).write_text(json.dumps(about), "utf-8")


def read_delta(directory: Path) -> WeightDelta:
    """The delta of a directory. Raises `WeightUpdateError` for one that is damaged."""
    from safetensors.torch import load

    try:
        about = json.loads((directory / ABOUT).read_text("utf-8"))
        data = (directory / _VALUES).read_bytes()
        if about["digest"] != _digest(data):
            raise ValueError(f"{_VALUES} has another digest than {ABOUT} names")
        base_directory = Path(os.path.realpath(directory / about["base_directory"]))
        shapes = {name: tuple(shape) for name, shape in about["shapes"].items()}
        names, replaced = about["names"], about["replaced"]
        return WeightDelta(directory, about["base"], base_directory, names, shapes, load(data), replaced)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        reason = f"{directory} has no weight delta that can be read ({error})"
        raise WeightUpdateError(f"{reason}; nothing was changed. Pass a whole checkpoint") from error


def delta_chain(directory: Path, version: str | None = None) -> tuple[Path, list[WeightDelta]]:
    """The whole checkpoint that a directory is or changes, and the deltas from there on.

    Those from the weights `version` on are enough, where one of them changes these: the others are not read.
    Raises `WeightUpdateError`.
    """
    deltas: list[WeightDelta] = []
    while (directory / ABOUT).is_file() and not (deltas and deltas[0].base == version):
        if any(delta.directory == directory for delta in deltas):
            raise WeightUpdateError(f"{directory} is the base of its own base; pass a whole checkpoint")
        deltas.insert(0, read_delta(directory))
        directory = deltas[0].base_directory
    return directory, deltas


def deltas_after(directory: Path, version: str) -> list[WeightDelta]:
    """The deltas from the weights in use, `version`, to those of a directory. Raises `WeightUpdateError`."""
    _, deltas = delta_chain(directory, version)
    if deltas[0].base != version:
        reason = f"{directory} changes the weights {deltas[-1].base!r}, and those in use are {version!r}"
        raise WeightUpdateError(f"{reason}; nothing was changed. Pass a whole checkpoint")
    return deltas


def checkpoint_tensors(
    directory: Path, deltas: Sequence[WeightDelta], wanted: Callable[[str], bool]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The wanted tensors of a whole checkpoint, after deltas. Raises `WeightUpdateError`."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightUpdateError(f"the base {directory} holds no .safetensors file; pass a whole checkpoint")
    try:
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in filter(wanted, file.keys()):
                    tensor = file.get_tensor(name)
                    for delta in deltas:
                        if name in delta.shapes:
                            delta.check_replaced(name, tensor)
                            delta.change(name, tensor)
                    yield name, tensor
    except (OSError, SafetensorError) as error:
        raise WeightUpdateError(f"the base {directory} cannot be read ({error})") from error


class ChangedLayers:
    """The layers of a checkpoint that deltas change, whole and after these, in files of a new directory.

    vLLM replaces the parameters of a module together, and joins several tensors of a layer in one. The
    directory, one in `parent`, is removed with the object; `newest` is that of the last delta.
    """

    def __init__(self, whole: Path, parent: Path) -> None:
        self.whole = self.newest = whole
        self._parent = parent
        self._paths: dict[str, Path] = {}  # by layer

    def apply(self, deltas: Sequence[WeightDelta]) -> None:
        """Apply the deltas after `newest`, in place where a layer has a file. Raises `WeightUpdateError`."""
        from safetensors.torch import save_file

        try:
            if not self._paths:
                self._root = Path(mkdtemp(prefix=".changed-layers-", dir=self._parent))
                weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
            changed = _layers_of(deltas)
            added: dict[str, dict[str, Any]] = {layer: {} for layer in changed if layer not in self._paths}
            with ThreadPoolExecutor() as pool:
                paths = [self._paths[layer] for layer in changed if layer in self._paths]
                list(pool.map(_change_file, paths, [deltas] * len(paths)))
            for name, tensor in checkpoint_tensors(self.whole, deltas, lambda name: _layer(name) in added):
                added[_layer(name)][name] = tensor
            for layer, tensors in added.items():
                self._paths[layer] = self._root / f"{len(self._paths)}.safetensors"
                save_file(tensors, self._paths[layer], metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            reason = f"the layers of {deltas[-1].directory} could not be written in {self._parent} ({error})"
            raise WeightUpdateError(f"{reason}; nothing was changed. Repeat the update") from error
        self.newest = Path(os.path.realpath(deltas[-1].directory))  # as `base_directory` of the next one

    def directory_of(self, deltas: Sequence[WeightDelta]) -> Path:
        """A directory with the files of the layers that deltas change, and no other."""
        loaded = self._root / "loaded"
        shutil.rmtree(loaded, ignore_errors=True)
        loaded.mkdir()
        for layer in _layers_of(deltas):
            (loaded / self._paths[layer].name).symlink_to(Path("..", self._paths[layer].name))
        return loaded


def _layers_of(deltas: Sequence[WeightDelta]) -> list[str]:
    return sorted({_layer(name) for delta in deltas for name in delta.shapes})


def _change_file(path: Path, deltas: Sequence[WeightDelta]) -> None:
    """Write the values of deltas into the tensors of a safetensors file."""
    import torch

    # Closed after the mapping, with which a network file system makes the values visible to other machines.
    with path.open("r+b") as file:
        length = 8 + int.from_bytes(file.read(8), "little")
        places = json.loads(file.read(length - 8))
        size = path.stat().st_size
        data = torch.from_file(os.fspath(path), shared=True, size=size, dtype=torch.uint8)[length:]
        for delta in deltas:
            for name in places.keys() & delta.shapes.keys():
                begin, end = places[name]["data_offsets"]
                tensor = data[begin:end].view(delta.tensors[name].dtype)
                delta.check_replaced(name, tensor)
                delta.change(name, tensor.view(delta.shapes[name]))


def _layer(name: str) -> str:
    """The layer of a tensor: its name up to the first number, else the module that has it."""
    numbered = re.match(r".*?\.\d+\.", name)
    return numbered[0] if numbered else name.rpartition(".")[0]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a contiguous tensor as integers of their size, of the same memory.

    torch writes no values of 8-bit floats and of unsigned integers by their places.
    """
    import torch

    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(-1).view(kinds.get(tensor.itemsize, tensor.dtype))


def _digest_at(tensor: torch.Tensor, places: torch.Tensor) -> str:
    return hashlib.sha256(_bits(tensor)[places].numpy().data).hexdigest()


def _digest(data: bytes) -> str:
    """The digest of the digests of the parts, which threads compute."""
    parts = (memoryview(data)[start : start + _PART_BYTES] for start in range(0, len(data), _PART_BYTES))
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda part: hashlib.sha256(part).digest(), parts)
    return hashlib.sha256(b"".join(digests)).hexdigest()
