"""An engine in the same process: transformers, batched sampling with a KV cache.

It batches what is waiting: requests that arrive while the model is busy, or in the same round of the event loop, run
together. Identical prompts are prefilled once, and an image is encoded once per weight version.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from renderers.placement import PlacedItem, item_placement_error
from rollouts.engines.limits import EngineLimits
from rollouts.engines.protocol import (
    Completion,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    WeightSpan,
)
from rollouts.errors import (
    EngineClosedError,
    InvalidRequestError,
    MissingExtraError,
    OverlongPromptError,
)
from rollouts.models.placed_rows import place_rows

try:
    import torch
    from transformers import AutoModelForImageTextToText, DynamicCache
except ImportError as error:
    raise MissingExtraError("LocalEngine", "torch", "torch") from error

from rollouts.engines.sampling import RowSampler
from rollouts.engines.weights import matched_weights
from rollouts.models.qwen3_vl import (
    VisionFeatures,
    hidden_states,
    next_hidden_states,
    require_qwen3_vl,
    vision_features,
)

# How many rounds of the event loop must pass without a new request before a batch starts: enough for a finished
# episode's task to wake, step its environment and ask again, so that a batch does not depend on timing.
_QUIET_ROUNDS = 4

# A batch waits for announced requests until none has come for this long.
_EXPECTED_WITHIN_SECONDS = 0.25

# What is drawn is stored in pieces of so many tokens a row.
_COLUMNS = 256


class _Waiting(NamedTuple):
    request: GenerateRequest
    answer: asyncio.Future[GenerateResult]


@dataclass
class _Queue:
    """The requests of one event loop, and the task that serves them.

    `waiting` have come since a batch was last gathered, `gathered` before. `expected` counts announced requests.
    """

    waiting: list[_Waiting] = field(default_factory=list)
    gathered: list[_Waiting] = field(default_factory=list)
    server: asyncio.Task[None] | None = None
    expected: int = 0
    none_expected: asyncio.Event = field(default_factory=asyncio.Event)


class LocalEngine:
    """`Engine` over a `Qwen3VLForConditionalGeneration` in this process.

    `max_batch_rows` bounds how many completions are sampled at once, `max_feature_bytes` the cache of encoded images,
    `request_limits` what one request may ask for.
    """

    def __init__(
        self,
        model: Any,
        *,
        weight_version: str = "0",
        max_batch_rows: int = 512,
        max_feature_bytes: int = 256 * 2**20,
        request_limits: EngineLimits | None = None,
    ) -> None:
        require_qwen3_vl(model, "Serve other models with vLLM, and sample from them with VLLMEngine")
        self._model = model.eval()
        self._request_limits = request_limits or EngineLimits()
        self._max_batch_rows = max_batch_rows
        self._max_feature_bytes = max_feature_bytes
        self._features: OrderedDict[str, VisionFeatures] = OrderedDict()
        self._weight_version = weight_version
        self._limit = int(model.config.text_config.max_position_embeddings)
        self._vocab_size = int(model.config.text_config.vocab_size)
        self._queues: dict[asyncio.AbstractEventLoop, _Queue] = {}
        # One thread: batches and weight updates follow one another, so no completion mixes two sets of weights.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="local-engine")
        self._closed = False

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, attn_implementation: str | dict[str, str] = "sdpa", **options: Any
    ) -> Self:
        """Load a checkpoint directory in float32."""
        model = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=attn_implementation
        )
        return cls(model, **options)

    @property
    def weight_version(self) -> str:
        return self._weight_version

    @property
    def vocab_size(self) -> int:
        """How many ids the model has, those included that its tokenizer has no token for."""
        return self._vocab_size

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample `n` completions. Raises `InvalidRequestError`, `OverlongPromptError` or `EngineClosedError`."""
        self._request_limits.check(request)
        self._check(request)
        loop = asyncio.get_running_loop()
        queue = self._queue_of(loop)
        answer: asyncio.Future[GenerateResult] = loop.create_future()
        queue.waiting.append(_Waiting(request, answer))
        if queue.server is None:
            queue.server = loop.create_task(self._serve(queue))
        return await answer

    @contextmanager
    def expecting_request(self) -> Iterator[None]:
        """Announce a request that is made at the end of the block, if it is made; the next batch waits for it.

        Episodes whose prompts are rendered on threads so end up in one batch, which then depends on timing no more
        than the seeds do. A batch starts without those that take longer than a quarter of a second.
        """
        queue = self._queue_of(asyncio.get_running_loop())
        queue.expected += 1
        try:
            yield
        finally:
            queue.expected -= 1
            if not queue.expected:
                queue.none_expected.set()

    async def update_weights(self, weights: Mapping[str, Any], version: str) -> None:
        """Replace every parameter with tensors or arrays of the same shapes, by the names of `state_dict()`.

        Of names that are one tensor in the model (`lm_head.weight` where it is tied to the embedding) one is enough;
        several must agree. Buffers may be left out. Runs between batches. Raises `WeightUpdateError`, changing nothing,
        if names, shapes or tied tensors differ.
        """
        self._refuse_if_closed("update_weights")
        await asyncio.get_running_loop().run_in_executor(self._worker, self._load, weights, version)

    async def close(self) -> None:
        """Fail what is waiting and stop the worker thread once its batch is done."""
        self._closed = True
        for loop, queue in self._queues.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_fail_all, queue, _closed_error("waiting"))
        await asyncio.to_thread(self._worker.shutdown)

    # The event loop's side.

    def _queue_of(self, loop: asyncio.AbstractEventLoop) -> _Queue:
        for other in [other for other in self._queues if other.is_closed()]:
            del self._queues[other]
        return self._queues.setdefault(loop, _Queue())

    async def _serve(self, queue: _Queue) -> None:
        """Run batches until nothing is waiting."""
        loop = asyncio.get_running_loop()
        try:
            while await self._gather(queue):
                if self._closed:
                    _fail_all(queue, _closed_error("waiting"))
                    return
                batch = self._take_batch(queue)
                if not batch:  # every caller was cancelled
                    continue
                running = loop.run_in_executor(self._worker, self._run, [entry.request for entry in batch])
                await asyncio.wait([running])
                # Whatever stopped the batch belongs to those who wait for it; nobody else would ever see it.
                if (error := running.exception()) is not None:
                    _fail(batch, error)
                    continue
                for entry, result in zip(batch, running.result(), strict=True):
                    if not entry.answer.done():
                        entry.answer.set_result(result)
        finally:
            queue.server = None

    async def _gather(self, queue: _Queue) -> bool:
        """Wait until no request has joined for some rounds of the loop; whether there is any.

        Those that came meanwhile are put in an order that depends on what they ask for: the order in which threads
        were done must not decide which rows of a batch they become.
        """
        quiet, count, patient = 0, len(queue.waiting), True
        while quiet < _QUIET_ROUNDS:
            await asyncio.sleep(0)
            if patient and queue.expected:
                patient = await self._expected_have_come(queue)
                quiet = 0
            quiet = quiet + 1 if len(queue.waiting) == count else 0
            count = len(queue.waiting)
        queue.gathered += sorted(queue.waiting, key=_batch_order)
        queue.waiting.clear()
        return bool(queue.gathered)

    async def _expected_have_come(self, queue: _Queue) -> bool:
        """Wait for announced requests; False if none has come for a while and some are still expected."""
        while queue.expected:
            count = len(queue.waiting)
            queue.none_expected.clear()
            try:
                await asyncio.wait_for(queue.none_expected.wait(), _EXPECTED_WITHIN_SECONDS)
            except TimeoutError:
                if len(queue.waiting) == count:
                    return False
        return True

    def _take_batch(self, queue: _Queue) -> list[_Waiting]:
        batch: list[_Waiting] = []
        rows = 0
        while queue.gathered:
            entry = queue.gathered[0]
            if batch and rows + entry.request.sampling.n > self._max_batch_rows:
                break
            queue.gathered.pop(0)
            if not entry.answer.done():  # its caller was cancelled
                batch.append(entry)
                rows += entry.request.sampling.n
        return batch

    def _refuse_if_closed(self, request_id: str) -> None:
        if self._closed:
            raise _closed_error(request_id)

    def _check(self, request: GenerateRequest) -> None:
        self._refuse_if_closed(request.request_id)
        if request.prompt_logprobs or request.sampling.extra:
            unknown = (
                "prompt_logprobs" if request.prompt_logprobs else f"sampling option {min(request.sampling.extra)!r}"
            )
            raise InvalidRequestError(request.request_id, f"LocalEngine has no {unknown}; VLLMEngine does")
        if request.sampling.seed is not None and request.sampling.seed < 0:
            raise InvalidRequestError(
                request.request_id, f"seed is {request.sampling.seed}; LocalEngine takes 0 or more"
            )
        ids = np.asarray(request.prompt_ids, dtype=np.int64)
        if not len(ids):
            raise InvalidRequestError(request.request_id, "the prompt is empty")
        if len(ids) >= self._limit:
            raise OverlongPromptError(request.request_id, len(ids), self._limit)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise InvalidRequestError(
                request.request_id,
                f"token ids run from {ids.min()} to {ids.max()}, the vocabulary from 0 to {self._vocab_size - 1}",
            )
        media = _media_of(request)
        if (error := item_placement_error(media, len(ids))) is not None:
            raise InvalidRequestError(request.request_id, error)
        for item, where in media:
            placeholder = getattr(self._model.config, f"{item.modality}_token_id")
            for start, end in where.runs:
                if np.any(ids[start:end] != placeholder):
                    raise InvalidRequestError(
                        request.request_id, f"tokens {start}:{end} are not all the {item.modality} placeholder"
                    )

    # The worker thread's side.

    def _run(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        with torch.inference_mode():
            return _Batch(self, requests).run()

    def _encoded(self, items: Sequence[Any]) -> list[VisionFeatures]:
        """Features of images, encoding those that these weights have not seen."""
        missing = [item for item in items if item.mm_hash not in self._features]
        if missing:
            fresh = vision_features(self._model, missing)
            for item, features in zip(missing, fresh, strict=True):
                self._features[item.mm_hash] = features
        found = []
        for item in items:
            self._features.move_to_end(item.mm_hash)
            found.append(self._features[item.mm_hash])
        held = sum(features.nbytes for features in self._features.values())
        while held > self._max_feature_bytes:
            _, dropped = self._features.popitem(last=False)
            held -= dropped.nbytes
        return found

    def _load(self, weights: Mapping[str, Any], version: str) -> None:
        targets = matched_weights(self._model, weights)
        with torch.no_grad():
            for target, value in targets:
                # Arrays off the wire are read-only, which torch cannot represent: it gets a copy.
                target.copy_(value if isinstance(value, torch.Tensor) else torch.tensor(value))
        self._features.clear()
        self._weight_version = version


class _Sample(NamedTuple):
    """One completion to draw: sample `number` of request `request`, continuing prompt row `prompt`."""

    request: int
    number: int
    prompt: int


class _Batch:
    """The requests of one batch: prefill the distinct prompts, then decode all samples together."""

    def __init__(self, engine: LocalEngine, requests: Sequence[GenerateRequest]) -> None:
        self._engine = engine
        self._model = engine._model
        self._requests = requests
        self._prompts: list[tuple[np.ndarray, list[PlacedItem]]] = []
        self._samples: list[_Sample] = []
        row_of: dict[tuple[Any, ...], int] = {}
        for number, request in enumerate(requests):
            media = _media_of(request)
            key = (tuple(request.prompt_ids), tuple((item.mm_hash, where.offset) for item, where in media))
            row = row_of.setdefault(key, len(row_of))
            if row == len(self._prompts):
                self._prompts.append((np.asarray(request.prompt_ids, dtype=np.int64), media))
            self._samples += [_Sample(number, sample, row) for sample in range(request.sampling.n)]

    def run(self) -> list[GenerateResult]:
        logits, cache, mask, positions = self._prefill()
        ids, logprobs = self._decode(logits, cache, mask, positions)
        completions: list[list[Completion]] = [[] for _ in self._requests]
        for sample, row_ids, row_logprobs in zip(self._samples, ids, logprobs, strict=True):
            completions[sample.request].append(self._completion(sample, row_ids, row_logprobs))
        return [
            GenerateResult(request.request_id, drawn)
            for request, drawn in zip(self._requests, completions, strict=True)
        ]

    def _prefill(self) -> tuple[torch.Tensor, DynamicCache, torch.Tensor, torch.Tensor]:
        """Logits (samples, vocabulary), cache, attention mask and next positions after the prompts."""
        config, device = self._model.config, self._model.device
        rows = place_rows(
            [ids for ids, _ in self._prompts],
            [media for _, media in self._prompts],
            pad_id=config.text_config.pad_token_id or 0,
            merge_size=config.vision_config.spatial_merge_size,
            side="left",
        )
        cache = DynamicCache(config=config.text_config)
        hidden = hidden_states(self._model, rows, self._engine._encoded(rows.items), cache=cache)
        logits = self._model.lm_head(hidden[:, -1])
        spread = torch.tensor([sample.prompt for sample in self._samples], device=device)
        if len(self._samples) > len(self._prompts):
            cache.batch_select_indices(spread)
        mask = torch.from_numpy(rows.attention_mask).to(device)[spread]
        return logits[spread], cache, mask, torch.from_numpy(rows.next_positions).to(device)[spread]

    def _decode(
        self, logits: torch.Tensor, cache: DynamicCache, mask: torch.Tensor, positions: torch.Tensor
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Per sample the drawn ids (int32) and their log-probabilities (float32)."""
        device = logits.device
        params = [self._requests[sample.request].sampling for sample in self._samples]
        sampler = RowSampler(params, [sample.number for sample in self._samples], device)
        budgets = torch.tensor([self._budget(sample) for sample in self._samples], device=device)
        stops = _stop_table(params, device)
        steps = int(budgets.max())
        drawn_ids, drawn_logprobs = (
            _Columns(len(params), torch.int32, device),
            _Columns(len(params), torch.float32, device),
        )
        lengths = torch.zeros(len(params), dtype=torch.int64, device=device)
        alive = torch.arange(len(params), device=device)  # which sample each remaining row is

        for step in range(steps):
            ids, logprobs = sampler.sample(logits, step)
            drawn_ids.put(alive, step, ids.to(torch.int32))
            drawn_logprobs.put(alive, step, logprobs)
            lengths[alive] = step + 1
            going = ~(ids[:, None] == stops[alive]).any(-1) & (step + 1 < budgets[alive])
            if not bool(going.any()):
                break
            if not bool(going.all()):
                rows = going.nonzero()[:, 0]
                alive, ids, mask, positions = alive[rows], ids[rows], mask[rows], positions[rows]
                sampler.keep(rows)
                cache.batch_select_indices(rows)
            mask = torch.cat([mask, mask.new_ones((len(mask), 1))], dim=1)
            logits = self._model.lm_head(next_hidden_states(self._model, ids, positions, mask, cache))
            positions = positions + 1

        counts = lengths.tolist()
        all_ids, all_logprobs = drawn_ids.rows(), drawn_logprobs.rows()
        return (
            [row[:count].copy() for row, count in zip(all_ids, counts, strict=True)],
            [row[:count].copy() for row, count in zip(all_logprobs, counts, strict=True)],
        )

    def _budget(self, sample: _Sample) -> int:
        room = self._engine._limit - len(self._prompts[sample.prompt][0])
        return min(self._requests[sample.request].sampling.max_tokens, room)

    def _completion(self, sample: _Sample, ids: np.ndarray, logprobs: np.ndarray) -> Completion:
        last = int(ids[-1])
        stopped = last in self._requests[sample.request].sampling.stop_token_ids
        return Completion(
            index=sample.number,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            stop_token_id=last if stopped else None,
            weight_spans=(WeightSpan(self._engine.weight_version, 0, len(ids)),),
        )


class _Columns:
    """A table of one row a sample that grows by columns: most completions end long before their `max_tokens`."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (rows, _COLUMNS)
        self._dtype, self._device = dtype, device
        self._parts: list[torch.Tensor] = []

    def put(self, rows: torch.Tensor, column: int, values: torch.Tensor) -> None:
        part, place = divmod(column, _COLUMNS)
        if part == len(self._parts):
            self._parts.append(torch.zeros(self._shape, dtype=self._dtype, device=self._device))
        self._parts[part][rows, place] = values

    def rows(self) -> np.ndarray:
        table: np.ndarray = torch.cat(self._parts, dim=1).cpu().numpy()
        return table


def _closed_error(request_id: str) -> EngineClosedError:
    return EngineClosedError(request_id, "the engine is closed")


def _fail(entries: list[_Waiting], error: BaseException) -> None:
    for entry in entries:
        if not entry.answer.done():
            entry.answer.set_exception(error)
    entries.clear()


def _fail_all(queue: _Queue, error: BaseException) -> None:
    _fail(queue.gathered, error)
    _fail(queue.waiting, error)


def _batch_order(entry: _Waiting) -> tuple[bytes, tuple[str, ...], int]:
    """A sort key of what a request asks for. Requests with one key are alike, or have no seed."""
    request = entry.request
    names = tuple(item.mm_hash for item, _ in _media_of(request))
    seed = request.sampling.seed
    return np.asarray(request.prompt_ids, np.int64).tobytes(), names, -1 if seed is None else seed


def _media_of(request: GenerateRequest) -> list[PlacedItem]:
    return [] if request.multi_modal_data is None else request.multi_modal_data.items_with_ranges()


def _stop_table(params: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Stop ids int64 (rows, most stop ids of any row), padded with -1."""
    width = max(1, *(len(p.stop_token_ids) for p in params)) if params else 1
    table = [[*p.stop_token_ids, *[-1] * (width - len(p.stop_token_ids))] for p in params]
    return torch.tensor(table, dtype=torch.int64, device=device)
