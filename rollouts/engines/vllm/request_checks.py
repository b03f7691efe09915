"""What is refused before a request is sent."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterator

from renderers import MediaItem
from rollouts.engines.http.prompt_checks import (
    header_violations,
    item_name,
    placement_violations,
    refuse_first,
    stray_token_violations,
)
from rollouts.engines.protocol import GenerateRequest
from rollouts.engines.request_limits import check_prompt
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.sampling_checks import sampling_violations
from rollouts.engines.vllm.sounds import sound_error
from rollouts.engines.vllm.tensors import ITEM_BYTES, ServerNumbers, tensor_type

# Checks that the media of a request are the tensors that the server expects.


def feature_violations(item: MediaItem, capabilities: ServerCapabilities) -> Iterator[str]:
    """Check that an item, as it is sent, holds the tensors that this server expects."""
    item_label = item_name(item)
    if not item.tensors:
        yield f"{item_label} holds no tensors"
    for name, tensor in item.tensors.items():
        if name not in item.fields:
            yield f"{item_label} has no entry in `fields` for {name}"
        if isinstance(tensor, ServerNumbers):
            continue
        dtype, shape = tensor_type(tensor)
        if dtype not in ITEM_BYTES:
            yield f"{name} of {item_label} is {dtype}"
        if item.fields[name].kind == "flat" and not shape:
            yield f"{name} of {item_label} is flat and has no rows"
    if item.modality == "audio":
        error = None if capabilities.sounds is None else sound_error(item, capabilities.sounds)
        if error is not None:
            yield f"{item_label}: {error}"
        return
    pixels, grid = {"image": "pixel_values", "video": "pixel_values_videos"}[item.modality], f"{item.modality}_grid_thw"
    if grid not in item.tensors:
        return
    sides = item[grid]
    counts = sides.tolist()
    if sides.shape != (3,) or sides.dtype.kind not in "iu" or min(counts) < 1:
        yield f"{grid} of {item_label} is {counts}, not three patch counts"
    patches = math.prod(counts)
    if pixels not in item.tensors:
        yield f"{item_label} has no {pixels}, only {', '.join(item.tensors)}"
    shape = tensor_type(item.tensors[pixels]).shape
    if len(shape) != 2 or shape[0] != patches:
        yield f"{pixels} of {item_label} is of shape {shape}, but its {grid} {counts} requires {patches} rows"
    width = capabilities.patch_values
    if width is not None and shape[1] != width:
        yield (
            f"{pixels} of {item_label} has patches of {shape[1]} values, the server's model needs {width}: "
            "load the renderer from the directory of the model that is served"
        )
    merge_area = capabilities.merge_area
    if merge_area is not None and item.num_tokens * merge_area != patches:
        yield (
            f"{item_label} has {item.num_tokens} tokens for {patches} patches, of which the model merges "
            f"{merge_area} into one token"
        )


# The checks of a request before it is sent: some mistakes crash a server, others produce plausible garbage.


def check_request(request: GenerateRequest, capabilities: ServerCapabilities) -> None:
    """Raise if the server would refuse the request, crash, or misinterpret it.

    `media_payload` checks what is sent of media. The server itself refuses ids past its vocabulary.

    Raises `ContextLengthError`, `InvalidRequestError`.
    """
    refuse_first(request, header_violations(request))
    ids = check_prompt(request, capabilities.max_model_len, None)
    refuse_first(request, sampling_violations(request))
    refuse_first(request, placement_violations(request, ids, capabilities.placeholder_ids))
    refuse_first(request, stray_token_violations(request, ids, capabilities.placeholder_ids))


class CacheSalts:
    """One salt per model (or adapter) and weight version. A session keeps the salt of its first request to a
    model, so that all of its turns share the prefix cache even if the weights change between them."""

    def __init__(self) -> None:
        self._by_session: OrderedDict[tuple[str, str], str] = OrderedDict()

    def salt(self, model: str, weight_version: str, session_id: str | None) -> str:
        salt = hashlib.blake2b(f"{model}\0{weight_version}".encode(), digest_size=16).hexdigest()
        if session_id is None:
            return salt
        salt = self._by_session.setdefault((session_id, model), salt)
        self._by_session.move_to_end((session_id, model))
        # This many sessions keep the salt of their first request.
        if len(self._by_session) > 65_536:
            self._by_session.popitem(last=False)
        return salt
