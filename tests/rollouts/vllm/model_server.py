"""A `FakeVLLM` with the tiny Qwen3-VL in it: real tokens, real pixels, real log-probabilities, and faults to plant.

What it samples are bytes drawn from a generator that the prompt seeds; what it says of them is what the model says.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from fake_http import Response, Seen, error_response, json_response
from fake_server import RENDER, FakeVLLM
from transformers import AutoModelForImageTextToText

from renderers import MultiModalData, RendererOptions, load_renderer
from renderers.media.item import TensorField
from renderers.vision.patches import normalise
from rollouts.engines.vllm.features import decode_item, encode_features

_DRAWN = 256  # bytes, the first ids of the tiny tokenizer

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits"]


@dataclass(frozen=True)
class Served:
    """A directory and the model in it, as a server loads them."""

    directory: Path

    @cached_property
    def renderer(self) -> Any:
        return load_renderer(self.directory)

    @cached_property
    def renderer_as_given(self) -> Any:
        """It gives templates the contents as they come, strings or parts."""
        return load_renderer(self.directory, config=RendererOptions(content_form="as_given"))

    @cached_property
    def model(self) -> Any:
        return AutoModelForImageTextToText.from_pretrained(self.directory, dtype=torch.float32).eval()

    @property
    def scale(self) -> Any:
        return self.renderer.processors["image"].config.scale


class ModelVLLM(FakeVLLM):
    """`served` is what it was started with. Keyword arguments after it are flags of vLLM, or faults.

    `most_images`: --limit-mm-per-prompt. `converts_contents` False: --chat-template-content-format string. `blind`: the
    model does not look at images. `template_suffix`: --chat-template with more at the end. `starts_paused`: somebody
    has paused it. `alive` False: its engine is dead, and /health says so. `counts_edges`: its ranges of images include
    the tokens around the features. `hides`, `adds`: a tensor of images that only others make, or only it. `drifts`:
    added to log-probabilities of sampled tokens. `stops`: whether a completion ends "with" the stop token, "without" it
    or "never". `doubles_first`: the model gets the first token of a text prompt twice.
    """

    def __init__(
        self,
        served: Served,
        *,
        most_images: int = 8,
        converts_contents: bool = True,
        logprobs_mode: LogprobsMode = "raw_logprobs",
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
        super().__init__(**{"model": "tiny", "max_model_len": 2048, **options})
        self.served = served
        self.weights_path = str(served.directory)
        self.most_images = most_images
        self.converts_contents = converts_contents
        self.logprobs_mode = logprobs_mode
        self.blind = blind
        self.template_suffix = template_suffix
        self.alive = alive
        self.counts_edges = counts_edges
        self.hides = hides
        self.adds = adds
        self.drifts = drifts
        self.stops = stops
        self.doubles_first = doubles_first
        self._files: dict[str, bytes] = {}
        if starts_paused:
            self._running.clear()

    # Tokens.

    async def _health(self, seen: Seen) -> Response:
        return Response(200 if self.alive else 503)

    async def _tokenize(self, seen: Seen) -> Response:
        renderer, body = self.served.renderer, seen.json
        if "prompt" in body:
            return json_response({"tokens": renderer.tokenizer.body.encode(body["prompt"]).ids})
        return json_response({"tokens": self._rendered(body).token_ids + self._suffix()})

    async def _detokenize(self, seen: Seen) -> Response:
        return json_response({"prompt": f"<{seen.json['tokens']}>"})

    def _suffix(self) -> list[int]:
        return self.served.renderer.tokenizer.body.encode(self.template_suffix).ids

    def _rendered(self, body: Mapping[str, Any]) -> Any:
        messages = []
        for message in body["messages"]:
            content = message["content"]
            parts = content if isinstance(content, str) else [_from_url(part) for part in content]
            messages.append({**message, "content": parts})
        renderer = self.served.renderer if self.converts_contents else self.served.renderer_as_given
        return renderer.render(messages, add_generation_prompt=bool(body.get("add_generation_prompt")))

    async def _render(self, seen: Seen) -> Response:
        types = [part["type"] for message in seen.json["messages"] for part in message["content"]]
        if "audio_url" in types:
            return error_response(400, "At most 0 audio(s) may be provided in one prompt.", "BadRequestError")
        rendered = self._rendered(seen.json)
        media = rendered.multi_modal_data
        count = 0 if media is None else len(media.items_with_ranges())
        if count > self.most_images:
            message = f"At most {self.most_images} image(s) may be provided in one prompt."
            return error_response(400, message, "BadRequestError")
        ids = rendered.token_ids + self._suffix()
        features = (
            json.loads(b"".join(encode_features(self._made(media), pixel_dtype=self.pixel_dtype))) if count else None
        )
        for place in features["mm_placeholders"]["image"] if count and self.counts_edges else ():
            place["offset"] -= 1
            place["length"] += 2
        return json_response({"token_ids": ids, "features": features})

    def _made(self, media: MultiModalData) -> MultiModalData:
        """The media with the tensors that the server makes."""
        added: dict[str, Any] = {self.adds: np.array(1)} if self.adds else {}
        placed = []
        for item, placeholder in media.items_with_ranges():
            tensors = {name: tensor for name, tensor in item.tensors.items() if name != self.hides} | added
            fields = {name: item.fields.get(name, TensorField("batched")) for name in tensors}
            placed.append((replace(item, tensors=tensors, fields=fields), placeholder))
        return MultiModalData.from_items(placed)

    # Generating.

    async def _generate(self, seen: Seen) -> Response:
        if seen.json.get("content_parts") and self._refused(seen.json) is None:
            refused = self._expand(seen.json)
            if refused is not None:
                return refused
        return await super()._generate(seen)

    def _take_images(self, body: Any) -> bool:
        taken = super()._take_images(body)
        if (features := body.get("features")) is not None:
            body["shown"] = [self.cached[name] for name in features["mm_hashes"]["image"] if name in self.cached]
        return taken

    def _expand(self, body: Any) -> Response | None:
        """Put the tokens of images in their places, as `features` of our own making; a refusal where one is lost."""
        marker = body["token_ids"]
        pad = self.served.renderer.tokenizer.control_id("<|image_pad|>")
        images = []
        for part in body["content_parts"]:
            if part.get("url"):
                self._files[part["uuid"]] = base64.b64decode(part["url"].partition(",")[2])
            elif part["uuid"] not in self._files:
                return error_response(400, "Cache miss for an image", "BadRequestError")
            images.append({"type": "image", "image": self._files[part["uuid"]]})
        made = self.served.renderer.render([{"role": "user", "content": images}]).multi_modal_data
        items = iter(made.items_with_ranges())
        ids: list[int] = []
        places = []
        for one in marker:
            if one != pad:
                ids.append(one)
                continue
            item, _ = next(items)
            places.append({"offset": len(ids), "length": item.num_tokens})
            ids += [pad] * item.num_tokens
        features = encode_features(made, pixel_dtype=self.pixel_dtype)
        body["shown"] = json.loads(b"".join(features))["kwargs_data"]["image"]
        body["token_ids"], body["placed"] = ids, {"image": places}
        return None

    def generated(self, seen: Seen, *, cut: int | None = None) -> Response:
        body = seen.json
        sampling, prompt = body["sampling_params"], body["token_ids"]
        count = min(sampling["max_tokens"], self.max_model_len - len(prompt)) if cut is None else cut
        ids = np.random.default_rng(prompt).integers(0, _DRAWN, count).tolist()
        reason = "length" if cut is None else "abort"
        stop = next((at for at, token in enumerate(ids) if token in (sampling.get("stop_token_ids") or ())), None)
        if stop is not None and self.stops != "never":
            ids, reason = ids[: stop + (self.stops == "with")], "stop"
            count = len(ids)
        before = prompt[: int(self.doubles_first)]
        logits = self._logits([*before, *prompt, *ids], body.get("shown") or [])[len(before) :]
        said = self._said(logits, sampling)
        choice = {
            "index": 0,
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": count}],
            "logprobs": {
                "content": _content(ids, said[len(prompt) - 1 :] + self.drifts, sampling.get("logprobs") or 0)
            },
        }
        asked = {
            "prompt_token_ids": prompt if body.get("return_token_ids") else None,
            "mm_placeholders": body.get("placed"),
        }
        if body.get("stream"):
            response = self._streamed(seen, [choice])
            assert response.chunks is not None
            response.chunks.insert(0, b"data: " + json.dumps({"choices": [], **asked}).encode() + b"\n\n")
            return response
        raw = self._said(logits, {})
        scored = [None, *({str(one): {"logprob": float(raw[at, one])}} for at, one in enumerate(prompt[1:]))]
        return json_response(
            {
                "request_id": seen.request_id,
                "choices": [choice],
                "prompt_logprobs": None if sampling.get("prompt_logprobs") is None else scored,
                **asked,
            }
        )

    def _said(self, logits: torch.Tensor, sampling: Mapping[str, Any]) -> np.ndarray:
        """float32 (tokens, vocabulary): what it reports, by its --logprobs-mode."""
        if self.logprobs_mode == "raw_logits":
            return np.asarray(logits.numpy() + 10)
        if self.logprobs_mode == "processed_logprobs":
            logits = logits / (sampling.get("temperature") or 1.0)
        return np.asarray(torch.log_softmax(logits, dim=-1).numpy())

    def _logits(self, ids: Sequence[int], shown: Sequence[str]) -> torch.Tensor:
        """float32 (tokens, vocabulary)."""
        model = self.served.model
        row = torch.tensor([ids])
        types = (row == model.config.image_token_id).long() if shown else torch.zeros_like(row)
        inputs: dict[str, Any] = {"input_ids": row, "mm_token_type_ids": types}
        if shown:
            tensors = [decode_item(each) for each in shown]
            pixels = np.concatenate([self._floats(each["pixel_values"].tensor) for each in tensors])
            grids = np.stack([each["image_grid_thw"].tensor for each in tensors])
            inputs["pixel_values"] = torch.from_numpy(pixels * (0 if self.blind else 1))
            inputs["image_grid_thw"] = torch.from_numpy(grids)
        with torch.inference_mode():
            logits: torch.Tensor = model(**inputs).logits[0].float()
        return logits

    def _floats(self, tensor: Any) -> np.ndarray:
        """What the vision tower gets; a server that normalises on its device does so with whatever arrives."""
        pixels = tensor if isinstance(tensor, np.ndarray) else tensor.unpack()
        if self.pixel_dtype != "uint8":
            return np.asarray(pixels)
        scale = self.served.scale
        if pixels.dtype == np.uint8:
            return normalise(pixels, scale)
        split = pixels.reshape(len(pixels), len(scale.mean), -1) * scale.factor
        mean, std = (np.array(each, dtype=np.float32)[:, None] for each in (scale.mean, scale.std))
        return np.asarray((split - mean) / std, dtype=np.float32).reshape(pixels.shape)

    more_routes: ClassVar = {
        "/health": ("GET", "_health"),
        "/tokenize": ("POST", "_tokenize"),
        "/detokenize": ("POST", "_detokenize"),
        RENDER: ("POST", "_render"),
    }


def _from_url(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if part["type"] != "image_url":
        return part
    return {"type": "image", "image": base64.b64decode(part["image_url"]["url"].partition(",")[2])}


def _content(ids: Sequence[int], rows: np.ndarray, most: int) -> list[dict[str, Any]]:
    entries = []
    for one, row in zip(ids, rows, strict=False):
        likeliest = np.argsort(-row)[:most].tolist()
        entries.append(
            {
                "token_id": one,
                "logprob": float(row[one]),
                "rank": 1,
                "top_logprobs": [{"token_id": each, "logprob": float(row[each]), "rank": 1} for each in likeliest],
            }
        )
    return entries
