"""Checks of a request's ids and media against each other, before it is sent to any server.

Each check yields what is wrong; its caller stops at the first violation, and later checks rely on the earlier
ones.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from renderers import MediaItem, MultiModalData
from renderers.placement import item_placement_error
from rollouts.engines.protocol import GenerateRequest
from rollouts.errors import InvalidRequestError

_MAX_ID_LENGTH = 256


def refuse_first(request: GenerateRequest, violations: Iterator[str]) -> None:
    """Raise `InvalidRequestError` with the first violation, if there is one."""
    if (violation := next(violations, None)) is not None:
        # The id may be what is wrong.
        raise InvalidRequestError(request.request_id[:_MAX_ID_LENGTH], violation)


def header_violations(request: GenerateRequest) -> Iterator[str]:
    """request_id and session_id are sent in HTTP headers."""
    for field, name in (("request_id", request.request_id), ("session_id", request.session_id)):
        if name is None:
            continue
        if not 0 < len(name) <= _MAX_ID_LENGTH or not name.isascii() or not name.isprintable() or " " in name:
            yield (
                f"{field} is {name[: _MAX_ID_LENGTH + 1]!r}; use 1 to {_MAX_ID_LENGTH} printable ASCII "
                "characters without spaces"
            )


def option_violations(
    request: GenerateRequest, vocab_size: int | None, allowed: Collection[str], refused: Mapping[str, str]
) -> Iterator[str]:
    """Check what all servers take: greedy samples, stop tokens, and the names in `sampling.extra`, `allowed`
    ones and those that are `refused`, with the reasons.

    `vocab_size` None: any token of 63 bits.
    """
    sampling = request.sampling
    if sampling.temperature == 0 and sampling.n > 1:
        yield f"n is {sampling.n} with temperature 0, where all samples are equal; use n=1"
    limit = 2**63 if vocab_size is None else vocab_size
    for token in sampling.stop_token_ids:
        if not 0 <= token < limit:
            yield f"stop_token_ids holds {token}, which is not in a vocabulary of {limit}"
    for name in sampling.extra:
        if name in refused:
            yield f"sampling.extra holds {name!r}: {refused[name]}"
        elif name not in allowed:
            known = ", ".join(sorted(allowed))
            yield f"sampling.extra holds {name!r}, which is unknown here; it may hold {known}"


def sampled_marker(request: GenerateRequest, ids: np.ndarray, tokens: Sequence[int]) -> int | None:
    """The first position of one of `tokens` outside of all placeholders: a policy sampled it as text."""
    is_text = np.isin(ids, tokens)
    for _, placeholder in request.media:
        is_text[placeholder.offset : placeholder.end] = False
    return int(is_text.argmax()) if is_text.any() else None


def item_name(item: MediaItem) -> str:
    return f"{item.modality} {item.mm_hash[:12]}"


def feature_token(request: GenerateRequest, item: MediaItem, placeholder_ids: Mapping[str, int]) -> int | None:
    """The token that stands for one feature of an item; None if neither server nor renderer names it.

    The server's token, of `placeholder_ids`, takes precedence. Otherwise it is the marker of the template, if
    the marker is only repeated; Gemma 3 replaces <start_of_image> by text around <image_soft_token>, which
    stands for the features.
    """
    token = placeholder_ids.get(item.modality)
    if token is None and item.expansion is None:
        return request.placeholder_token_ids.get(item.modality)
    return token


def placement_violations(
    request: GenerateRequest, ids: np.ndarray, placeholder_ids: Mapping[str, int]
) -> Iterator[str]:
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
        if item.modality == "video" and item.has_sound:
            yield (
                f"{item_name(item)} has the tokens of its sound among its own (use_audio_in_video), which no "
                "server takes: a range has no mask, and a server that decodes a file reads the frames "
                "alone. Sample with LocalEngine, or load the renderer without the option"
            )
        known_token = feature_token(request, item, placeholder_ids)
        # If neither server nor renderer names the token, all items of a modality must have the same one.
        first_token = int(ids[placeholder.runs[0][0]])
        token = tokens.setdefault(item.modality, first_token) if known_token is None else known_token
        for start, end in placeholder.runs:
            is_wrong = ids[start:end] != token
            if is_wrong.any():
                position = start + int(is_wrong.argmax())
                yield (
                    f"token {position} is {ids[position]} and not {token}, which stands for {item.modality} "
                    f"features, within the placeholder {start}:{end} of {item_name(item)}"
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
            first = first_items.setdefault(mm_hash, item)
            if first is not item and (first.source.digest, first.num_tokens) != (item.source.digest, item.num_tokens):
                yield (
                    f"the mm_hash {mm_hash!r:.80} names two different media, of the sources "
                    f"{first.source.digest[:12]} and {item.source.digest[:12]}; the server would use the "
                    "first for both. A hash must depend on the source and the processor settings"
                )
        for previous, each in itertools.pairwise(ranges):
            if each.offset < previous.offset:
                yield f"the {modality}s are not in prompt order: one at {each.offset} follows one at {previous.offset}"


def stray_token_violations(
    request: GenerateRequest, ids: np.ndarray, placeholder_ids: Mapping[str, int]
) -> Iterator[str]:
    """Find media tokens outside of all placeholders, unless the model sampled them."""
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
        # Made only where such a token occurs, which most prompts do not have.
        if covered is None:
            covered = np.zeros(len(ids), dtype=bool)
            for start, end in spans:
                covered[start:end] = True
        strays = positions[~covered[positions]]
        if len(strays):
            yield (
                f"token {strays[0]} of the prompt is {token}, which stands for {modality} features, and lies "
                f"in no placeholder ({len(strays)} such tokens). Pass the media of the prompt as "
                "multi_modal_data; if an earlier completion sampled the token as text, include it in "
                "`sampled`"
            )
