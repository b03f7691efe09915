"""A `FakeVLLM` with a checkpoint in it: `LocalEngine` samples, and the renderer of the directory renders."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from fake_http import Response, Seen, error_response, json_response
from fake_server import RENDER, FakeVLLM

from renderers import MediaItem, MediaSource, MultiModalData, PlaceholderRange, RendererError, load_renderer
from renderers.expansion import placed_tokens
from renderers.media.item import TensorField
from renderers.media.reference import load_source
from renderers.messages import Modality
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.local import LocalEngine
from rollouts.engines.protocol import GenerateResult
from rollouts.engines.vllm.features import decode_item, encode_features
from rollouts.errors import RolloutsError

SAMPLED = ("max_tokens", "temperature", "top_p", "top_k", "seed", "n")
SMALL: dict[Modality, dict[str, Any]] = {
    "image": {"type": "image", "image": np.zeros((64, 64, 3), dtype=np.uint8)},
    "audio": {"type": "audio", "audio": np.zeros(16_000, dtype=np.int16), "sampling_rate": 16_000},
}


class EngineVLLM(FakeVLLM):
    """`model` was loaded from the directory. `hears` False: --limit-mm-per-prompt '{"audio": 0}'.

    Pauses hold requests back and cut none off.
    """

    more_routes: ClassVar = {
        "/tokenize": ("POST", "_tokenize"),
        "/detokenize": ("POST", "_detokenize"),
        RENDER: ("POST", "_render"),
    }

    def __init__(self, directory: Path, *, model: Any = None, hears: bool = True, **options: Any) -> None:
        engine = LocalEngine.from_pretrained(directory) if model is None else LocalEngine(model)
        self.engine, self.hears, self.renderer = engine, hears, load_renderer(directory)
        self.examples = {each: self._example(each) for each in SMALL if each in self.processors}
        images = self.examples.get("image")
        raw = images is not None and images.scale is not None
        options = {"model": "tiny", "pixel_dtype": "uint8" if raw else "float32", **options}
        super().__init__(max_model_len=engine.max_model_len, **options)
        self.weights_path = str(directory)
        self._files: dict[str, bytes] = {}

    async def stop(self) -> None:
        await super().stop()
        await self.engine.close()

    @property
    def processors(self) -> Mapping[Modality, Any]:
        return self.renderer.processors

    def _example(self, modality: Modality) -> MediaItem:
        try:
            rendered = self.renderer.render([{"role": "user", "content": [SMALL[modality]]}])
        except RendererError:  # a template that refuses a message without text
            text = {"type": "text", "text": "a"}
            rendered = self.renderer.render([{"role": "user", "content": [SMALL[modality], text]}])
        assert rendered.multi_modal_data is not None
        return rendered.multi_modal_data.items_with_ranges()[0][0]

    async def respond(self, seen: Seen) -> Response:
        try:
            return await super().respond(seen)
        except RolloutsError as error:
            return error_response(500, str(error), "InternalServerError")
        except RendererError as error:
            return error_response(400, str(error), "BadRequestError")

    # Tokens.

    async def _tokenize(self, seen: Seen) -> Response:
        if "prompt" in seen.json:
            return json_response({"tokens": self.renderer.tokenizer.body.encode(seen.json["prompt"]).ids})
        return json_response({"tokens": self._rendered(seen.json).token_ids})

    async def _detokenize(self, seen: Seen) -> Response:
        return json_response({"prompt": f"<{seen.json['tokens']}>"})

    async def _render(self, seen: Seen) -> Response:
        contents = [part for message in seen.json["messages"] for part in message["content"]]
        parts = [part for part in contents if isinstance(part, dict)]
        sounds = [part for part in parts if part["type"] == "audio_url"]
        if sounds and not (self.hears and "audio" in self.processors):
            return error_response(400, "At most 0 audio(s) may be provided in one prompt.", "BadRequestError")
        rendered = self._rendered(seen.json)
        features = None
        if (media := rendered.multi_modal_data) is not None:
            features = json.loads(b"".join(encode_features(media, pixel_dtype=self.pixel_dtype)))
            names = [part.get("uuid") for part in parts if part["type"].endswith("_url")]
            for modality, hashes in features["mm_hashes"].items():
                named = [name or own for name, own in zip(names, hashes, strict=True)]
                features["mm_hashes"][modality] = named
        return json_response({"token_ids": rendered.token_ids, "features": features})

    def _rendered(self, body: Mapping[str, Any]) -> Any:
        messages = []
        for message in body["messages"]:
            content = message["content"]
            parts = content if isinstance(content, str) else [self._with_file(part) for part in content]
            messages.append({**message, "content": parts})
        return self.renderer.render(messages, add_generation_prompt=bool(body.get("add_generation_prompt")))

    def _with_file(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        modality = {"image_url": "image", "audio_url": "audio"}.get(part["type"])
        if modality is None:
            return part
        place = part[part["type"]] or {}
        return {"type": modality, modality: self._file(place.get("url"), part.get("uuid"))}

    def _file(self, url: str | None, name: str | None) -> bytes:
        """The file of a data URL, or the one that was sent with this name before."""
        if url is not None:
            self._files[name or ""] = base64.b64decode(url.partition(",")[2])
        return self._files[name or ""]

    # Completions.

    async def _generate(self, seen: Seen) -> Response:
        body = seen.json
        if (refused := self._refused(body)) is not None:
            return refused
        await self._running.wait()
        parts = body.get("content_parts") or ()
        if any(part.get("url") is None and part["uuid"] not in self._files for part in parts):
            return error_response(400, "Cache miss", "BadRequestError")
        if not self._take_images(body):
            return error_response(500, "Internal server error", "InternalServerError")
        sampling = body["sampling_params"]
        known = {name: sampling[name] for name in SAMPLED if sampling.get(name) is not None}
        scores = sampling.get("prompt_logprobs") is not None
        stops = set(sampling.get("stop_token_ids") or ())
        own_stops = set() if sampling.get("ignore_eos") else {*self.renderer.get_stop_token_ids()}
        params = SamplingParams(**known, stop_token_ids=tuple(stops | own_stops))
        prompt_ids, media = body["token_ids"], self._media(body)
        if parts:
            prompt_ids, media = self._expanded(body)
        name = seen.request_id
        request = GenerateRequest(prompt_ids, params, media, request_id=name, prompt_logprobs=scores)
        result = await self._result(seen, request)
        choices = [
            {
                "index": completion.index,
                "finish_reason": str(completion.finish_reason),
                "stop_reason": completion.stop_token_id if completion.stop_token_id in stops else None,
                "token_ids": completion.token_ids.tolist(),
                "routed_experts": None,
                "sampling_mask": None,
                "weight_versions": [
                    {"version": self.weight_version, "start": 0, "end": len(completion.token_ids)},
                ],
                "logprobs": {"content": _entries(completion.token_ids, completion.logprobs)},
            }
            for completion in result.completions
        ]
        returned = prompt_ids if body.get("return_token_ids") else None
        expansion = {"prompt_token_ids": returned, "mm_placeholders": None}
        if parts:
            places: dict[str, list[dict[str, int]]] = {}
            for item, place in media.items_with_ranges():
                places.setdefault(item.modality, []).append({"offset": place.offset, "length": place.length})
            expansion["mm_placeholders"] = places
        if body.get("stream"):
            response = self._streamed(seen, choices)
            assert response.chunks is not None
            response.chunks.insert(0, b"data: " + json.dumps({"choices": [], **expansion}).encode() + b"\n\n")
            return response
        prompt = None
        if result.prompt_logprobs is not None:
            pairs = zip(prompt_ids[1:], result.prompt_logprobs[1:].tolist(), strict=True)
            prompt = [None, *({str(token): {"logprob": logprob}} for token, logprob in pairs)]
        content = {"request_id": seen.request_id, "choices": choices, "prompt_logprobs": prompt}
        return json_response(content | expansion)

    async def _result(self, seen: Seen, request: GenerateRequest) -> GenerateResult:
        """What the engine samples, until the request is aborted."""
        generating = asyncio.ensure_future(self.engine.generate(request))
        aborted = asyncio.ensure_future(seen.aborted.wait())
        try:
            await asyncio.wait([generating, aborted], return_when=asyncio.FIRST_COMPLETED)
            if not generating.done():
                await self.engine.abort([request.request_id])
            return await generating
        finally:
            for each in (generating, aborted):
                each.cancel()

    def _expanded(self, body: Mapping[str, Any]) -> tuple[list[int], MultiModalData]:
        """The prompt with the tokens of the files in it, and their media."""
        parts = []
        for part in body["content_parts"]:
            modality: Modality = "image" if part["type"] == "image_url" else "audio"
            processor = self.processors[modality]
            marker = self.renderer.tokenizer.require_control_id(processor.marker, "a processor")
            file = {"type": modality, modality: self._file(part.get("url"), part["uuid"])}
            parts.append((marker, processor, load_source(file, processor.policy, processor.store)))
        ids: list[int] = []
        placed = []
        for token in body["token_ids"]:
            index = next((index for index, (marker, _, _) in enumerate(parts) if marker == token), None)
            if index is None:
                ids.append(token)
                continue
            _, processor, source = parts.pop(index)
            item = processor.process(source)
            tokens, place = placed_tokens(item.pieces(processor.marker), len(ids), self.renderer.tokenizer)
            placed.append((item, place))
            ids += tokens
        return ids, MultiModalData.from_items(placed)

    def _media(self, body: Mapping[str, Any]) -> MultiModalData | None:
        if (features := body.get("features")) is None:
            return None
        placed = []
        for modality, names in features["mm_hashes"].items():
            example = self.examples[modality]
            for name, place in zip(names, features["mm_placeholders"][modality], strict=True):
                decoded = decode_item(self.cached[name])
                pads = {key: field.pad for key, field in example.fields.items()}
                fields = {key: TensorField(each.field.kind, pads.get(key)) for key, each in decoded.items()}
                tensors = {key: each.tensor for key, each in decoded.items()}
                scale = example.scale if self.pixel_dtype == "uint8" else None
                source = MediaSource(name, b"")
                item = MediaItem(modality, name, source, tensors, place["length"], scale, fields)
                placed.append((item, PlaceholderRange(place["offset"], place["length"])))
        return MultiModalData.from_items(sorted(placed, key=lambda pair: pair[1].offset))


def _entries(token_ids: np.ndarray, logprobs: np.ndarray) -> list[dict[str, Any]]:
    entries = [
        {"token_id": token, "logprob": logprob, "rank": None}
        for token, logprob in zip(token_ids.tolist(), logprobs.tolist(), strict=True)
    ]
    return [{**entry, "top_logprobs": [entry]} for entry in entries]
