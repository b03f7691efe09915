"""Samplers: what the sampling requests of the Tinker API need of an engine, whichever it is."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from renderers import MultiModalData
from renderers.loading import load_tokenizer
from renderers.model_files import ModelFiles, generation_stops
from renderers.placement import PlacedItem
from rollouts.engines.protocol import (
    NO_TOKEN,
    Engine,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    TopLogprobs,
)
from rollouts.engines.stop_strings import cut_at_stop, ending_early
from rollouts.engines.token_checks import MAX_TOKEN_ID
from rollouts.episodes.engine_calls import check_uninterrupted
from rollouts.errors import ArgumentError, is_unicode
from rollouts.tinker.requests import ModelInput, SampledSequence, SampleRequest, SampleResult

Generate = Callable[[GenerateRequest], Awaitable[GenerateResult]]

#: The log-probability in rows of `topk_prompt` without tokens.
_NO_LOGPROB = -99999.0
_ADAPTER, _MODEL = "adapter_config.json", "config.json"


class Sampler(Protocol):
    """Samples with weights that `Trainer.save_for_sampler` has written, and with those of the base model."""

    async def sample(self, weights: Path | None, request: SampleRequest, *, share: str = "") -> SampleResult:
        """Sample `num_samples` sequences with the weights of a directory; None: those of the base model.

        Requests of one `share`, such as a session, do not keep those of another waiting.

        Sampled log-probabilities, and those of the prompt, are those of `Trainer.forward` with the same
        weights. The files of a directory must stay as they are. A sequence ends with the token that completes
        its stop text. Equal seeds give equal sequences; sample i of several depends on the seed and on i.
        Sequences of temperature 0 are all equal. Cancelling the call ends its sampling. Raises
        `ArgumentError` for a directory without weights, and an `EngineError`.
        """
        ...

    def asleep(self) -> AbstractAsyncContextManager[None]:
        """While a training step runs inside the block on the same device, requests wait."""
        ...

    async def close(self) -> None:
        """Refuse further requests, and release what was loaded."""
        ...


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """A directory with weights as it is now; one that is written again at the same path is another.

    `written`: the file number and the time of change of its configuration.
    """

    path: Path
    is_adapter: bool
    written: tuple[int, int]

    @classmethod
    def at(cls, directory: Path) -> Self:
        """Raises `ArgumentError` for a directory that has neither an adapter nor a model."""
        path = directory.absolute()
        for name in (_ADAPTER, _MODEL):
            if (path / name).is_file():
                state = (path / name).stat()
                return cls(path, name == _ADAPTER, (state.st_ino, state.st_mtime_ns))
        raise ArgumentError("weights", str(directory), f"it has no {_ADAPTER} and no {_MODEL}; save the weights again")

    @property
    def name(self) -> str:
        """A name for an engine, of letters and digits: the same for the same path and files."""
        return hashlib.sha256(f"{self.path}\0{self.written}".encode(errors="surrogateescape")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Endings:
    """What ends a sequence of one model. `end_ids`: its own end tokens; `decode` makes text of ids, control
    tokens included."""

    end_ids: tuple[int, ...]
    decode: Callable[[Sequence[int]], str]

    @classmethod
    def of_model(cls, directory: Path) -> Self:
        """The end tokens are `eos_token` of the tokenizer and `eos_token_id` of generation_config.json.

        Raises `renderers.errors.LoadError` for a directory without a tokenizer.json.
        """
        own = ModelFiles.of(directory).special_tokens.get("eos_token", "")
        tokenizer = load_tokenizer(directory)
        eos = [tokenizer.control_id(own), tokenizer.body.token_to_id(own)]
        ids = [*eos, *map(tokenizer.control_id, generation_stops(directory, tokenizer))]
        return cls(tuple(dict.fromkeys(each for each in ids if each is not None)), tokenizer.decode)

    def of_request(self, stop: Sequence[str] | Sequence[int] | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The token ids and the texts that end the sequences of a request with `stop`.

        The model's own end tokens end a sequence beside those, as in Tinker, but for `()`, with which nothing
        does. Raises `ArgumentError` for an empty text, and for one that is no Unicode.
        """
        if stop is None:
            return self.end_ids, ()
        if not len(stop):
            return (), ()
        if "" in stop:
            raise ArgumentError("stop", stop, "leave out the empty text, which ends a sequence before its first token")
        ids = tuple(each for each in stop if isinstance(each, int))
        texts = tuple(each for each in stop if isinstance(each, str))
        if wrong := [each for each in texts if not is_unicode(each)]:
            raise ArgumentError("stop", wrong[0], "leave it out: it has half of a surrogate pair, and no text has one")
        return tuple(dict.fromkeys((*ids, *self.end_ids))), texts


async def generated(
    engine: Engine,
    request: SampleRequest,
    endings: Endings,
    *,
    max_length: int,
    adapter: str | None = None,
    extra: Mapping[str, Any] | None = None,
    generate: Generate | None = None,
) -> SampleResult:
    """Sample with an engine. `max_length`: the model's, of prompt and sequence together.

    `extra` are options of the engine; `generate` is called in place of its own for a request that scores its
    prompt. Raises what the engine raises, and `GenerationInterruptedError`.
    """
    ids = request.prompt.token_ids
    most = engine.vocab_size or MAX_TOKEN_ID  # the likeliest tokens are at most all that there are
    stop_ids, texts = endings.of_request(request.stop)
    is_greedy = request.temperature == 0
    asked = _asked(
        request.prompt,
        SamplingParams(
            # An engine has the better text for a prompt that leaves no room.
            max_tokens=max(1, max_length - len(ids)) if request.max_tokens is None else request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            # No limit is -1 in Tinker, and 0 in the engines.
            top_k=0 if request.top_k == -1 else request.top_k,
            seed=request.seed,
            # Sequences of temperature 0 are equal: one is sampled, and repeated below.
            n=1 if is_greedy else request.num_samples,
            stop_token_ids=stop_ids,
            extra=extra or {},
            top_logprobs=min(request.topk_sample, most),
        ),
        prompt_logprobs=request.scores_prompt,
        prompt_top_logprobs=min(request.topk_prompt, most),
        adapter=adapter,
    )
    result = await _with_texts(engine, generate or engine.generate, asked, texts, endings)
    check_uninterrupted(asked.request_id, result.completions)
    sequences = [
        SampledSequence(each.token_ids, each.logprobs, each.finish_reason is FinishReason.STOP, each.top_logprobs)
        for each in sorted(result.completions, key=lambda each: each.index)
    ]
    of_prompt = result.prompt_top_logprobs
    if of_prompt is not None:
        is_empty = of_prompt.token_ids == NO_TOKEN
        of_prompt = TopLogprobs(
            np.where(is_empty, 0, of_prompt.token_ids), np.where(is_empty, _NO_LOGPROB, of_prompt.logprobs)
        )
    sequences = sequences * request.num_samples if is_greedy else sequences
    return SampleResult(sequences, result.prompt_logprobs if request.prompt_logprobs else None, of_prompt)


def _asked(prompt: ModelInput, sampling: SamplingParams, **options: Any) -> GenerateRequest:
    """A prompt for an engine: what is no image chunk is text, whatever its ids."""
    ids, media = prompt.token_ids.tolist(), prompt.media
    items = MultiModalData.from_items(media) if media else None
    return GenerateRequest(ids, sampling, items, sampled=_texts_between(media, len(ids)), **options)


async def _with_texts(
    engine: Engine, generate: Generate, request: GenerateRequest, texts: tuple[str, ...], endings: Endings
) -> GenerateResult:
    """The completions up to the first of `texts`; the engine ends them there if it reports tokens as they come."""
    if not texts:
        return await generate(request)
    # What scores a prompt goes through `generate`, which reports no tokens as they come.
    if engine.streams and not request.scores_prompt:
        async with ending_early(engine.abort, request, texts, endings.decode) as listen:
            result = await engine.generate(request, listen)
    else:
        result = await generate(request)
    cut = [cut_at_stop(each, texts, endings.decode)[0] for each in result.completions]
    return replace(result, completions=cut)


def _texts_between(media: Sequence[PlacedItem], length: int) -> list[tuple[int, int]]:
    """The ranges of a row of `length` tokens between its images."""
    starts = [0, *(placeholder.end for _, placeholder in media)]
    ends = [*(placeholder.offset for _, placeholder in media), length]
    return [pair for pair in zip(starts, ends, strict=True) if pair[0] < pair[1]]
