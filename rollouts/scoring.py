"""Log-probabilities of tokens that exist already, under any engine: a teacher, a reference, a judge of samples."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from renderers import MultiModalData, TemplateRenderer
from rollouts.calls import gathered
from rollouts.engines.protocol import Engine, GenerateRequest, SamplingParams, TopLogprobs
from rollouts.engines.result_checks import check_result
from rollouts.errors import ArgumentError, MissingLogProbsError, TrajectoryError
from rollouts.models.placed_rows import TokenRow
from rollouts.teacher import check_teacher
from rollouts.trajectory.provenance import Provenance
from rollouts.trajectory.token_node import (
    SAMPLING_MASK,
    TEACHER_COLUMNS,
    TEACHER_KL,
    TEACHER_LOGPROBS,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPROBS,
)
from rollouts.trajectory.tree import Trajectory
from rollouts.values import check_integer


class TokenScores(NamedTuple):
    """Of a row of n tokens: `logprobs` float32 (n,), log p(token | earlier tokens); NaN for the first one.

    `top`, if asked for: the k likeliest tokens in the place of each, (n, k); the first row has -1 and NaN. `version` is
    that of the engine's weights (`WeightSpan.version`), empty where the engine reports none.
    """

    logprobs: np.ndarray
    top: TopLogprobs | None = None
    version: str = ""


async def score(
    subject: Trajectory | Sequence[TokenRow],
    engine: Engine,
    *,
    top_k: int = 0,
    renderer: TemplateRenderer | None = None,
    teacher: TemplateRenderer | None = None,
    adapter: str | None = None,
    concurrency: int = 64,
) -> list[TokenScores]:
    """The log-probabilities of the tokens of samples, or of the leaves of a trajectory, under an engine.

        scores = await score(samples, VLLMEngine("http://127.0.0.1:8001"), renderer=renderer)
        kl = np.nanmean(samples[0].logprobs - scores[0].logprobs, where=samples[0].loss_mask)

    - subject: `TrainingSample`s; the scores are in their order. Or a trajectory, with one for each of its leaves.
    - engine: any that answers requests with `prompt_logprobs`.
    - top_k: how many of the likeliest tokens in the place of each are returned too; a vLLM server limits it
      (`--max-logprobs`).
    - renderer: the one that rendered the tokens. A trajectory with media needs it, to compute them again from
      their sources; and a server that processes media itself does.
    - teacher: the renderer of the engine's model, to check that both give tokens and pixels the same meaning
      (`check_teacher`). Without it nothing but the range of the ids is known to agree.
    - adapter: a LoRA adapter that the engine has loaded.
    - concurrency: how many requests are open at a time.

    A request has the tokens of a row as its prompt and samples one token more, so that a row may have at most one token
    less than the engine's context. Rows with equal tokens and media are one request. Rows that begin alike are whole
    requests all the same: an engine computes log-probabilities of a prompt without its prefix cache. The data of a
    image are sent once to a server; rows with the same first image go to the same server of a fleet.

    Raises `ArgumentError`, the errors of `engine.generate`, and for a trajectory those of
    `Trajectory.multi_modal_data`.
    """
    if not isinstance(engine, Engine):
        rule = "pass an engine of tokens, such as LocalEngine or VLLMEngine: others give no log-probabilities of tokens"
        raise ArgumentError("engine", engine, rule)
    check_integer("top_k", top_k, least=0)
    check_integer("concurrency", concurrency)
    if teacher is not None:
        if renderer is None:
            raise ArgumentError("renderer", None, "pass the renderer of the tokens, which the teacher is compared with")
        check_teacher(renderer, teacher)
    rows = _rows(subject, renderer)
    markers = {} if renderer is None else renderer.placeholder_token_ids
    requests: dict[tuple[Any, ...], GenerateRequest] = {}
    keys = []
    for row in rows:
        media = tuple((item.mm_hash, place.offset) for item, place in row.media)
        keys.append((row.token_ids.astype(np.int32).tobytes(), media))  # rows of int64 have other bytes
        if len(row.token_ids) > 1 and keys[-1] not in requests:
            requests[keys[-1]] = _request(row, top_k, adapter, markers)
    slots = asyncio.Semaphore(concurrency)

    async def scores_of(request: GenerateRequest) -> TokenScores:
        async with slots:
            result = await engine.generate(request)
        check_result(request, result)
        if result.prompt_logprobs is None or (top_k and result.prompt_top_logprobs is None):
            reason = "the request was aborted before the engine had the log-probabilities of the prompt; score again"
            raise MissingLogProbsError(request.request_id, reason)
        versions = [span.version for span in result.completions[0].weight_spans]
        top = result.prompt_top_logprobs if top_k else None
        return TokenScores(result.prompt_logprobs.astype(np.float32), top, versions[0] if versions else "")

    found = dict(zip(requests, await gathered(map(scores_of, requests.values())), strict=True))
    return [
        found[key] if key in found else _without_prediction(row, top_k) for key, row in zip(keys, rows, strict=True)
    ]


def _rows(subject: Trajectory | Sequence[TokenRow], renderer: TemplateRenderer | None) -> Sequence[TokenRow]:
    if isinstance(subject, Trajectory):
        if not subject.has_tokens:
            reason = "its engine gave messages without tokens, and there is nothing to score"
            raise TrajectoryError(f"episode {subject.episode_id}: {reason}; sample with an engine of tokens")
        if renderer is None and next(subject.all_media(), None) is not None:
            rule = f"episode {subject.episode_id} has media; pass the renderer of its tokens, which computes them again"
            raise ArgumentError("renderer", None, rule)
        processors = {} if renderer is None else renderer.processors
        return [
            TokenRow(
                subject.token_ids(leaf),
                [(reference.derive(processors), reference.placeholder) for reference in subject.media(leaf)],
                f"{subject.episode_id}/{leaf}",
            )
            for leaf in subject.leaves()
        ]
    return subject


def _request(row: TokenRow, top_k: int, adapter: str | None, markers: Mapping[str, int]) -> GenerateRequest:
    # What stands outside of the media was checked when it was sampled: a media token there is text.
    ends = [0, *(place.end for _, place in row.media)]
    starts = [*(place.offset for _, place in row.media), len(row.token_ids)]
    return GenerateRequest(
        row.token_ids.tolist(),
        SamplingParams(max_tokens=1, temperature=0.0),  # no server takes a request for no token
        MultiModalData.from_items(row.media) if row.media else None,
        session_id=f"scored-{row.media[0][0].mm_hash}" if row.media else None,
        placeholder_token_ids=markers,
        sampled=[(start, end) for start, end in zip(ends, starts, strict=True) if start < end],
        prompt_logprobs=True,
        prompt_top_logprobs=top_k,
        adapter=adapter,
    )


def _without_prediction(row: TokenRow, top_k: int) -> TokenScores:
    """The scores of a row of one token or none."""
    count = len(row.token_ids)
    return TokenScores(np.full(count, np.nan, np.float32), TopLogprobs.unpredicted(count, top_k) if top_k else None)


def with_scores(trajectory: Trajectory, scores: Sequence[TokenScores]) -> Trajectory:
    """A copy of a trajectory whose nodes have the scores of its leaves as `extras`, 4 + 8 k bytes a token.

    The columns are `teacher_logprobs`, `teacher_top_ids` and `teacher_top_logprobs`; those of an earlier teacher are
    replaced. A node that leaves share has those of the first. `provenance.teacher_versions` are the versions of the
    teacher's weights, and `metrics["teacher_kl"]` is the mean of log p(sampler) -
    log p(teacher) over the sampled tokens: an estimate of KL(sampler || teacher) in nats per token. Turns of
    which top_p, top_k or another option left ids out are no part of it. Raises `ArgumentError` for scores of
    another trajectory.
    """
    leaves = trajectory.leaves()
    given = [len(each.logprobs) for each in scores]
    counts = [sum(len(trajectory.nodes[index]) for index in trajectory.path(leaf)) for leaf in leaves]
    if given != counts:
        rule = f"the leaves of episode {trajectory.episode_id} have {counts} tokens; pass what score returned for it"
        raise ArgumentError("the lengths of the scores", given, rule)
    nodes = list(trajectory.nodes)
    differences = [np.empty(0, np.float32)]
    scored: set[int] = set()
    for leaf, (logprobs, top, _) in zip(leaves, scores, strict=True):
        columns = {TEACHER_LOGPROBS: logprobs}
        if top is not None:
            columns |= {TEACHER_TOP_IDS: top.token_ids, TEACHER_TOP_LOGPROBS: top.logprobs}
        start = 0
        for index in trajectory.path(leaf):
            node, end = nodes[index], start + len(nodes[index])
            if index not in scored:
                own = {name: column[start:end] for name, column in columns.items()}
                others = {name: rows for name, rows in node.extras.items() if name not in TEACHER_COLUMNS}
                nodes[index] = replace(node, extras=others | own)
                # With it they may be among the kept ids; the teacher's are not.
                if SAMPLING_MASK not in node.extras:
                    differences.append(node.logprobs - logprobs[start:end][node.sampled])
                scored.add(index)
            start = end
    metrics = dict(trajectory.metrics)
    if len(joined := np.concatenate(differences)):
        metrics[TEACHER_KL] = float(joined.mean(dtype=np.float64))
    versions = tuple(dict.fromkeys(each.version for each in scores if each.version))
    provenance = trajectory.provenance
    if versions or provenance is not None:
        provenance = replace(provenance or Provenance(), teacher_versions=versions)
    return replace(
        trajectory, nodes=tuple(nodes) if trajectory.finished else nodes, metrics=metrics, provenance=provenance
    )
