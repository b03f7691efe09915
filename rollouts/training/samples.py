"""Training samples, and how they are made from rendered conversations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from renderers import MediaItem, PlaceholderRange, RenderedTrainingSample
from renderers.placement import item_placement_error
from rollouts.engines.protocol import TopLogprobs, WeightSpan
from rollouts.engines.result_checks import weight_span_error
from rollouts.errors import ArgumentError, SampleError
from rollouts.models.placed_rows import TokenRow
from rollouts.scoring import TokenScores
from rollouts.trajectory.token_node import ROUTED_EXPERTS, SAMPLING_MASK, TEACHER_COLUMNS, TEACHER_LOGPROBS
from transport import wire_type


@wire_type("rollouts.TrainingSample")
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TrainingSample(TokenRow):
    """A row of n tokens.

    `token_ids` int32 (n,); `loss_mask` bool (n,), True where log p(token | earlier tokens) is trained;
    `logprobs` float32 (n,), the sampler's, 0 outside the mask; `advantages` float32 (n,); `media`, the items
    with the ranges of their placeholder tokens. `weight_spans` count trained tokens: 0 is the first token of
    the mask. `name` identifies the row in errors. `routed_experts`, integers (n, layers, experts a token),
    are those of the sampler's pass that predicted each token, the first row without meaning; None where the
    engine did not report them. `token_logprobs(routed_experts=True)` computes with them. `top_logprobs` (n,
    k) are the likeliest tokens of the sampler in the place of each token, with -1 and NaN where none were
    recorded, as in prompts; None where none were at all.

    `sampling_mask` int32 (n, k) has the ids that each trained token was sampled from, then -1, where options
    such as top_p left others out: its log-probability is that among these ids. -1 alone: among all ids, or
    among ids that are not known.

    A teacher's columns (`rollouts.training.score`), each None where there was no teacher: `teacher_logprobs`
    float32 (n,), finite on trained tokens; `teacher_top_ids` int32 and `teacher_top_logprobs` float32 (n, k),
    the likeliest tokens in the place of each. `with_teacher` adds them.

    Raises `SampleError` for token ids that are no int32 from 0, and for dtypes, lengths, log-probabilities,
    advantages, spans, ranges, experts and likeliest tokens that contradict each other.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    media: tuple[tuple[MediaItem, PlaceholderRange], ...] = ()
    weight_spans: tuple[WeightSpan, ...] = ()
    name: str = ""
    routed_experts: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    teacher_top_ids: np.ndarray | None = None
    teacher_top_logprobs: np.ndarray | None = None
    top_logprobs: TopLogprobs | None = None
    sampling_mask: np.ndarray | None = None

    def __post_init__(self) -> None:
        check_column(self.name, "token_ids", self.token_ids, "iu", ("n",))
        count = len(self)
        is_taught = any(getattr(self, name) is not None for name in TEACHER_COLUMNS)
        for name, (kinds, others) in _COLUMNS.items():
            required = name not in OPTIONAL_COLUMNS or (name == TEACHER_LOGPROBS and is_taught)
            if required or getattr(self, name) is not None:
                check_column(self.name, name, getattr(self, name), kinds, (count, *others))
        ids, logprobs = self.teacher_top_ids, self.teacher_top_logprobs
        taught = None if ids is None and logprobs is None else TopLogprobs(ids, logprobs)  # type: ignore[arg-type]
        for what, pair in (("top_logprobs", self.top_logprobs), ("the teacher's top", taught)):
            if pair is not None and not _are_likeliest(pair, count):
                rule = f"pass integers and floats, both ({count}, k), or None"
                raise SampleError(self.name, f"{what} is no such pair of arrays; {rule}")
        wrong_ids = np.flatnonzero((self.token_ids < 0) | (self.token_ids > _LARGEST_ID))
        if len(wrong_ids):
            raise SampleError(
                self.name,
                f"token {wrong_ids[0]} has id {self.token_ids[wrong_ids[0]]}; token ids are from 0 to "
                f"{_LARGEST_ID}. Take the ids of the tokenizer; a value that marks ignored tokens, such as "
                "-100, belongs in no sample",
            )
        if count and self.loss_mask[0]:
            raise SampleError(self.name, "the first token is trained, but no token before it predicts it")
        for values, kind, cure in (
            (self.logprobs, "log-probability", "take the sampler's, or set loss_mask to False there"),
            (self.advantages, "advantage", "leave the episode out, or compute the advantages from finite rewards"),
            (self.teacher_logprobs, "log-probability under the teacher", "score the sample again"),
        ):
            if values is not None and len(wrong := np.flatnonzero(self.loss_mask & ~np.isfinite(values))):
                reason = f"token {wrong[0]} is trained and its {kind} {values[wrong[0]]} is not a finite number"
                raise SampleError(self.name, f"{reason}; {cure}")
        if self.sampling_mask is not None:
            check_kept_ids(self.name, self.token_ids, self.sampling_mask)
        if (error := item_placement_error(self.media, count)) is not None:
            raise SampleError(self.name, error)
        trained = int(np.count_nonzero(self.loss_mask))
        if (error := weight_span_error(self.weight_spans, trained)) is not None:
            raise SampleError(self.name, f"{error}; spans count the {trained} trained tokens of the sample")
        if ids is not None and logprobs is not None and ((ids < 0) | np.isnan(logprobs))[self.loss_mask].any():
            raise SampleError(self.name, "a trained token lacks the teacher's likeliest tokens; score the sample again")

    def __repr__(self) -> str:
        tokens, trained, media = len(self.token_ids), np.count_nonzero(self.loss_mask), len(self.media)
        return f"<TrainingSample {self.name:.80}: {tokens} tokens, {trained} trained, {media} media>"


#: The columns that a sample may lack, arrays with one row for each token; `top_logprobs` is a pair of such arrays.
OPTIONAL_COLUMNS = (ROUTED_EXPERTS, SAMPLING_MASK, *TEACHER_COLUMNS)
#: All columns that are one array with a row for each token.
COLUMNS = ("token_ids", "loss_mask", "logprobs", "advantages", *OPTIONAL_COLUMNS)
#: The dtypes of the columns, by what numpy calls their kinds, and their axes after that of the tokens.
_COLUMNS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "loss_mask": ("b", ()),
    "logprobs": ("f", ()),
    "advantages": ("f", ()),
    ROUTED_EXPERTS: ("iu", ("layers", "experts a token")),
    SAMPLING_MASK: ("iu", ("k",)),
    TEACHER_LOGPROBS: ("f", ()),
}
_LARGEST_ID = int(np.iinfo(np.int32).max)
_KINDS = {"iu": "integers", "f": "floats", "b": "bools", "fiub": "numbers"}


def check_column(row: str, name: str, values: Any, kinds: str, shape: tuple[int | str, ...]) -> None:
    """Raise `SampleError` unless `values` is an array of `kinds` of dtypes and of `shape`, where a text is any size."""
    is_array = isinstance(values, np.ndarray)
    sizes = values.shape if is_array and values.dtype.kind in kinds else ()
    if len(sizes) == len(shape) and all(
        isinstance(wanted, str) or wanted == size for size, wanted in zip(sizes, shape, strict=True)
    ):
        return
    found = f"{values.dtype} {values.shape}" if is_array else f"a {type(values).__name__}"
    wanted = str(shape).replace("'", "")
    raise SampleError(row, f"{name} is {found}; pass {_KINDS[kinds]} {wanted}")


def check_kept_ids(row: str, ids: np.ndarray, kept: np.ndarray) -> None:
    """Raise `SampleError` for a row of `kept` (n, k) with ids but not that of `ids` (n,), or with one twice."""
    ordered = np.sort(kept, axis=1)
    has_twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    is_lacking = (kept >= 0).any(axis=1) & ~(kept == ids[:, None]).any(axis=1)
    if len(wrong := np.flatnonzero(has_twice | is_lacking)):
        found = "has an id twice" if has_twice[wrong[0]] else f"lacks its id {ids[wrong[0]]}"
        rule = "pass the ids that it was sampled from, once each, or -1 where they are not known"
        raise SampleError(row, f"the sampling_mask of token {wrong[0]} {found}; {rule}")


def _are_likeliest(top: object, count: int) -> bool:
    return (
        isinstance(top, TopLogprobs)
        and all(isinstance(each, np.ndarray) and each.ndim == 2 and len(each) == count for each in top)
        and top.token_ids.dtype.kind in "iu"
        and top.logprobs.dtype.kind == "f"
        and top.token_ids.shape == top.logprobs.shape
    )


def sample_from_rendered(rendered: RenderedTrainingSample, *, name: str = "") -> TrainingSample:
    """A supervised sample of a conversation, with advantages of 1: `rendered` is of `build_training_sample(s)`.

    sample = sample_from_rendered(build_training_sample(renderer, messages))

    Raises `ArgumentError` for anything else: only those functions refuse turns that the model could not have sampled.
    """
    if not isinstance(rendered, RenderedTrainingSample):
        rule = "pass a sample of build_training_sample; message_loss_mask chooses the turns"
        raise ArgumentError("rendered", type(rendered).__name__, rule)
    media = rendered.multi_modal_data
    return TrainingSample(
        token_ids=np.array(rendered.token_ids, dtype=np.int32),
        loss_mask=np.array(rendered.loss_mask, dtype=bool),
        logprobs=np.zeros(len(rendered), dtype=np.float32),
        advantages=np.ones(len(rendered), dtype=np.float32),
        media=() if media is None else tuple(media.items_with_ranges()),
        name=name,
    )


def with_teacher(samples: Sequence[TrainingSample], scores: Sequence[TokenScores]) -> list[TrainingSample]:
    """Samples with a teacher's columns. `ValueError` for another count, `SampleError` for other lengths."""
    return [
        replace(
            sample,
            teacher_logprobs=scored.logprobs,
            teacher_top_ids=None if scored.top is None else scored.top.token_ids,
            teacher_top_logprobs=None if scored.top is None else scored.top.logprobs,
        )
        for sample, scored in zip(samples, scores, strict=True)
    ]


def check_comparable_with_teacher(sample: TrainingSample) -> None:
    """Raise `SampleError` for log-probabilities among the kept ids: a teacher's are among all ids."""
    if sample.sampling_mask is not None and (sample.sampling_mask[sample.loss_mask] >= 0).any():
        reason = "its log-probabilities are among the ids that top_p, top_k or another option kept, a teacher's are not"
        raise SampleError(sample.name, f"{reason}; sample without these options, or take forward_kl or jsd")
