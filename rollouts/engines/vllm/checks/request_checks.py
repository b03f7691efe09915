"""All checks of a request before it is sent: some mistakes crash a server, others produce plausible garbage."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from renderers.placement import PlacedItem
from rollouts.engines.protocol import GenerateRequest
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.checks.media_checks import check_features, check_placement
from rollouts.engines.vllm.checks.sampling_checks import check_sampling
from rollouts.engines.vllm.media.mode_selection import MediaMode, select_mode
from rollouts.errors import InvalidRequestError, OverlongPromptError

_MAX_ID_LENGTH = 256


def check_request(
    request: GenerateRequest,
    capabilities: ServerCapabilities,
    *,
    vocab_size: int | None,
    media: MediaMode = "features",
) -> None:
    """Raise if the server would refuse the request, crash, or misinterpret it.

    `media` is how its media are sent (`mode_selection`). `vocab_size` None: the server refuses ids past its vocabulary.

    Raises `OverlongPromptError`, `InvalidRequestError`, and `CapabilityError` if another server could run the request.
    """
    _check_ids_for_headers(request)
    ids = prompt_array(request)
    if not len(ids):
        raise InvalidRequestError(request.request_id, "the prompt is empty")
    if len(ids) + 1 > capabilities.max_model_len:
        raise OverlongPromptError(request.request_id, len(ids), capabilities.max_model_len)
    _check_vocabulary(request, ids, vocab_size)
    check_sampling(request, vocab_size=vocab_size)
    placed = check_placement(request, ids, capabilities)
    _check_stray_tokens(request, ids, placed, capabilities.placeholder_ids)
    if not placed:
        return
    if select_mode(request, media, capabilities) == "features":
        check_features(request, placed, capabilities)


def prompt_array(request: GenerateRequest) -> np.ndarray:
    """The prompt as int64 (tokens,); `GenerateRequest` checked that its ids are integers."""
    prompt = request.prompt_ids
    if isinstance(prompt, np.ndarray):
        return prompt.astype(np.int64, copy=False)
    # Twice as fast as numpy with a list.
    return np.frombuffer(array("q", prompt), dtype=np.int64) if len(prompt) else np.empty(0, dtype=np.int64)


def _check_ids_for_headers(request: GenerateRequest) -> None:
    """request_id and session_id are sent in HTTP headers."""
    for field, name in (("request_id", request.request_id), ("session_id", request.session_id)):
        if name is None:
            continue
        if not 0 < len(name) <= _MAX_ID_LENGTH or not name.isascii() or not name.isprintable() or " " in name:
            raise InvalidRequestError(
                request.request_id[:_MAX_ID_LENGTH],
                f"{field} is {name[: _MAX_ID_LENGTH + 1]!r}; use 1 to {_MAX_ID_LENGTH} printable ASCII characters "
                "without spaces",
            )


def _check_vocabulary(request: GenerateRequest, ids: np.ndarray, vocab_size: int | None) -> None:
    limit = 2**63 - 1 if vocab_size is None else vocab_size
    if ids.min() >= 0 and ids.max() < limit:
        return
    position = int(np.argmax((ids < 0) | (ids >= limit)))
    size = "" if vocab_size is None else f" of {vocab_size}"
    raise InvalidRequestError(
        request.request_id, f"token {position} of the prompt is {ids[position]}, which is not in the vocabulary{size}"
    )


def _check_stray_tokens(
    request: GenerateRequest, ids: np.ndarray, placed: Sequence[PlacedItem], placeholder_ids: Mapping[str, int]
) -> None:
    """Refuse media tokens outside of all placeholders, which are garbage to the model, unless the model sampled them.

    A token that stands for features may only occur in runs of features; the marker of a template anywhere in a
    placeholder.
    """
    feature_tokens = {token: modality for modality, token in placeholder_ids.items()}
    feature_tokens |= {int(ids[placeholder.runs[0][0]]): item.modality for item, placeholder in placed}
    markers = {
        token: modality for modality, token in request.placeholder_token_ids.items() if token not in feature_tokens
    }
    sampled = _sampled_spans(request, len(ids))
    placeholders = [placeholder for _, placeholder in placed]
    _check_covered(request, ids, feature_tokens, [*sampled, *(run for each in placeholders for run in each.runs)])
    _check_covered(request, ids, markers, [*sampled, *((each.offset, each.end) for each in placeholders)])


def _check_covered(
    request: GenerateRequest, ids: np.ndarray, modalities: Mapping[int, str], spans: Sequence[tuple[int, int]]
) -> None:
    """Raise if one of the tokens `modalities` (token -> modality) lies outside of the half-open `spans`."""
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
            raise InvalidRequestError(
                request.request_id,
                f"token {strays[0]} of the prompt is {token}, which stands for {modality} features, and lies in no "
                f"placeholder ({len(strays)} such tokens). Pass the media of the prompt as multi_modal_data; if an "
                "earlier completion sampled the token as text, include it in `sampled`",
            )


def _sampled_spans(request: GenerateRequest, length: int) -> Sequence[tuple[int, int]]:
    for start, end in request.sampled:
        if not 0 <= start <= end <= length:
            raise InvalidRequestError(
                request.request_id, f"`sampled` contains the range {start}:{end}, but the prompt has {length} tokens"
            )
    return request.sampled
