"""A `FakeVLLM` with a checkpoint in it: `LocalEngine` samples, the renderer of the directory renders, and faults that
are planted."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fake_http import Response, Seen, error_response, json_response
from fake_server import NO_SOUNDS, FakeVLLM, parts_of

from renderers import (
    MediaItem,
    MediaSource,
    MultiModalData,
    PlaceholderRange,
    RendererError,
    RendererOptions,
    load_renderer,
)
from renderers.expansion import placed_tokens
from renderers.media.item import TensorField
from renderers.media.reference import load_source
from renderers.messages import Modality
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.local import LocalEngine
from rollouts.engines.protocol import Completion, GenerateResult
from rollouts.engines.vllm.feature_decoding import decode_item
from rollouts.engines.vllm.feature_encoding import encode_features
from rollouts.errors import RolloutsError

SAMPLED = ("max_tokens", "temperature", "top_p", "top_k", "seed", "n")
SMALL: dict[Modality, dict[str, Any]] = {
    "image": {"type": "image", "image": np.zeros((64, 64, 3), dtype=np.uint8)},
    "audio": {"type": "audio", "audio": np.zeros(16_000, dtype=np.int16), "sampling_rate": 16_000},
}


class EngineVLLM(FakeVLLM):
    """`model` was loaded from the directory. Keyword arguments after it are flags of vLLM, or faults.

    `hears` False: --limit-mm-per-prompt '{"audio": 0}'. `most_images`: the same of images. `converts_contents` False:
    --chat-template-content-format string. `blind`: the model does not look at images. `template_suffix`:
    --chat-template with more at the end. `starts_paused`: somebody has paused it. `alive` False: its engine is dead,
    and /health says so. `counts_edges`: its ranges of images include the tokens around the features. `hides`, `adds`: a
    tensor of images that only others make, or only it. `drifts`: added to log-probabilities of sampled tokens. `stops`:
    whether a completion ends "with" the stop token, "without" it or "never". `doubles_first`: the model gets the first
    token of a text prompt twice.
    """

    def __init__(
        self,
        directory: Path,
        *,
        model: Any = None,
        hears: bool = True,
        most_images: int = 8,
        converts_contents: bool = True,
        logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits"] = "raw_logprobs",
        blind: bool = False,
        template_suffix: str = "",
        starts_paused: bool = False,
        alive: bool = True,
        counts_edges: bool = False,
        hides: str = "",
        adds: str = "",
        drifts: float = 0.0,
        stops: Literal["with", "without", "never"] = "with",
        doubles_first: bool = False,
        **options: Any,
    ) -> None:
        self.engine = LocalEngine.from_pretrained(directory) if model is None else LocalEngine(model)
        self.renderer = load_renderer(directory)
        given = RendererOptions(content_form="as_given")  # templates get contents as they come, strings or parts
        self._renders = self.renderer if converts_contents else load_renderer(directory, config=given)
        self.hears, self.most_images, self.alive = hears, most_images, alive
        self.logprobs_mode, self.blind, self.drifts, self.stops = logprobs_mode, blind, drifts, stops
        self.counts_edges, self.hides, self.adds, self.doubles_first = counts_edges, hides, adds, doubles_first
        self._suffix = self.renderer.tokenizer.body.encode(template_suffix).ids
        self._files: dict[str, bytes] = {}
        images = self.examples.get("image")
        raw = images is not None and images.scale is not None
        defaults = {"model": "tiny", "root": str(directory), "pixel_dtype": "uint8" if raw else "float32"}
        super().__init__(**{"max_model_len": self.engine.max_model_len, **defaults, **options})
        if starts_paused:
            self._running.clear()

    async def stop(self) -> None:
        await super().stop()
        await self.engine.close()

    @property
    def processors(self) -> Mapping[Modality, Any]:
        return self.renderer.processors

    @cached_property
    def examples(self) -> dict[Modality, MediaItem]:
        return {modality: self._example(part) for modality, part in SMALL.items() if modality in self.processors}

    def _example(self, part: dict[str, Any]) -> MediaItem:
        try:
            rendered = self.renderer.render([{"role": "user", "content": [part]}])
        except RendererError:  # a template that refuses a message without text
            rendered = self.renderer.render([{"role": "user", "content": [part, {"type": "text", "text": "a"}]}])
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

    async def answer(self, seen: Seen) -> Response | None:
        match seen.path:
            case "/health" if not self.alive:
                return Response(503)
            case "/tokenize" if "prompt" in seen.json:
                return json_response({"tokens": self.renderer.tokenizer.encode_scaffold(seen.json["prompt"])})
            case "/tokenize":
                return json_response({"tokens": self._rendered(seen.json).token_ids + self._suffix})
            case "/detokenize":
                return json_response({"prompt": f"<{seen.json['tokens']}>"})
            case "/v1/chat/completions/render":
                return self._render(seen.json)
        return await super().answer(seen)

    def _render(self, body: Mapping[str, Any]) -> Response:
        files = [part for part in parts_of(body) if part["type"].endswith("_url")]
        if any(part["type"] == "audio_url" for part in files) and not (self.hears and "audio" in self.processors):
            return NO_SOUNDS
        if sum(part["type"] == "image_url" for part in files) > self.most_images:
            message = f"At most {self.most_images} image(s) may be provided in one prompt."
            return error_response(400, message, "BadRequestError")
        rendered = self._rendered(body)
        features = None
        if (media := rendered.multi_modal_data) is not None:
            features = json.loads(b"".join(encode_features(self._made(media), pixel_dtype=self.pixel_dtype)))
            names = [part.get("uuid") for part in files]
            for modality, hashes in features["mm_hashes"].items():
                features["mm_hashes"][modality] = [name or own for name, own in zip(names, hashes, strict=True)]
        for place in features["mm_placeholders"]["image"] if features and self.counts_edges else ():
            place["offset"] -= 1
            place["length"] += 2
        return json_response({"token_ids": rendered.token_ids + self._suffix, "features": features})

    def _rendered(self, body: Mapping[str, Any]) -> Any:
        messages = []
        for message in body["messages"]:
            content = message["content"]
            parts = content if isinstance(content, str) else [self._with_file(part) for part in content]
            messages.append({**message, "content": parts})
        return self._renders.render(messages, add_generation_prompt=bool(body.get("add_generation_prompt")))

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

    def _made(self, media: MultiModalData) -> MultiModalData:
        """The media with the tensors that the server makes."""
        added: dict[str, Any] = {self.adds: np.array(1)} if self.adds else {}
        placed = []
        for item, place in media.items_with_ranges():
            tensors = {name: tensor for name, tensor in item.tensors.items() if name != self.hides} | added
            fields = {name: item.fields.get(name, TensorField("batched")) for name in tensors}
            placed.append((replace(item, tensors=tensors, fields=fields), place))
        return MultiModalData.from_items(placed)

    # Completions.

    async def _sampled(self, seen: Seen) -> Response:
        body = seen.json
        parts = body.get("content_parts") or ()
        if any(part.get("url") is None and part["uuid"] not in self._files for part in parts):
            return error_response(400, "Cache miss", "BadRequestError")
        prompt_ids, media = self._expanded(body) if parts else (body["token_ids"], self._media(body))
        sampling = body["sampling_params"]
        stops = set(sampling.get("stop_token_ids") or ())
        result = await self._result(seen, self._request(seen, prompt_ids, media, stops))
        choices = [self._choice(each, stops, sampling) for each in result.completions]
        scores = None if result.prompt_logprobs is None else result.prompt_logprobs[-len(prompt_ids) :].tolist()
        places: dict[str, list[dict[str, int]]] | None = {} if parts else None
        for item, place in media.items_with_ranges() if parts else ():
            places.setdefault(item.modality, []).append({"offset": place.offset, "length": place.length})
        return self.completion(seen, choices, prompt_ids, scores, places)

    def _request(
        self, seen: Seen, prompt_ids: Sequence[int], media: MultiModalData | None, stops: set[int]
    ) -> GenerateRequest:
        sampling = seen.json["sampling_params"]
        params = {name: sampling[name] for name in SAMPLED if sampling.get(name) is not None}
        if not sampling.get("ignore_eos"):
            stops = stops | {*self.renderer.get_stop_token_ids()}
        if self.stops == "never":
            stops = set()
        if self.logprobs_mode == "processed_logprobs":
            params["top_logprobs"] = self.engine.vocab_size
        if self.doubles_first and media is None:
            prompt_ids = [prompt_ids[0], *prompt_ids]
        return GenerateRequest(
            prompt_ids,
            SamplingParams(**params, stop_token_ids=tuple(stops)),
            media,
            request_id=seen.request_id,
            prompt_logprobs=sampling.get("prompt_logprobs") is not None,
        )

    def _choice(self, completion: Completion, stops: set[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        ids, logprobs = completion.token_ids, completion.logprobs + self.drifts
        stop = completion.stop_token_id if completion.stop_token_id in stops else None
        if self.logprobs_mode == "raw_logits":
            logprobs = logprobs + 10
        if (top := completion.top_logprobs) is not None:  # of the whole vocabulary
            temperature = sampling.get("temperature") or 1.0
            logprobs = logprobs / temperature - np.log(np.exp(top.logprobs / temperature).sum(axis=1))
        if self.stops == "without" and stop is not None:
            ids, logprobs, stop = ids[:-1], logprobs[:-1], None
        return self.choice(completion.index, ids.tolist(), logprobs.tolist(), str(completion.finish_reason), stop)

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
        features = body.get("features") if self.rust_frontend is None else None
        if features is None:
            return None
        placed = []
        for modality, names in features["mm_hashes"].items():
            example = self.examples[modality]
            scale = example.scale if self.pixel_dtype == "uint8" else None
            for name, place in zip(names, features["mm_placeholders"][modality], strict=True):
                decoded = {key: each for key, each in decode_item(self.cached[name]).items() if key != self.adds}
                pads = {key: field.pad for key, field in example.fields.items()}
                fields = {key: TensorField(each.field.kind, pads.get(key)) for key, each in decoded.items()}
                tensors = {key: each.tensor for key, each in decoded.items()}
                if self.blind:
                    tensors["pixel_values"] = np.full_like(tensors["pixel_values"], 127)
                source = MediaSource(name, b"")
                item = MediaItem(modality, name, source, tensors, place["length"], scale, fields)
                placed.append((item, PlaceholderRange(place["offset"], place["length"])))
        return MultiModalData.from_items(sorted(placed, key=lambda pair: pair[1].offset))
