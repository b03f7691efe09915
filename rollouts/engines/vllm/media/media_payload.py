"""The media of a request as a field of its body: as processed features, or as source files."""

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
from rollouts.engines.vllm.media.video_file import MEDIA_TYPE, encode_avi
from rollouts.engines.vllm.wire.feature_encoding import encode_features
from rollouts.engines.vllm.wire.generate_response import Generation
from rollouts.engines.vllm.wire.tensors import PixelDtype
from rollouts.errors import InvalidRequestError, MalformedResultError

__all__ = ["MediaMode", "MediaPayload", "media_payload", "select_mode"]

_FEATURES_INSTEAD = ', or use media="features"'


class MediaPayload(Protocol):
    """The media of one request, ready to be sent. `names` are their names in the server's cache, with their bytes."""

    @property
    def names(self) -> Mapping[str, int]: ...

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def returns_prompt(self) -> bool:
        """Whether the server must return the prompt that it ran, for `check`."""
        ...

    def body_field(self, included: Collection[str]) -> Body:
        """The field of the request body that describes the media, with the data of the names in `included`."""
        ...

    def is_cache_miss(self, status: int, body: str) -> bool:
        """Whether an error may mean that the server does not hold media that were sent by name only."""
        ...

    def check(self, generation: Generation) -> None:
        """Raise `MalformedResultError` if the server expanded the media differently than the prompt."""
        ...


def media_payload(request: GenerateRequest, mode: MediaMode, capabilities: ServerCapabilities) -> MediaPayload:
    """The payload of a request that passed `check_request`. Raises `CapabilityError` or `InvalidRequestError`."""
    media = request.multi_modal_data
    if media is None or media.is_empty():
        return NoMedia(request)
    resolved = select_mode(request, mode, capabilities)
    check_mode(request, resolved, capabilities)
    if resolved == "content_parts":
        return ContentPartsPayload(
            request, or_features=not features_objections(request, media.items_with_ranges(), capabilities)
        )
    assert capabilities.pixel_dtype is not None  # otherwise check_mode raises
    items = request_dense_items(media.items_with_ranges(), capabilities)
    return FeaturesPayload(request, items, capabilities.pixel_dtype)


class NoMedia:
    """The payload of a prompt without media."""

    names: Mapping[str, int] = {}
    returns_prompt = False

    def __init__(self, request: GenerateRequest) -> None:
        self.prompt_ids = request.prompt_ids

    def body_field(self, included: Collection[str]) -> Body:
        return []

    def is_cache_miss(self, status: int, body: str) -> bool:
        return False

    def check(self, generation: Generation) -> None:
        pass


class FeaturesPayload:
    """Expanded ids and processed tensors, which the server uses unchanged."""

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
        # The server writes the reason only into its log; the client receives a general error.
        return status == 500 and "EngineCore" not in body

    def check(self, generation: Generation) -> None:
        pass


class ContentPartsPayload:
    """Logical ids and source files; the server decodes and processes the files and expands the ids.

    The name of an item is made of the digest of its source. It differs from the name of its features, because the
    server's pixels may differ. `or_features`: features would also work, so that an error may recommend them.
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
        urls: dict[str, Body] = {}  # an item that occurs twice must be sent twice
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

    def check(self, generation: Generation) -> None:
        expansion = generation.prompt_expansion()
        media = self._request.multi_modal_data or MultiModalData()
        if expansion.prompt_ids == list(self._request.prompt_ids) and _agree(expansion.placeholders, media):
            return
        ours = {
            modality: [(placeholder.offset, placeholder.length) for placeholder in ranges]
            for modality, ranges in media.mm_placeholders.items()
        }
        raise MalformedResultError(
            self._request.request_id,
            f"the server expanded the prompt to {len(expansion.prompt_ids)} tokens with media at "
            f"{expansion.placeholders}, the renderer to {len(self._request.prompt_ids)} with {ours}: their processors "
            f"differ. Load the renderer "
            f"from the directory that the server serves{_FEATURES_INSTEAD if self._or_features else ''}",
        )

    def _data_url(self, item: MediaItem) -> Body:
        data, kind = self._file(item.source, item.modality)
        return [f"data:{kind};base64,".encode(), base64.b64encode(data)]

    def _file(self, source: MediaSource, modality: str) -> tuple[bytes | memoryview, str]:
        """A file that every decoder decodes to the same pixels, and its media type."""
        if modality == "video":
            if is_raw_video(source.data):
                return encode_avi(source), MEDIA_TYPE
            # `mode_selection` refuses sources of unknown type.
            return source.data, sniff(source.data) or "video/mp4"
        # The sources passed a policy before, whose limits may be wider than those of the default policy.
        return image_file(source, MediaPolicy(max_pixels=2**40, max_aspect_ratio=2**40))


def _agree(placeholders: Mapping[str, Sequence[tuple[int, int]]], media: MultiModalData) -> bool:
    """Whether each range of the server, (offset, length), contains all feature tokens of our item with the same index.

    A server may include the tokens around the features in its range or not; the ids are compared separately.
    """
    if placeholders.keys() != media.mm_placeholders.keys():
        return False
    for modality, ranges in media.mm_placeholders.items():
        if len(placeholders[modality]) != len(ranges):
            return False
        for (offset, length), ours in zip(placeholders[modality], ranges, strict=True):
            if not offset <= ours.runs[0][0] or not ours.runs[-1][1] <= offset + length:
                return False
    return True


def _name(item: MediaItem) -> str:
    return f"source-{item.source.digest}"
