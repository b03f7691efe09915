"""Checks that weights are complete and fit the model that a server runs, from the headers of files.

A vLLM 0.32 server that loads any other directory loads part of it: it continues to respond, with garbage, or
dies with the next request. A few kilobytes of each file are read, whatever the size of the model.
"""

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open

from rollouts.errors import WeightUpdateError
from rollouts.files import replaced_file, replaced_path

_INDEX = "model.safetensors.index.json"
#: The name of the output layer.
HEAD = "lm_head.weight"
_HEAD_FILE = "lm_head.safetensors"

Shapes = Mapping[str, tuple[int, ...]]


def check_checkpoint(directory: Path, *, like: Path | None) -> None:
    """Raise `WeightUpdateError` unless `directory` holds a complete safetensors checkpoint with the tensors of `like`.

    `like` is a checkpoint of the same model, the one that the server was started with. Without it, or where
    this process cannot read it, only completeness is checked. Data types may differ: the server casts.
    """
    new = checkpoint_shapes(directory)
    tied = ties_embeddings(directory) or (like is not None and ties_embeddings(like))
    if tied and HEAD not in new:
        raise _error(
            directory,
            f"the model ties {HEAD} to its embeddings and the checkpoint leaves it out; vLLM would keep the "
            "output layer that it had before. Write it too: "
            "rollouts.engines.vllm.write_tied_head(directory)",
        )
    if like is None or not any(like.glob("*.safetensors")):
        return
    old = checkpoint_shapes(like)
    # Tied, the output layer may be in one of the two checkpoints and not in the other.
    optional = {HEAD} if tied else set()
    missing = sorted(old.keys() - new.keys() - optional)
    unknown = sorted(new.keys() - old.keys() - optional)
    if missing or unknown:
        raise _error(directory, f"it lacks {_listed(missing)} and has {_listed(unknown)} beyond those of {like}")
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            raise _error(directory, f"{name} has shape {new[name]}, in {like} it has {old[name]}")


def check_tied_head(directory: Path, names: Container[str]) -> None:
    """Raise `WeightUpdateError` for new embeddings without the output layer that is tied to them."""
    embeddings = [name for name in checkpoint_shapes(directory) if name in names and _is_embedding(name)]
    if embeddings and HEAD not in names and ties_embeddings(directory):
        reason = f"{embeddings[0]} changes without {HEAD}, which is tied to it; vLLM would keep the latter"
        raise _error(directory, f"{reason}. Write both, as state_dict() has them")


def _is_embedding(name: str) -> bool:
    return name.endswith("embed_tokens.weight") and "visual" not in name


class ExpectedTensors:
    """The tensors that a transfer must have: those of a checkpoint of the same model, each once and in its shape.

    A server that receives others loads part of them, and generates garbage or dies. `shapes` None: nothing is
    known, and only names that come twice are refused.
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
            embeddings = [name for name in shapes if _is_embedding(name)]
            shapes.update((HEAD, shapes[name]) for name in embeddings[:1])
        return cls(shapes, directory)

    def check_complete(self) -> None:
        """Raise `WeightUpdateError` unless every tensor has come."""
        if missing := sorted((self._shapes or {}).keys() - self._seen):
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
                f"{self._source} has no tensor {name}; use the names of its checkpoint files, which a model "
                "of transformers may name otherwise (`model.save_pretrained` writes them)"
            )
        if self._shapes[name] != shape:
            raise WeightUpdateError(f"{name} has shape {shape}, in {self._source} it has {self._shapes[name]}")


def write_tied_head(directory: Path) -> None:
    """Add the output layer to a checkpoint that leaves it out because the embeddings are the same tensor.

    A server that starts from such a checkpoint shares the tensor; one that reloads it (vLLM 0.32) gives new
    weights to the embeddings and none to the output layer. Writes `lm_head.safetensors` beside the other
    files and names it in the index where there is one; does nothing where the layer is there. Raises
    `WeightUpdateError`.
    """
    directory = Path(directory)
    if HEAD in checkpoint_shapes(directory):
        return
    for path in sorted(directory.glob("*.safetensors")):
        if embeddings := [name for name in _file_shapes(directory, path) if _is_embedding(name)]:
            break
    else:
        raise _error(directory, "no tensor is called embed_tokens.weight")
    from safetensors.torch import save_file

    with safe_open(path, framework="pt") as file:  # numpy has no bfloat16
        head = {HEAD: file.get_tensor(embeddings[0])}
    # The file before the index: an index never names a file that is not there.
    with replaced_path(directory / _HEAD_FILE) as target:
        save_file(head, target, metadata={"format": "pt"})
    index = directory / _INDEX
    if index.exists():
        content = dict(_read_json(directory, index))
        content["weight_map"] = {**content["weight_map"], HEAD: _HEAD_FILE}
        with replaced_file(index) as file:
            file.write((json.dumps(content, indent=2) + "\n").encode())


def checkpoint_shapes(directory: Path) -> Shapes:
    """The shape of every tensor of a checkpoint. Raises `WeightUpdateError` for one that is not complete."""
    if not directory.is_dir():
        raise _error(directory, "there is no such directory here")
    index = directory / _INDEX
    listed: Mapping[str, Any] | None = _read_json(directory, index).get("weight_map") if index.exists() else None
    files = sorted(set(listed.values()) if listed else {path.name for path in directory.glob("*.safetensors")})
    if not files:
        raise _error(directory, "it holds no .safetensors file")
    shapes: dict[str, tuple[int, ...]] = {}
    for name in files:
        shapes |= _file_shapes(directory, directory / name)
    if listed and (absent := sorted(listed.keys() - shapes.keys())):
        raise _error(directory, f"{_INDEX} lists {_listed(absent)}, which no file holds")
    return shapes


def _file_shapes(directory: Path, path: Path) -> Shapes:
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _error(
            directory, f"{path.name} is no complete safetensors file ({error}); is it still being written?"
        ) from error


def ties_embeddings(directory: Path) -> bool:
    """Whether the output layer of the model is the tensor of its embeddings."""
    path = directory / "config.json"
    if not path.exists():
        return False
    config = _read_json(directory, path)
    text = config.get("text_config")
    return bool(config.get("tie_word_embeddings") or (isinstance(text, dict) and text.get("tie_word_embeddings")))


def _read_json(directory: Path, path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _error(directory, f"{path.name} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise _error(directory, f"{path.name} is no JSON object")
    return content


def _listed(names: list[str]) -> str:
    if not names:
        return "no tensor"
    return names[0] if len(names) == 1 else f"{len(names)} tensors such as {names[0]}"


def _error(directory: Path, reason: str) -> WeightUpdateError:
    return WeightUpdateError(
        f"the weights in {directory} were not loaded: {reason}. Nothing was changed. Where the server sees "
        "other files than this process, check=False leaves out this check"
    )
