"""Sampling sessions of the Tinker API, and their requests."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import tinker.types as types

from rollouts.engines.protocol import TopLogprobs
from rollouts.errors import ArgumentError, short_repr
from rollouts.serve.errors import RequestError
from rollouts.tinker.requests import ModelInput, PromptTargets, SampleRequest, SampleResult
from rollouts.tinker.sample_records import SampleRecords
from rollouts.tinker.sessions import Json, SamplingSession
from rollouts.tinker.wire import chunks_of_json, prompt_targets, sample_result

if TYPE_CHECKING:
    from rollouts.tinker.service import Service


#: Of ids of sampling requests without a session.
_DIRECT: Final = "direct-"


class Sampling:
    """The routes of sampling, which return their answers as JSON. They raise `RequestError`."""

    def __init__(self, service: Service, records: SampleRecords | None) -> None:
        self._service = service
        self._backend = service.backend
        self._futures = service.futures
        self._samples = records

    def create_session(self, body: types.CreateSamplingSessionRequest) -> Json:
        session = self._service.session(body.session_id)
        name, weights = self._weights(body.base_model, body.model_path)
        sampling = session.add_sampling(body.sampling_session_seq_id, name, body.model_path, weights)
        return {"type": body.type, "sampling_session_id": sampling}

    def session(self, sampling_session_id: str) -> SamplingSession | None:
        session = self._service.session_of(sampling_session_id)
        return None if session is None else session.samplers.get(sampling_session_id)

    def sample(self, body: types.SampleRequest) -> Json:
        if body.record_stability_info:  # what tinker-cookbook asks for by default
            rule = "train with another loss than stable_reinforce, such as loss_fn=ppo"
            raise RequestError(400, f"record_stability_info is not supported by this server; {rule}")
        if (scored := body.prompt_logprobs_last_n) is not None and not body.prompt_logprobs:
            raise RequestError(400, "prompt_logprobs_last_n is one of prompt_logprobs; set these, too")
        limits = self._backend.limits
        for name, least in (("num_samples", 1), ("prompt_alt_tokens_k", 0)):
            if not least <= getattr(body, name) <= limits.samples:
                given = short_repr(getattr(body, name))
                raise RequestError(400, f"{name} is {given}; pass {least} to {limits.samples}")
        if body.sampling_session_id is None:
            sampling_id, session_id, version = f"{_DIRECT}{uuid.uuid4().hex}", None, ""
            _, weights = self._weights(body.base_model, body.model_path)
        else:
            if (sampling := self.session(body.sampling_session_id)) is None:
                found = short_repr(body.sampling_session_id)
                raise RequestError(404, f"there is no sampling session {found}; create one")
            sampling_id, session_id, weights = body.sampling_session_id, sampling.session.session_id, sampling.weights
            version = sampling.model_path or sampling.base_model
        own = self._futures.unfetched(share := session_id or _DIRECT)
        if own >= limits.pending - self._futures.unfetched():  # at most half of what the others leave
            raise RequestError(429, f"{own} requests of this session are waiting; fetch results, or send it later")
        chunks = chunks_of_json("prompt.chunks", body.prompt.chunks)
        layout = body.target_prompt_logprobs
        targets = None if layout is None else prompt_targets("target_prompt_logprobs", layout)

        async def work() -> bytes:
            prompt = await asyncio.to_thread(self._backend.reader.read, "prompt", chunks)
            if scored is not None and not 1 <= scored < len(prompt.token_ids):
                raise ArgumentError(
                    "prompt_logprobs_last_n", scored, f"pass 1 to {len(prompt.token_ids) - 1}, those that are predicted"
                )
            request = _sample_request(body, prompt, targets)
            result = await self._backend.sampler.sample(weights, request, share=session_id or "")
            if self._samples is not None and session_id is not None:
                self._samples.sampled(session_id, request, result, version)
            return sample_result(result if scored is None else _of_last(result, scored), layout)

        request_id = f"{sampling_id}/{body.seq_id if body.seq_id is not None else uuid.uuid4().hex}"
        self._futures.submit(request_id, work, can_end=True, share=share)
        return {
            "request_id": request_id,
            "sample_sequence_ids": [f"{request_id}:{index}" for index in range(body.num_samples)],
        }

    def _weights(self, base_model: str | None, uri: str | None) -> tuple[str, Path | None]:
        if uri is None:
            if base_model is None:
                raise RequestError(400, "pass base_model, or model_path")
            self._backend.check_name(base_model)
            return base_model, None
        return base_model or self._backend.names[0], self._service.directory.weights(uri, "sampler_weights")


def _of_last(result: SampleResult, count: int) -> SampleResult:
    """The result with what it says of the last `count` tokens of the prompt, and nothing of those before."""
    assert result.prompt_logprobs is not None
    logprobs, topk = result.prompt_logprobs.copy(), result.topk_prompt
    logprobs[:-count] = np.nan
    if topk is not None:
        topk = TopLogprobs(topk.token_ids.copy(), topk.logprobs.copy())
        topk.token_ids[:-count], topk.logprobs[:-count] = topk.token_ids[0], topk.logprobs[0]  # the empty row
    return replace(result, prompt_logprobs=logprobs, topk_prompt=topk)


def _sample_request(body: types.SampleRequest, prompt: ModelInput, targets: PromptTargets | None) -> SampleRequest:
    params = body.sampling_params
    stop: Any = (params.stop,) if isinstance(params.stop, str) else params.stop
    return SampleRequest(
        prompt,
        num_samples=body.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=min(max(params.top_k, 0), 2**31 - 1),  # no vocabulary is larger
        seed=params.seed,
        stop=None if stop is None else tuple(stop),
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt=body.topk_prompt_logprobs,
        topk_sample=body.topk_sample_logprobs,
        targets=targets,
        alternatives=body.prompt_alt_tokens_k,
    )
