"""The media of a request as a field of its body: as processed features, or as source files."""

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from renderers import MediaItem, MultiModalData, PlaceholderRange, RenderedTokens
from renderers.placement import PlacedItem
from rollouts.engines.http.exchange import Body
from rollouts.engines.http.prompt_checks import refuse_first
from rollouts.engines.http.source_files import source_file
from rollouts.engines.protocol import GenerateRequest
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.dense_items import dense_items
from rollouts.engines.vllm.feature_encoding import encode_features
from rollouts.engines.vllm.generate import Generation
from rollouts.engines.vllm.media_mode import MediaMode, select_mode
from rollouts.engines.vllm.request_checks import feature_violations
from rollouts.engines.vllm.tensors import PixelDtype
from rollouts.errors import MalformedResultError


class MediaPayload:
    """The media of one request, ready to be sent. This class is that of a prompt without media.

    `names` are their names in the server's cache, with their bytes. `returns_prompt`: the server must return
    the prompt that it ran, for `check`. `sends_all`: the server takes no names without data.
    """

    names: Mapping[str, int] = {}
    returns_prompt = False
    sends_all = False

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self.prompt_ids: Sequence[int] = request.prompt_ids

    def body_field(self, included: Collection[str]) -> Body:
        """The field of the request body that describes the media, with the data of the names in `included`."""
        return []

    def is_cache_miss(self, status: int, body: str) -> bool:
        """Whether an error may mean that the server does not hold media that were sent by name only."""
        return False

    def check(self, generation: Generation) -> None:
        """Raise `MalformedResultError` if the server expanded the media differently than the prompt."""


def media_payload(
    request: GenerateRequest, mode: MediaMode, capabilities: ServerCapabilities, *, jpeg_as_file: bool = False
) -> MediaPayload:
    """The payload of a request that passed `check_request`.

    Raises `InvalidRequestError`, and `CapabilityError` if another server could take the media.

    `jpeg_as_file`: see `VLLMEngine`.
    """
    if not (placed := request.media):
        return MediaPayload(request)
    if select_mode(request, mode, capabilities) == "content_parts":
        return ContentPartsPayload(
            request,
            jpeg_as_file=jpeg_as_file and capabilities.rust_frontend is None,  # which decodes JPEG in another way
            sends_all=capabilities.rust_frontend is not None,
        )
    items = [dense for item, placeholder in placed for dense in dense_items(item, placeholder, capabilities)]
    refuse_first(request, chain.from_iterable(feature_violations(item, capabilities) for item, _ in items))
    # A model that only hears has no dtype of pixels; the tensors of sounds have the server's dtype already.
    return FeaturesPayload(request, items, capabilities.pixel_dtype or "float32")


class FeaturesPayload(MediaPayload):
    """Expanded ids and processed tensors, which the server uses unchanged."""

    def __init__(self, request: GenerateRequest, placed: Sequence[PlacedItem], pixel_dtype: PixelDtype) -> None:
        super().__init__(request)
        self.names = {item.mm_hash: item.nbytes for item, _ in placed}
        self._media = MultiModalData.from_items(placed)
        self._pixel_dtype = pixel_dtype

    def body_field(self, included: Collection[str]) -> Body:
        segments = encode_features(self._media, pixel_dtype=self._pixel_dtype, include=included.__contains__)
        return [b'"features":', *segments]

    def is_cache_miss(self, status: int, body: str) -> bool:
        # The server writes the reason only into its log; the client receives a general error.
        return status == 500 and "EngineCore" not in body


class ContentPartsPayload(MediaPayload):
    """Logical ids and source files; the server decodes and processes the files and expands the ids.

    A server that has a name in its cache does not look at the data. So the name of an item names the pixels
    that the server makes of what is sent: with `jpeg_as_file` they depend on the source and on the server,
    otherwise on the decoders of this process too, as `mm_hash` does.
    """

    returns_prompt = True

    def __init__(
        self,
        request: GenerateRequest,
        *,
        jpeg_as_file: bool = False,
        sends_all: bool = False,
    ) -> None:
        super().__init__(request)
        self._jpeg_as_file = jpeg_as_file
        self.sends_all = sends_all
        self._items = [item for item, _ in request.media]
        rendered = RenderedTokens(
            list(request.prompt_ids),
            multi_modal_data=request.multi_modal_data,
            placeholder_token_ids=request.placeholder_token_ids,
        )
        self.prompt_ids = rendered.logical_ids
        self.names = {self._name(item): item.source.nbytes for item in self._items}

    def body_field(self, included: Collection[str]) -> Body:
        segments: list[bytes | memoryview] = [b'"content_parts":[']
        urls: dict[str, Body] = {}  # an item that occurs twice must be sent twice
        for item in self._items:
            name = self._name(item)
            part = {"type": f"{item.modality}_url", "uuid": name, "url": None}
            separator = b"," if len(segments) > 1 else b""
            if name in included:
                if name not in urls:
                    file = source_file(
                        item.source,
                        item.modality,
                        sampling_rate=item.sampling_rate,
                        jpeg_as_file=self._jpeg_as_file and item.modality == "image",
                    )
                    urls[name] = file.data_url()
                del part["url"]
                opening = json.dumps(part)[:-1].encode()
                segments += [separator, opening, b',"url":"', *urls[name], b'"}']
            else:
                segments += [separator, json.dumps(part).encode()]
        return [*segments, b"]"]

    def _name(self, item: MediaItem) -> str:
        return f"file-{item.source.digest}" if self._jpeg_as_file else f"pixels-{item.mm_hash}"

    def is_cache_miss(self, status: int, body: str) -> bool:
        return is_source_missing(status, body)

    def check(self, generation: Generation) -> None:
        prompt_ids, ranges_there = generation.prompt_expansion()
        assert self._request.multi_modal_data is not None  # otherwise there is nothing to send
        placeholders = self._request.multi_modal_data.mm_placeholders
        if prompt_ids == list(self._request.prompt_ids) and _agree(ranges_there, placeholders):
            return
        ours = {
            modality: [(placeholder.offset, placeholder.length) for placeholder in ranges]
            for modality, ranges in placeholders.items()
        }
        raise MalformedResultError(
            self._request.request_id,
            f"the server expanded the prompt to {len(prompt_ids)} tokens with media at "
            f"{ranges_there}, the renderer to {len(self._request.prompt_ids)} with {ours}: their "
            f"processors differ. Load the renderer from the directory that the server serves",
        )


def _agree(
    received: Mapping[str, Sequence[tuple[int, int]]], expected: Mapping[str, Sequence[PlaceholderRange]]
) -> bool:
    """Whether each (offset, length) of the server contains all feature tokens of our item."""
    return received.keys() == expected.keys() and all(
        len(received[modality]) == len(ranges)
        and all(
            offset <= ours.runs[0][0] and ours.runs[-1][1] <= offset + length
            for (offset, length), ours in zip(received[modality], ranges, strict=True)
        )
        for modality, ranges in expected.items()
    )


def is_source_missing(status: int, body: str) -> bool:
    """Whether the server does not hold a file sent by name; vLLM's Rust frontend holds none."""
    return status == 400 and ("Cache miss" in body or "null, expected a string" in body)
