"""Every check before a request is sent: some mistakes take a server down, others it answers with plausible garbage."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from renderers.placement import PlacedItem
from rollouts.engines.protocol import GenerateRequest
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.checks.media_checks import check_features, check_placement
from rollouts.engines.vllm.checks.sampling_checks import check_sampling
from rollouts.engines.vllm.media.mode_selection import MediaMode, check_mode, select_mode
from rollouts.errors import InvalidRequestError, OverlongPromptError

_LONGEST_ID = 256


def check_request(
    request: GenerateRequest,
    capabilities: ServerCapabilities,
    *,
    vocab_size: int | None,
    media: MediaMode = "features",
) -> None:
    """Raise unless the server will answer the request, and answer what was meant.

    `media` is how its media are sent (`mode_selection`). `vocab_size` None: the server refuses ids past its vocabulary.

    Raises `OverlongPromptError`, `InvalidRequestError`, and `CapabilityError` where another server could answer.
    """
    _check_names(request)
    ids = prompt_array(request)
    if not len(ids):
        raise InvalidRequestError(request.request_id, "the prompt is empty")
    if len(ids) + 1 > capabilities.max_model_len:
        raise OverlongPromptError(request.request_id, len(ids), capabilities.max_model_len)
    _check_vocabulary(request, ids, vocab_size)
    check_sampling(request, vocab_size=vocab_size)
    placed = check_placement(request, ids, capabilities)
    _check_strays(request, ids, placed, capabilities.placeholder_ids)
    if not placed:
        return
    mode = select_mode(request, media, capabilities)
    check_mode(request, mode, capabilities)
    if mode == "features":
        check_features(request, placed, capabilities)


def prompt_array(request: GenerateRequest) -> np.ndarray:
    """The prompt, whose ids `GenerateRequest` has found to be integers, as int64 (tokens,)."""
    prompt = request.prompt_ids
    if isinstance(prompt, np.ndarray):
        return prompt.astype(np.int64, copy=False)
    # Twice as fast as numpy is with a list.
    return np.frombuffer(array("q", prompt), dtype=np.int64) if len(prompt) else np.empty(0, dtype=np.int64)


def _check_names(request: GenerateRequest) -> None:
    """Both travel in HTTP headers."""
    for what, name in (("request_id", request.request_id), ("session_id", request.session_id)):
        if name is None:
            continue
        if not 0 < len(name) <= _LONGEST_ID or not name.isascii() or not name.isprintable() or " " in name:
            raise InvalidRequestError(
                request.request_id[:_LONGEST_ID],
                f"{what} is {name[: _LONGEST_ID + 1]!r}; it has 1 to {_LONGEST_ID} printable ASCII characters and no "
                "space",
            )


def _check_vocabulary(request: GenerateRequest, ids: np.ndarray, vocab_size: int | None) -> None:
    past = 2**63 - 1 if vocab_size is None else vocab_size
    least, most = int(ids.min()), int(ids.max())
    if least >= 0 and most < past:
        return
    place = int(np.argmax((ids < 0) | (ids >= past)))
    size = "" if vocab_size is None else f" of {vocab_size}"
    raise InvalidRequestError(
        request.request_id, f"token {place} of the prompt is {ids[place]}, which is not in the vocabulary{size}"
    )


def _check_strays(
    request: GenerateRequest, ids: np.ndarray, placed: Sequence[PlacedItem], placeholder_ids: Mapping[str, int]
) -> None:
    """A media token outside of every medium is garbage to the model, unless the model itself has said it.

    A token that carries features stands in the runs of features alone; the marker of a template may stand anywhere in
    what replaced it.
    """
    carrying = {token: modality for modality, token in placeholder_ids.items()}
    carrying |= {int(ids[where.runs[0][0]]): item.modality for item, where in placed}
    markers = {token: modality for modality, token in request.placeholder_token_ids.items() if token not in carrying}
    sampled = _sampled(request, len(ids))
    _check_covered(request, ids, carrying, [*sampled, *(run for _, where in placed for run in where.runs)])
    _check_covered(request, ids, markers, [*sampled, *((where.offset, where.end) for _, where in placed)])


def _check_covered(
    request: GenerateRequest, ids: np.ndarray, names: Mapping[int, str], spans: Sequence[tuple[int, int]]
) -> None:
    """Raise where one of the tokens `names` (token -> modality) lies outside of the half-open `spans`."""
    covered: np.ndarray | None = None
    for token, modality in names.items():
        places = np.flatnonzero(ids == token)
        if not len(places):
            continue
        if covered is None:
            covered = np.zeros(len(ids), dtype=bool)
            for start, end in spans:
                covered[start:end] = True
        strays = places[~covered[places]]
        if len(strays):
            raise InvalidRequestError(
                request.request_id,
                f"token {strays[0]} of the prompt is {token}, which stands for {modality} features, and lies in no "
                f"placeholder ({len(strays)} such tokens). Pass the media of the prompt as multi_modal_data; if an "
                "earlier completion sampled it as text, say so with `sampled`",
            )


def _sampled(request: GenerateRequest, length: int) -> Sequence[tuple[int, int]]:
    for start, end in request.sampled:
        if not 0 <= start <= end <= length:
            raise InvalidRequestError(
                request.request_id, f"`sampled` names the tokens {start}:{end} of a prompt of {length}"
            )
    return request.sampled
