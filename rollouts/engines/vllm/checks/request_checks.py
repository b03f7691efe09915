"""All checks of a request before it is sent: some mistakes crash a server, others produce plausible garbage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rollouts.engines.limits import check_prompt
from rollouts.engines.protocol import GenerateRequest
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.checks.media_checks import feature_violations, placement_violations
from rollouts.engines.vllm.checks.sampling_checks import sampling_violations
from rollouts.engines.vllm.media.mode_selection import MediaMode, select_mode
from rollouts.errors import InvalidRequestError

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
