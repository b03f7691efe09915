"""New weights of a server: from a directory, and from a trainer's tensors."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from safetensors import SafetensorError, safe_open

from rollouts.engines.http.exchange import redacted
from rollouts.engines.vllm.caches import CacheControl, PauseMode, check_pause_mode
from rollouts.engines.vllm.capabilities import json_object
from rollouts.engines.vllm.server_state import required_field
from rollouts.errors import (
    CapabilityError,
    EngineError,
    InvalidRequestError,
    MalformedResultError,
    ServerError,
    ServerUnreachableError,
    WeightUpdateError,
)
from rollouts.files import replaced_file

# Checks that a checkpoint directory is complete and fits the model that a server runs, from the headers of its files.
#
# A vLLM 0.32 server that loads any other directory loads part of it: it continues to respond, with garbage, or dies
# with the next request. A few kilobytes of each file are read, whatever the size of the model.


_INDEX = "model.safetensors.index.json"
#: The name of the output layer.
HEAD = "lm_head.weight"
_HEAD_FILE = "lm_head.safetensors"

Shapes = Mapping[str, tuple[int, ...]]


def check_checkpoint(directory: Path, *, like: Path | None) -> None:
    """Raise `WeightUpdateError` unless `directory` holds a complete safetensors checkpoint with the tensors of `like`.

    `like` is a checkpoint of the same model, the one that the server was started with. Without it, or where this
    process cannot read it, only completeness is checked. Data types may differ: the server casts.
    """
    new = checkpoint_shapes(directory)
    tied = ties_embeddings(directory) or (like is not None and ties_embeddings(like))
    if tied and HEAD not in new:
        raise _error(
            directory,
            f"the model ties {HEAD} to its embeddings and the checkpoint leaves it out; vLLM would keep the output "
            "layer that it had before. Write it too: rollouts.engines.vllm.write_tied_head(directory)",
        )
    if like is None or not any(like.glob("*.safetensors")):
        return
    old = checkpoint_shapes(like)
    optional = {HEAD} if tied else set()
    missing = sorted(old.keys() - new.keys() - optional)
    unknown = sorted(new.keys() - old.keys() - optional)
    if missing or unknown:
        raise _error(directory, f"it lacks {_listed(missing)} and has {_listed(unknown)} beyond those of {like}")
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            raise _error(directory, f"{name} has shape {new[name]}, in {like} it has {old[name]}")


def write_tied_head(directory: Path) -> None:
    """Add the output layer to a checkpoint that leaves it out because the embeddings are the same tensor.

    A server that starts from such a checkpoint shares the tensor; one that reloads it (vLLM 0.32) gives new weights to
    the embeddings and none to the output layer. Writes `lm_head.safetensors` beside the other files and names it in the
    index where there is one; does nothing where the layer is there. Raises `WeightUpdateError`.
    """
    directory = Path(directory)
    if HEAD in checkpoint_shapes(directory):
        return
    for path in sorted(directory.glob("*.safetensors")):
        names = [name for name in _file_shapes(directory, path) if name.endswith("embed_tokens.weight")]
        if embeddings := [name for name in names if "visual" not in name]:
            break
    else:
        raise _error(directory, "no tensor is called embed_tokens.weight")
    # The bytes are copied as they are: numpy has no bfloat16. The format: the length of a JSON header, 8 bytes; the
    # header; the bytes of the tensors, at offsets from the end of the header.
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[embeddings[0]]
    first, last = entry["data_offsets"]
    entry["data_offsets"] = [0, last - first]
    header = json.dumps({HEAD: entry, "__metadata__": {"format": "pt"}}).encode()
    header += b" " * (-len(header) % 8)
    with replaced_file(directory / _HEAD_FILE) as target:
        target.write(len(header).to_bytes(8, "little") + header)
        target.write(np.memmap(path, np.uint8, "r", offset=8 + length + first, shape=(last - first,)).data)
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
        f"the weights in {directory} were not loaded: {reason}. Nothing was changed. Where the server sees other files "
        "than this process, check=False leaves out this check"
    )


# Loading other weights into a running vLLM server, and what is done when that fails.
#
# vLLM's own reload leaves caches of the old weights, and one that fails leaves weights without storage: the server then
# reports that it is healthy and dies with the next request. A server is therefore resumed only with weights that
# loaded.


log = logging.getLogger("rollouts.engines.vllm")


class WeightControl(CacheControl):
    """Loads other weights into a server, and labels them."""

    async def reload_weights(self, directory: str | os.PathLike[str], *, check: bool = True) -> None:
        """Load a checkpoint of the same model into a paused server, and empty every cache.

        The server reads the directory itself. `check` first checks the files from this process, which needs the same
        file system here; without it (the server is elsewhere, or loads another format) a wrong directory leaves a
        server that has to be restarted. Where the server takes media, requests that a pause has left in it ("keep") end
        first, as by "abort"; a `VLLMEngine` continues them after `resume`. Raises `WeightUpdateError`: nothing was
        changed, or the text says what was; `EngineError` if the server is not paused, or sleeps and its weights
        have no memory.
        """
        with self._state.exclusive_update("reload_weights"):
            path = await self._path_to_load(directory, check)
            if not await self.is_paused():
                raise EngineError(
                    "reload_weights", "requests would continue with mixed weights and a stale cache; pause first"
                )
            await self._state.refuse_while_weights_sleep("reload_weights")
            with self._media_forgotten():
                if await self._routes.takes_media():
                    await self._send_pause("abort", clear_cache=False)
                await self._load(path)
                await self._reset_all()

    async def update_weight_version(self, version: str) -> None:
        """Label tokens sampled from now on. Servers that keep no label (before vLLM 0.29): on this side only."""
        if not version:
            raise InvalidRequestError("update_weight_version", "the version is empty")
        path = "/update_weight_version"
        await self._routes.require(path)
        response = await self._routes.request("POST", path, content={"new_version": version})
        if response.status != 404:
            self._routes.checked(response, path, "labelling the weights")
        self._on_weight_version(version)

    async def weight_version(self) -> str:
        """The label of the weights that the server has ("default" until one is set)."""
        response = await self._routes.call("GET", "/weight_info", "reading the weight version")
        return str(required_field(response, "weight_version"))

    async def update_weights_from_directory(
        self, directory: str | os.PathLike[str], version: str, in_flight: PauseMode = "abort", *, check: bool = True
    ) -> None:
        """A complete weight update: pause, load, empty every cache, label, resume.

        `in_flight` decides about running requests: "abort" ends them and every `VLLMEngine` continues its own from the
        tokens that they have, with the new weights; "wait" finishes them with the old ones; "keep" leaves them in the
        server, which computes them again and continues with the new weights. A server that takes media would die of
        that: there "keep" does the same as "abort". Cached results of the old weights are never used with the new
        ones. A server that was paused before stays paused.

        Raises `WeightUpdateError` where the weights are not those of `directory` afterwards; its text says which they
        are and whether the server runs. A cancelled call still completes the update before it raises `CancelledError`.
        """
        task = asyncio.ensure_future(self._update_weights(directory, version, in_flight, check))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("a cancelled update of the weights failed: %s", error)
            raise

    async def world_size(self) -> int:
        """How many workers (GPUs) the model is spread over, data parallelism included."""
        response = await self._routes.call("GET", "/get_world_size", "reading the world size")
        return int(required_field(response, "world_size"))

    async def _update_weights(
        self, directory: str | os.PathLike[str], version: str, in_flight: PauseMode, check: bool
    ) -> None:
        name = "update_weights_from_directory"
        check_pause_mode(name, in_flight)
        if not version:
            raise InvalidRequestError(name, "the version is empty")
        with self._state.exclusive_update(name):
            path = await self._path_to_load(directory, check)
            await self._state.refuse_while_weights_sleep(name)
            stays_paused, in_flight = await self._stays_paused(), await self._possible(in_flight)
            with self._media_forgotten():
                previous = await self._pause_for_update(in_flight, stays_paused)
                try:
                    await self._load(path)
                except WeightUpdateError as failure:
                    await self._restore(previous, failure, stays_paused)
                try:
                    await self._reset_all()
                    await self.update_weight_version(version)
                except EngineError as error:
                    raise WeightUpdateError(
                        f"{self.base_url} has loaded the weights of {path}, but may still hold cached results "
                        f"or the label of the weights before, and was left paused: {error}. Repeat the update"
                    ) from error
            if not stays_paused:
                await self._send_resume()

    async def _stays_paused(self) -> bool:
        """Whether the server is paused by somebody else than an update that failed, and so stays paused."""
        return await self.is_paused() and not self._state.paused_by_update

    async def _possible(self, in_flight: PauseMode) -> PauseMode:
        """A server that takes media would die of requests that are kept: they are ended and continued."""
        if in_flight == "keep" and await self._routes.takes_media():
            log.info("%s takes media: requests in flight are ended and continued, not kept", self.base_url)
            return "abort"
        return in_flight

    async def _pause_for_update(self, mode: PauseMode, stays_paused: bool) -> str | None:
        """Pause the server; the directory of the weights that it has, None where it is not known."""
        try:
            await self.pause(mode, clear_cache=True)
            self._state.paused_by_update = not stays_paused
        except ServerUnreachableError:
            raise
        except EngineError:
            # The pause may have taken effect. Requests with the old weights may continue.
            if not stays_paused:
                try:
                    await self._send_resume()
                except EngineError as error:
                    log.warning("%s may be left paused: %s", self.base_url, error)
            raise
        return None if self._state.was_transferred else self._state.loaded_directory or await self.initial_directory()

    async def _load(self, path: str) -> None:
        """Let the workers read a checkpoint. After a `WeightUpdateError` the server's weights are unusable."""
        content = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self._state.unusable_weights = f"a reload of {path} was begun and not seen to end"
        try:
            response = await self._routes.call("POST", "/collective_rpc", "reloading the weights", content=content)
            results = required_field(response, "results")
            if not isinstance(results, list) or any(result is not None for result in results):
                raise MalformedResultError("reload_weights", f"the workers returned {redacted(str(results))[:200]}")
        except ServerUnreachableError as error:
            raise WeightUpdateError(
                f"{self.base_url} could not be reached while it was to load {path}: {error}. If it has ended, "
                "start it again, with whatever weights its command line names, and repeat the update"
            ) from error
        except EngineError as error:
            self._state.unusable_weights = f"a reload of {path} failed and may have left weights without storage"
            raise WeightUpdateError(
                f"the weights of {path} were not loaded by {self.base_url}: {error}. With the weights that it "
                "holds now, the server would die or generate garbage; it is left paused. Load a checkpoint that is "
                "known to be good, or restart the server"
            ) from error
        self._state.record_load(path)

    async def _restore(self, previous: str | None, failure: WeightUpdateError, stays_paused: bool) -> NoReturn:
        """Load the weights from before a failed load again, where they are known, and raise `WeightUpdateError`."""
        if previous is None or isinstance(failure.__cause__, ServerUnreachableError):
            raise failure
        try:
            await self._load(previous)
            await self._reset_all()
        except (EngineError, WeightUpdateError) as error:
            raise WeightUpdateError(
                f"{failure} (the weights of before, in {previous}, could not be loaded either: restart it)"
            ) from error
        if not stays_paused:
            await self._send_resume()
        raise WeightUpdateError(
            f"the weights of {self.base_url} were not updated, and those of {previous} were loaded again; the "
            f"server {'is paused as before' if stays_paused else 'runs'} with them. The cause: {failure.__cause__}"
        ) from failure

    async def _path_to_load(self, directory: str | os.PathLike[str], check: bool) -> str:
        """The path that is sent to the server. `check`: absolute, and its files were checked."""
        await self._state.forget_if_restarted()
        if not check:
            return str(directory)
        initial = await self.initial_directory()  # later checkpoints may lack tensors
        path = await asyncio.to_thread(Path(directory).absolute)
        await asyncio.to_thread(check_checkpoint, path, like=None if initial is None else Path(initial))
        return str(path)

    async def initial_directory(self) -> str | None:
        """The checkpoint that the server was started with, by its own path; None where it does not report it."""
        model = (await self._routes.capabilities()).model
        response = await self._routes.request("GET", "/v1/models")
        cards = json_object(response).get("data") if response.status == 200 else None
        roots = [card.get("root") for card in cards or () if isinstance(card, dict) and card.get("id") == model]
        return roots[0] if roots and isinstance(roots[0], str) else None


# vLLM's weight transfer at one server: tensors come from a trainer instead of from a directory.
#
#     init_weight_transfer_engine     once: the workers join the trainer's transport
#     start_weight_update             the parameters of the model lose their storage
#     update_weights                  once for each bucket of tensors
#     finish_weight_update            the parameters are complete; the version label is set
#
# A server whose transfer does not get to its end has parameters without storage: the next request would kill it. It
# stays paused then, unless the weights of before come from a directory and can be loaded again.


_NOT_CONFIGURED = "Weight transfer not configured"


@dataclass(eq=False, slots=True)
class Transfer:
    """A transfer that has begun at one server. `previous`: the directory of the weights of before, None if unknown."""

    held: ExitStack
    stays_paused: bool
    previous: str | None


class TransferControl(WeightControl):
    """Receives weights from a trainer. `TransferEngine` makes these calls in their order, at all servers together."""

    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Let the workers join the transport of the trainer; `init_info` is what the server's backend expects.

        Raises `CapabilityError` for a server without --weight-transfer-config.
        """
        path = "/init_weight_transfer_engine"
        try:
            await self._routes.call("POST", path, "joining the trainer", content={"init_info": dict(init_info)})
        except ServerError as error:
            if _NOT_CONFIGURED not in error.body:
                raise
            reason = (
                f"{self.base_url} takes no weights from a trainer; start it with --weight-transfer-config "
                '\'{"backend": "nccl"}\' (or "ipc", on the machine of the trainer)'
            )
            raise CapabilityError("init_weight_transfer", reason) from error

    async def shutdown_weight_transfer(self) -> None:
        """Let the workers leave the transport. Refused by the server during a transfer."""
        await self._routes.call("POST", "/shutdown_weight_transfer_engine", "leaving the trainer")

    async def begin_transfer(self, in_flight: PauseMode) -> Transfer:
        """Pause the server and prepare its parameters. `finish_transfer` or `abandon_transfer` must follow.

        Raises `WeightUpdateError` and `EngineError`; the server runs with the weights of before then, unless the text
        says otherwise.
        """
        check_pause_mode("begin_transfer", in_flight)
        with ExitStack() as stack:
            stack.enter_context(self._state.exclusive_update("begin_transfer"))
            await self._state.forget_if_restarted()
            await self._state.refuse_while_weights_sleep("begin_transfer")
            stays_paused, in_flight = await self._stays_paused(), await self._possible(in_flight)
            stack.enter_context(self._media_forgotten())
            previous = await self._pause_for_update(in_flight, stays_paused)
            begun = Transfer(stack, stays_paused, previous)
            self._state.unusable_weights = "a transfer of weights was begun and not seen to end"
            try:
                await self._routes.call("POST", "/start_weight_update", "beginning a transfer of weights")
            except EngineError as error:
                await self._recover(begun, error)
            begun.held = stack.pop_all()
            return begun

    async def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        """Receive one bucket of tensors; returns when they are in the model."""
        content = {"update_info": dict(update_info)}
        await self._routes.call("POST", "/update_weights", "receiving weights", content=content)

    async def finish_transfer(self, begun: Transfer, version: str) -> None:
        """Complete the parameters, empty every cache, label the weights, and resume. Raises `WeightUpdateError`."""
        if not version:
            raise InvalidRequestError("finish_transfer", "the version is empty")
        with begun.held:
            try:
                content = {"weight_version": version}
                await self._routes.call("POST", "/finish_weight_update", "finishing a transfer", content=content)
            except EngineError as error:
                await self._recover(begun, error)
            self._state.record_transfer()
            try:
                await self._reset_all()
                await self.update_weight_version(version)
            except EngineError as error:
                raise WeightUpdateError(
                    f"{self.base_url} has received the weights {version!r}, but may still hold cached results or the "
                    f"label of the weights before, and was left paused: {error}. Repeat the update"
                ) from error
            if not begun.stays_paused:
                await self._send_resume()

    async def abandon_transfer(self, begun: Transfer, cause: Exception) -> None:
        """Load the weights of before again, from their directory. Always raises `WeightUpdateError`, with the state."""
        with begun.held:
            await self._recover(begun, cause)

    async def _recover(self, begun: Transfer, cause: Exception) -> NoReturn:
        failed = f"a transfer of weights to {self.base_url} failed: {cause}. The server "
        try:  # else the next transfer is refused, because this one is active
            await self._routes.call("POST", "/finish_weight_update", "ending a transfer")
        except EngineError as error:
            log.debug("the failed transfer at %s could not be ended: %s", self.base_url, error)
        failure = WeightUpdateError(
            f"{failed}is left paused, with parameters that have no storage; repeat the update, or load a checkpoint "
            "(reload_weights), or restart it"
        )
        failure.__cause__ = cause
        await self._restore(begun.previous, failure, begun.stays_paused)
