"""What is refused before a request is sent."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from renderers import MediaItem, MultiModalData
from renderers.placement import item_placement_error
from rollouts.engines.protocol import GenerateRequest, check_prompt
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.features import ITEM_BYTES, ServerNumbers, tensor_type
from rollouts.engines.vllm.media_payload import MediaMode, dense_items, feature_token, item_name, select_mode
from rollouts.engines.vllm.sampling_checks import sampling_violations
from rollouts.engines.vllm.sounds import sound_error
from rollouts.errors import InvalidRequestError

# Checks that the media of a request match its prompt and the tensors that the server expects.
#
# Each check yields what is wrong; its caller stops at the first violation, and later checks rely on the earlier ones.


_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


def placement_violations(request: GenerateRequest, ids: np.ndarray, capabilities: ServerCapabilities) -> Iterator[str]:
    """Check the lists, hashes and ranges of the media against each other and the prompt."""
    if request.multi_modal_data is None:
        return
    yield from _list_violations(request.multi_modal_data)
    placed = request.media
    if (error := item_placement_error(placed, len(ids))) is not None:
        yield error
    tokens: dict[str, int] = {}
    for item, placeholder in placed:
        if item.num_tokens < 1:
            yield f"{item_name(item)} has {item.num_tokens} tokens in the prompt"
        known_token = feature_token(request, item, capabilities)
        # If neither server nor renderer names the token, all items of a modality must have the same one.
        first_token = int(ids[placeholder.runs[0][0]])
        token = tokens.setdefault(item.modality, first_token) if known_token is None else known_token
        for start, end in placeholder.runs:
            is_wrong = ids[start:end] != token
            if is_wrong.any():
                position = start + int(is_wrong.argmax())
                yield (
                    f"token {position} is {ids[position]} and not {token}, which stands for {item.modality} features, "
                    f"within the placeholder {start}:{end} of {item_name(item)}"
                )


def _list_violations(media: MultiModalData) -> Iterator[str]:
    hashes, placeholders, items = media.mm_hashes, media.mm_placeholders, media.media_items
    if not hashes.keys() == placeholders.keys() == items.keys():
        yield (
            f"the lists of media are of different modalities: mm_hashes {sorted(hashes)}, mm_placeholders "
            f"{sorted(placeholders)}, mm_items {sorted(items)}"
        )
    first_items: dict[str, MediaItem] = {}
    for modality, ranges in placeholders.items():
        counts = [len(each[modality]) for each in (items, hashes, placeholders)]
        if len(set(counts)) > 1:
            yield f"{counts[0]} {modality}s have {counts[1]} hashes and {counts[2]} placeholders"
        for index, (mm_hash, item) in enumerate(zip(hashes[modality], items[modality], strict=True)):
            if mm_hash != item.mm_hash or item.modality != modality:
                yield f"{modality} {index} is listed as {mm_hash!r:.80} and is {item.modality} {item.mm_hash!r:.80}"
            if not isinstance(mm_hash, str) or not mm_hash:
                yield f"a {modality} has the mm_hash {mm_hash!r}"
            first = first_items.setdefault(mm_hash, item)
            if first is not item and (first.source.digest, first.num_tokens) != (item.source.digest, item.num_tokens):
                yield (
                    f"the mm_hash {mm_hash!r:.80} names two different media, of the sources "
                    f"{first.source.digest[:12]} and {item.source.digest[:12]}; the server would use the first for "
                    "both. A hash must depend on the source and the processor settings"
                )
        for each in ranges:
            if type(each.offset) is not int or type(each.length) is not int:
                yield f"a {modality} placeholder is {each.offset!r}, {each.length!r}, not two ints"
        for previous, each in itertools.pairwise(ranges):
            if each.offset < previous.offset:
                yield f"the {modality}s are not in prompt order: one at {each.offset} follows one at {previous.offset}"


def feature_violations(request: GenerateRequest, capabilities: ServerCapabilities) -> Iterator[str]:
    """Check that the items hold the tensors that this server expects. `select_mode` must have selected features."""
    for item, placeholder in request.media:
        for sent, _ in dense_items(item, placeholder, capabilities):
            yield from _tensor_violations(sent, capabilities)


def _tensor_violations(item: MediaItem, capabilities: ServerCapabilities) -> Iterator[str]:
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
    pixels, grid = _PIXELS[item.modality], f"{item.modality}_grid_thw"
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
            f"{pixels} of {item_label} has patches of {shape[1]} values, the server's model needs {width}: load the "
            "renderer from the directory of the model that is served"
        )
    merge_area = capabilities.merge_area
    if merge_area is not None and item.num_tokens * merge_area != patches:
        yield (
            f"{item_label} has {item.num_tokens} tokens for {patches} patches, of which the model merges {merge_area} "
            "into one token"
        )


# All checks of a request before it is sent: some mistakes crash a server, others produce plausible garbage.


_MAX_ID_LENGTH = 256


def check_request(
    request: GenerateRequest,
    capabilities: ServerCapabilities,
    *,
    vocab_size: int | None,
    media: MediaMode = "features",
) -> None:
    """Raise if the server would refuse the request, crash, or misinterpret it.

    `media` is how its media are sent (`VLLMEngine`). `vocab_size` None: the server refuses ids past its vocabulary.

    Raises `OverlongPromptError`, `InvalidRequestError`, and `CapabilityError` if another server could run the request.
    """
    _refuse_first(request, _header_violations(request))
    ids = check_prompt(request, capabilities.max_model_len, vocab_size)
    _refuse_first(request, sampling_violations(request, vocab_size=vocab_size))
    _refuse_first(request, placement_violations(request, ids, capabilities))
    _refuse_first(request, _stray_token_violations(request, ids, capabilities.placeholder_ids))
    if request.multi_modal_data is not None and select_mode(request, media, capabilities) == "features":
        _refuse_first(request, feature_violations(request, capabilities))


def _refuse_first(request: GenerateRequest, violations: Iterator[str]) -> None:
    if (violation := next(violations, None)) is not None:
        raise InvalidRequestError(request.request_id[:_MAX_ID_LENGTH], violation)


def _header_violations(request: GenerateRequest) -> Iterator[str]:
    """request_id and session_id are sent in HTTP headers."""
    for field, name in (("request_id", request.request_id), ("session_id", request.session_id)):
        if name is None:
            continue
        if not 0 < len(name) <= _MAX_ID_LENGTH or not name.isascii() or not name.isprintable() or " " in name:
            yield (
                f"{field} is {name[: _MAX_ID_LENGTH + 1]!r}; use 1 to {_MAX_ID_LENGTH} printable ASCII characters "
                "without spaces"
            )


def _stray_token_violations(
    request: GenerateRequest, ids: np.ndarray, placeholder_ids: Mapping[str, int]
) -> Iterator[str]:
    """Find media tokens outside of all placeholders, which are garbage to the model, unless the model sampled them.

    A token that stands for features may only occur in runs of features; the marker of a template anywhere in a
    placeholder.
    """
    for start, end in request.sampled:
        if not 0 <= start <= end <= len(ids):
            yield f"`sampled` contains the range {start}:{end}, but the prompt has {len(ids)} tokens"
    placed = request.media
    feature_tokens = {token: modality for modality, token in placeholder_ids.items()}
    feature_tokens |= {int(ids[placeholder.runs[0][0]]): item.modality for item, placeholder in placed}
    markers = {
        token: modality for modality, token in request.placeholder_token_ids.items() if token not in feature_tokens
    }
    runs = [run for _, placeholder in placed for run in placeholder.runs]
    ranges = [(placeholder.offset, placeholder.end) for _, placeholder in placed]
    yield from _uncovered(ids, feature_tokens, [*request.sampled, *runs])
    yield from _uncovered(ids, markers, [*request.sampled, *ranges])


def _uncovered(ids: np.ndarray, modalities: Mapping[int, str], spans: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Find tokens of `modalities` (token -> modality) outside of the half-open `spans`."""
    covered: np.ndarray | None = None
    for token, modality in modalities.items():
        positions = np.flatnonzero(ids == token)
        if not len(positions):
            continue
        if covered is None:
            covered = np.zeros(len(ids), dtype=bool)
            for start, end in spans:
                covered[start:end] = True
        strays = positions[~covered[positions]]
        if len(strays):
            yield (
                f"token {strays[0]} of the prompt is {token}, which stands for {modality} features, and lies in no "
                f"placeholder ({len(strays)} such tokens). Pass the media of the prompt as multi_modal_data; if an "
                "earlier completion sampled the token as text, include it in `sampled`"
            )


#: This many sessions keep the salt of their first request.
_MAX_SESSIONS = 65_536


class CacheSalts:
    """One salt per model (or adapter) and weight version. A session keeps the salt of its first request to a model, so
    that all of its turns share the prefix cache even if the weights change between them."""

    def __init__(self) -> None:
        self._by_session: OrderedDict[tuple[str, str], str] = OrderedDict()

    def salt(self, model: str, weight_version: str, session_id: str | None) -> str:
        salt = _digest(model, weight_version)
        if session_id is None:
            return salt
        salt = self._by_session.setdefault((session_id, model), salt)
        self._by_session.move_to_end((session_id, model))
        if len(self._by_session) > _MAX_SESSIONS:
            self._by_session.popitem(last=False)
        return salt


@functools.lru_cache(maxsize=64)
def _digest(model: str, weight_version: str) -> str:
    return hashlib.blake2b(f"{model}\0{weight_version}".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """How completions that a pause aborts are continued.

    They wait until the server runs again, at most `wait_seconds`, and are continued, each at most `rounds` times. The
    server is polled first after `first_poll_seconds`, later at most every `longest_poll_seconds`.
    """

    rounds: int = 64
    wait_seconds: float = 3600.0
    first_poll_seconds: float = 0.05
    longest_poll_seconds: float = 1.0
