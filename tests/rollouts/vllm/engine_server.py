"""A `FakeVLLM` with a checkpoint in it: `LocalEngine` samples, and the renderer of the directory renders."""

import base64
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from fake_http import Response, Seen, error_response, json_response
from fake_server import NO_SOUNDS, FakeVLLM

from renderers import (
    MediaItem,
    MediaSource,
    MultiModalData,
    PlaceholderRange,
    RendererError,
    load_renderer,
)
from renderers.expansion import placed_tokens
from renderers.media.item import TensorField
from renderers.media.reference import load_source
from renderers.messages import Modality
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.local import LocalEngine
from rollouts.engines.vllm.feature_decoding import decode_item
from rollouts.engines.vllm.feature_encoding import encode_features
from rollouts.errors import RolloutsError

SAMPLED = ("max_tokens", "temperature", "top_p", "top_k", "seed", "n")
SMALL: dict[Modality, dict[str, Any]] = {
    "image": {"type": "image", "image": np.zeros((64, 64, 3), dtype=np.uint8)},
    "audio": {"type": "audio", "audio": np.zeros(16_000, dtype=np.int16), "sampling_rate": 16_000},
}


class EngineVLLM(FakeVLLM):
    """`model` was loaded from the directory; without it the directory is loaded. `options` are those of `FakeVLLM`."""

    def __init__(self, directory: Path, *, model: Any = None, **options: Any) -> None:
        self.engine = LocalEngine.from_pretrained(directory) if model is None else LocalEngine(model)
        self.renderer = load_renderer(directory)
        self._files: dict[str, bytes] = {}
        images = self.examples.get("image")
        raw = images is not None and images.scale is not None
        defaults = {"model": "tiny", "root": str(directory), "pixel_dtype": "uint8" if raw else "float32"}
        super().__init__(**{"max_model_len": self.engine.max_model_len, **defaults, **options})

    async def stop(self) -> None:
        await super().stop()
        await self.engine.close()

    @property
    def processors(self) -> Mapping[Modality, Any]:
        return self.renderer.processors

    @cached_property
    def examples(self) -> dict[Modality, MediaItem]:
        items = {}
        for modality in SMALL.keys() & self.processors.keys():
            content = [SMALL[modality], {"type": "text", "text": "a"}]  # some templates refuse a message without text
            media = self.renderer.render([{"role": "user", "content": content}]).multi_modal_data
            ((items[modality], _),) = media.items_with_ranges()
        return items

    async def respond(self, seen: Seen) -> Response:
        try:
            return await super().respond(seen)
        except RolloutsError as error:
            return error_response(500, str(error), "InternalServerError")
        except RendererError as error:
            return error_response(400, str(error), "BadRequestError")

    # Tokens.

    async def answer(self, seen: Seen) -> Response | None:
        match seen.path:
            case "/tokenize" if "prompt" in seen.json:
                return json_response({"tokens": self.renderer.tokenizer.encode_scaffold(seen.json["prompt"])})
            case "/tokenize":
                return json_response({"tokens": self._rendered(seen.json).token_ids})
            case "/detokenize":
                return json_response({"prompt": f"<{seen.json['tokens']}>"})
            case "/v1/chat/completions/render":
                return self._render(seen.json)
        return await super().answer(seen)

    def _render(self, body: Mapping[str, Any]) -> Response:
        contents = [message["content"] for message in body["messages"] if not isinstance(message["content"], str)]
        files = [part for content in contents for part in content if part["type"].endswith("_url")]
        if any(part["type"] == "audio_url" for part in files) and "audio" not in self.processors:
            return NO_SOUNDS
        rendered = self._rendered(body)
        features = None
        if (media := rendered.multi_modal_data) is not None:
            features = json.loads(b"".join(encode_features(media, pixel_dtype=self.pixel_dtype)))
            names = [part.get("uuid") for part in files]
            for modality, hashes in features["mm_hashes"].items():
                features["mm_hashes"][modality] = [name or own for name, own in zip(names, hashes, strict=True)]
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

    async def _sampled(self, seen: Seen) -> Response:
        body = seen.json
        parts = body.get("content_parts") or ()
        if any(part.get("url") is None and part["uuid"] not in self._files for part in parts):
            return error_response(400, "Cache miss", "BadRequestError")
        prompt_ids, media = self._expanded(body) if parts else (body["token_ids"], self._media(body))
        sampling = body["sampling_params"]
        stops = set(sampling.get("stop_token_ids") or ())
        own_stops = set() if sampling.get("ignore_eos") else {*self.renderer.get_stop_token_ids()}
        params = {name: sampling[name] for name in SAMPLED if sampling.get(name) is not None}
        request = GenerateRequest(
            prompt_ids,
            SamplingParams(**params, stop_token_ids=tuple(stops | own_stops)),
            media,
            request_id=seen.request_id,
            prompt_logprobs=sampling.get("prompt_logprobs") is not None,
        )
        result = await self.engine.generate(request)
        choices = []
        for each in result.completions:
            stop = each.stop_token_id if each.stop_token_id in stops else None
            ids, logprobs = each.token_ids.tolist(), each.logprobs.tolist()
            choices.append(self.choice(each.index, ids, logprobs, str(each.finish_reason), stop))
        scores = None if result.prompt_logprobs is None else result.prompt_logprobs.tolist()
        places: dict[str, list[dict[str, int]]] | None = {} if parts else None
        for item, place in media.items_with_ranges() if parts else ():
            places.setdefault(item.modality, []).append({"offset": place.offset, "length": place.length})
        return self.completion(seen, choices, prompt_ids, scores, places)

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
        features = body.get("features") if self.rust_frontend is None else None
        if features is None:
            return None
        placed = []
        for modality, names in features["mm_hashes"].items():
            example = self.examples[modality]
            scale = example.scale if self.pixel_dtype == "uint8" else None
            for name, place in zip(names, features["mm_placeholders"][modality], strict=True):
                decoded = decode_item(self.cached[name])
                pads = {key: field.pad for key, field in example.fields.items()}
                fields = {key: TensorField(each.field.kind, pads.get(key)) for key, each in decoded.items()}
                tensors = {key: each.tensor for key, each in decoded.items()}
                source = MediaSource(name, b"")
                item = MediaItem(modality, name, source, tensors, place["length"], scale, fields)
                placed.append((item, PlaceholderRange(place["offset"], place["length"])))
        return MultiModalData.from_items(sorted(placed, key=lambda pair: pair[1].offset))
