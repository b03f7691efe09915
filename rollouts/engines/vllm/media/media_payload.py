"""The ways in which a request shows its media to a server: as processed features, or as source files."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from renderers import MediaItem, MediaSource, MultiModalData, RenderedTokens, RendererError
from renderers.media.policy import MediaPolicy
from renderers.media.raw_video import is_raw_video
from renderers.media.sniffing import sniff
from renderers.placement import PlacedItem
from rollouts.engines.protocol import GenerateRequest
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.http.exchange import Body
from rollouts.engines.vllm.media.dense_items import request_dense_items
from rollouts.engines.vllm.media.image_file import image_file
from rollouts.engines.vllm.media.mode_selection import MediaMode, check_mode, features_objections, select_mode
from rollouts.engines.vllm.media.video_file import MEDIA_TYPE, frames_file
from rollouts.engines.vllm.wire.feature_encoding import encode_features
from rollouts.engines.vllm.wire.generate_response import Generation
from rollouts.engines.vllm.wire.tensors import PixelDtype
from rollouts.errors import InvalidRequestError, MalformedResultError

__all__ = ["MediaMode", "MediaPayload", "media_payload", "select_mode"]

_FEATURES_INSTEAD = ', or use media="features"'


class MediaPayload(Protocol):
    """How one request's media travel. `names` are those by which the server's cache knows them, with their bytes."""

    @property
    def names(self) -> Mapping[str, int]: ...

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def returns_prompt(self) -> bool:
        """Whether the server is asked for the prompt as it ran it, for `check`."""
        ...

    def body_field(self, included: Collection[str]) -> Body:
        """The body_field of the request body that describes the media, with the data of those that are included."""
        ...

    def is_cache_miss(self, status: int, body: str) -> bool:
        """Whether an error may mean that the server lacks what was shown by name alone."""
        ...

    def check(self, answer: Generation) -> None:
        """Raise where the server made something else of the media than the prompt says."""
        ...


def media_payload(request: GenerateRequest, mode: MediaMode, capabilities: ServerCapabilities) -> MediaPayload:
    """The form for a request that `check_request` passed. Raises `CapabilityError` or `InvalidRequestError`."""
    media = request.multi_modal_data
    if media is None or media.is_empty():
        return NoMedia(request)
    resolved = select_mode(request, mode, capabilities)
    check_mode(request, resolved, capabilities)
    if resolved == "content_parts":
        return ContentPartsPayload(
            request, or_features=not features_objections(request, media.items_with_ranges(), capabilities)
        )
    assert capabilities.pixel_dtype is not None  # else an objection would have been raised
    items = request_dense_items(media.items_with_ranges(), capabilities)
    return FeaturesPayload(request, items, capabilities.pixel_dtype)


class NoMedia:
    """A prompt of text."""

    names: Mapping[str, int] = {}
    returns_prompt = False

    def __init__(self, request: GenerateRequest) -> None:
        self.prompt_ids = request.prompt_ids

    def body_field(self, included: Collection[str]) -> Body:
        return []

    def is_cache_miss(self, status: int, body: str) -> bool:
        return False

    def check(self, answer: Generation) -> None:
        pass


class FeaturesPayload:
    """Expanded ids and processed tensors: the server adds nothing to them."""

    returns_prompt = False

    def __init__(self, request: GenerateRequest, placed: Sequence[PlacedItem], pixel_dtype: PixelDtype) -> None:
        self.prompt_ids = request.prompt_ids
        self.names = {item.mm_hash: item.nbytes for item, _ in placed}
        self._media = MultiModalData.from_items(placed)
        self._pixel_dtype = pixel_dtype

    def body_field(self, included: Collection[str]) -> Body:
        segments = encode_features(self._media, pixel_dtype=self._pixel_dtype, include=included.__contains__)
        return [b'"features":', *segments]

    def is_cache_miss(self, status: int, body: str) -> bool:
        # The reason is in the server's log alone; the client gets the answer to every unforeseen error.
        return status == 500 and "EngineCore" not in body

    def check(self, answer: Generation) -> None:
        pass


class ContentPartsPayload:
    """Logical ids and source files, which the server decodes, processes and expands itself.

    Items are named by the digest of their source, apart from the names of features: the same image may come out
    with other pixels. `or_features`: features would serve the request too, which an error may then advise.
    """

    returns_prompt = True

    def __init__(self, request: GenerateRequest, *, or_features: bool = False) -> None:
        self._request = request
        self._or_features = or_features
        media = request.multi_modal_data or MultiModalData()
        self._items = [item for item, _ in media.items_with_ranges()]
        try:
            self.prompt_ids = RenderedTokens(
                list(request.prompt_ids), multi_modal_data=media, placeholder_token_ids=request.placeholder_token_ids
            ).logical_ids
        except KeyError as error:
            raise InvalidRequestError(
                request.request_id,
                f"content_parts needs `placeholder_token_ids` with the token that stands for one {error.args[0]} "
                "(`RenderedTokens.placeholder_token_ids`)",
            ) from error
        except RendererError as error:
            raise InvalidRequestError(request.request_id, str(error)) from error
        self.names = {_name(item): item.source.nbytes for item in self._items}

    def body_field(self, included: Collection[str]) -> Body:
        segments: list[bytes | memoryview] = [b'"content_parts":[']
        urls: dict[str, Body] = {}  # of an item that is shown twice, each place needs the data
        for item in self._items:
            name = _name(item)
            part = {"type": f"{item.modality}_url", "uuid": name, "url": None}
            separator = b"," if len(segments) > 1 else b""
            if name in included:
                if name not in urls:
                    urls[name] = self._data_url(item)
                del part["url"]
                opening = json.dumps(part)[:-1].encode()
                segments += [separator, opening, b',"url":"', *urls[name], b'"}']
            else:
                segments += [separator, json.dumps(part).encode()]
        return [*segments, b"]"]

    def is_cache_miss(self, status: int, body: str) -> bool:
        return status == 400 and "Cache miss" in body

    def check(self, answer: Generation) -> None:
        made = answer.prompt_expansion()
        media = self._request.multi_modal_data or MultiModalData()
        ours = {
            modality: [(where.offset, where.length) for where in ranges]
            for modality, ranges in media.mm_placeholders.items()
        }
        if made.prompt_ids == list(self._request.prompt_ids) and _agree(made.placeholders, media):
            return
        raise MalformedResultError(
            self._request.request_id,
            f"the server expanded the prompt to {len(made.prompt_ids)} tokens with media at {made.placeholders}, the "
            f"renderer to {len(self._request.prompt_ids)} with {ours}: their processors differ. Load the renderer "
            f"from the directory that the server serves{_FEATURES_INSTEAD if self._or_features else ''}",
        )

    def _data_url(self, item: MediaItem) -> Body:
        data, kind = self._file(item.source, item.modality)
        return [f"data:{kind};base64,".encode(), base64.b64encode(data)]

    def _file(self, source: MediaSource, modality: str) -> tuple[bytes | memoryview, str]:
        """Bytes that every decoder reads alike, and their media type."""
        if modality == "video":
            if is_raw_video(source.data):
                return frames_file(source), MEDIA_TYPE
            # `mode_selection` has refused what is no known file.
            return source.data, sniff(source.data) or "video/mp4"
        # They passed a policy when they entered; the limits of the default one need not be theirs.
        return image_file(source, MediaPolicy(max_pixels=2**40, max_aspect_ratio=2**40))


def _agree(placeholders: Mapping[str, Sequence[tuple[int, int]]], media: MultiModalData) -> bool:
    """Whether each range of the server, (offset, length), holds the features of our item of the same number.

    A server may count the tokens around the features into its range or leave them out; the ids are compared apart.
    """
    if placeholders.keys() != media.mm_placeholders.keys():
        return False
    for modality, ranges in media.mm_placeholders.items():
        if len(placeholders[modality]) != len(ranges):
            return False
        for (offset, length), where in zip(placeholders[modality], ranges, strict=True):
            if not offset <= where.runs[0][0] or not where.runs[-1][1] <= offset + length:
                return False
    return True


def _name(item: MediaItem) -> str:
    return f"source-{item.source.digest}"
