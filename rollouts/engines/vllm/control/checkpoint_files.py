"""Whether a checkpoint directory is whole and fits the model that a server runs, from the headers of its files.

A server that is told to load anything else half-loads it: it goes on answering, with garbage, or dies with the next
request (both seen with vLLM 0.32). What is looked at here is a few kilobytes a file, whatever the size of the model.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollouts.errors import WeightUpdateError

_INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100 * 2**20  # as the format's own library has it
_HEAD = "lm_head.weight"
_HEAD_FILE = "lm_head.safetensors"
_COPIED_AT_ONCE = 16 * 2**20

Shapes = Mapping[str, tuple[int, ...]]


def check_checkpoint(directory: Path, *, like: Path | None) -> None:
    """Raise `WeightUpdateError` unless `directory` holds a whole safetensors checkpoint of the tensors of `like`.

    `like` is one of the same model, that which the server was started with; without it, or where it cannot be read,
    only wholeness is checked. Types may differ, for the server casts.
    """
    new = _shapes(directory)
    known = like is not None and any(like.glob("*.safetensors"))
    if _HEAD not in new and (_ties_embeddings(directory) or (like is not None and _ties_embeddings(like))):
        raise _refused(
            directory,
            f"the model ties {_HEAD} to its embeddings and the checkpoint leaves it out; vLLM then goes on with the "
            "output layer that it had before. Write it too: rollouts.engines.vllm.write_tied_head(directory)",
        )
    if like is None or not known:
        return
    old = _shapes(like)
    tied = _HEAD if _ties_embeddings(directory) or _ties_embeddings(like) else None
    missing = sorted(old.keys() - new.keys() - {tied})
    unknown = sorted(new.keys() - old.keys() - {tied})
    if missing or unknown:
        raise _refused(directory, f"it lacks {_some(missing)} and has {_some(unknown)} beyond those of {like}")
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            raise _refused(directory, f"{name} has shape {new[name]}, in {like} it has {old[name]}")


def write_tied_head(directory: Path) -> None:
    """Add the output layer to a checkpoint that leaves it out because the embeddings are the same tensor.

    A server that starts from such a checkpoint shares the tensor; one that reloads it (vLLM 0.32) gives the embeddings
    new weights and the output layer none. Writes `lm_head.safetensors` beside the other files, and names it in the
    index where there is one; does nothing where the layer is there. Raises `WeightUpdateError`.
    """
    directory = Path(directory)
    if _HEAD in _shapes(directory):
        return
    for path in sorted(directory.glob("*.safetensors")):
        header, start = _header(directory, path)
        name = next((name for name in header if name.endswith("embed_tokens.weight") and "visual" not in name), None)
        if name is not None:
            break
    else:
        raise _refused(directory, "no tensor is called embed_tokens.weight")
    entry = header[name]
    first, last = entry["data_offsets"]
    head = json.dumps({_HEAD: {**entry, "data_offsets": [0, last - first]}, "__metadata__": {"format": "pt"}}).encode()
    head += b" " * (-len(head) % 8)
    with path.open("rb") as source, (directory / _HEAD_FILE).open("wb") as target:
        target.write(struct.pack("<Q", len(head)) + head)
        source.seek(start + first)
        for at in range(first, last, _COPIED_AT_ONCE):
            target.write(source.read(min(_COPIED_AT_ONCE, last - at)))
    index = directory / _INDEX
    if index.exists():
        content = dict(_json(directory, index))
        content["weight_map"] = {**content["weight_map"], _HEAD: _HEAD_FILE}
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _shapes(directory: Path) -> Shapes:
    """The shape of every tensor of a checkpoint, from the headers of its files."""
    if not directory.is_dir():
        raise _refused(directory, "there is no such directory here")
    index = directory / _INDEX
    listed: Mapping[str, Any] | None = _json(directory, index).get("weight_map") if index.exists() else None
    names = sorted(set(listed.values()) if listed else {path.name for path in directory.glob("*.safetensors")})
    if not names:
        raise _refused(directory, "it holds no .safetensors file")
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        shapes |= _file_shapes(directory, directory / name)
    if listed and (absent := sorted(listed.keys() - shapes.keys())):
        raise _refused(directory, f"{_INDEX} lists {_some(absent)}, which no file holds")
    return shapes


def _file_shapes(directory: Path, path: Path) -> Shapes:
    header, _ = _header(directory, path)
    return {name: tuple(int(side) for side in entry["shape"]) for name, entry in header.items()}


def _header(directory: Path, path: Path) -> tuple[Mapping[str, Any], int]:
    """What a file says of its tensors, and where their bytes begin; checked against its size.

    Source: the safetensors format, 8 bytes with the length of a JSON header, the header, the tensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            lead = file.read(8)
            length = struct.unpack("<Q", lead)[0] if len(lead) == 8 else _LONGEST_HEADER + 1
            if length > _LONGEST_HEADER:
                raise _refused(directory, f"{path.name} is no safetensors file, or is still being written")
            header = json.loads(file.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        for entry in tensors.values():
            [int(side) for side in entry["shape"]]
    except OSError as error:
        raise _refused(directory, f"{path.name} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise _refused(directory, f"{path.name} has a broken header ({error!r}); is it still being written?") from error
    if size != end:
        raise _refused(
            directory,
            f"{path.name} has {size} bytes where its header announces {end}; is it still being written?",
        )
    return tensors, 8 + length


def _ties_embeddings(directory: Path) -> bool:
    path = directory / "config.json"
    if not path.exists():
        return False
    config = _json(directory, path)
    text = config.get("text_config")
    return bool(config.get("tie_word_embeddings") or (isinstance(text, dict) and text.get("tie_word_embeddings")))


def _json(directory: Path, path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _refused(directory, f"{path.name} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise _refused(directory, f"{path.name} is no JSON object")
    return content


def _some(names: list[str]) -> str:
    if not names:
        return "no tensor"
    return names[0] if len(names) == 1 else f"{len(names)} tensors such as {names[0]}"


def _refused(directory: Path, reason: str) -> WeightUpdateError:
    return WeightUpdateError(
        f"the weights in {directory} were not loaded: {reason}. Nothing was changed; check=False leaves the files to "
        "the server, where it sees others than this process"
    )
