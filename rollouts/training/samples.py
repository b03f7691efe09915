"""Training samples, and how they are made from rendered conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from renderers import MediaItem, PlaceholderRange, RenderedTrainingSample
from renderers.placement import item_placement_error
from rollouts.engines.protocol import TopLogprobs, WeightSpan
from rollouts.engines.result_checks import weight_span_error
from rollouts.errors import ArgumentError, SampleError
from rollouts.scoring import TokenScores
from rollouts.trajectory.token_node import ROUTED_EXPERTS, TEACHER_COLUMNS
from transport import wire_type


@wire_type("rollouts.TrainingSample")
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TrainingSample:
    """A row of n tokens.

    `token_ids` int32 (n,); `loss_mask` bool (n,), True where log p(token | earlier tokens) is trained; `logprobs`
    float32 (n,), the sampler's, 0 outside the mask; `advantages` float32 (n,); `media`, the items with the ranges
    of their placeholder tokens. `weight_spans` count trained tokens: 0 is the first token of the mask. `name`
    identifies the row in errors. `routed_experts`, integers (n, layers, experts a token), are those of the sampler's
    pass that predicted each token, the first row without meaning; None where the engine did not report them. They
    change no loss: `diagnose_mismatch` reads them. `top_logprobs` (n, k) are the likeliest tokens of the sampler in the
    place of each token, with -1 and NaN where none were recorded, as in prompts; None where none were at all.

    A teacher's columns (`rollouts.training.score`), each None where there was no teacher: `teacher_logprobs`
    float32 (n,), finite on trained tokens; `teacher_top_ids` int32 and `teacher_top_logprobs` float32 (n, k),
    the likeliest tokens in the place of each. `with_teacher` adds them.

    Raises `SampleError` for token ids that are no int32 from 0, and for dtypes, lengths, log-probabilities, advantages,
    spans, ranges, experts and likeliest tokens that contradict each other.
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

    def __post_init__(self) -> None:
        for column, (kinds, dtype) in _COLUMNS.items():
            values = getattr(self, column)
            if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in kinds:
                raise SampleError(self.name, f"{column} is {_kind(values)}; pass one row of {dtype}")
        count = len(self.token_ids)
        for column in ("loss_mask", "logprobs", "advantages"):
            length = len(getattr(self, column))
            if length != count:
                raise SampleError(self.name, f"{column} has {length} values for {count} tokens")
        wrong_ids = np.flatnonzero((self.token_ids < 0) | (self.token_ids > _LARGEST_ID))
        if len(wrong_ids):
            raise SampleError(
                self.name,
                f"token {wrong_ids[0]} has id {self.token_ids[wrong_ids[0]]}; token ids are from 0 to {_LARGEST_ID}. "
                "Take the ids of the tokenizer; a value that marks ignored tokens, such as -100, belongs in no sample",
            )
        if count and self.loss_mask[0]:
            raise SampleError(self.name, "the first token is trained, but no token before it predicts it")
        for values, kind, cure in (
            (self.logprobs, "log-probability", "take the sampler's, or set loss_mask to False there"),
            (self.advantages, "advantage", "leave the episode out, or compute the advantages from finite rewards"),
        ):
            if len(wrong := np.flatnonzero(self.loss_mask & ~np.isfinite(values))):
                reason = f"token {wrong[0]} is trained and its {kind} {values[wrong[0]]} is not a finite number"
                raise SampleError(self.name, f"{reason}; {cure}")
        if (error := item_placement_error(self.media, count)) is not None:
            raise SampleError(self.name, error)
        trained = int(np.count_nonzero(self.loss_mask))
        if (error := weight_span_error(self.weight_spans, trained)) is not None:
            raise SampleError(self.name, f"{error}; spans count the {trained} trained tokens of the sample")
        experts = self.routed_experts
        is_array = isinstance(experts, np.ndarray) and experts.dtype.kind in "iu" and experts.ndim == 3
        if experts is not None and not (is_array and len(experts) == count):
            rule = f"pass integers ({count}, layers, experts a token), or None"
            raise SampleError(self.name, f"routed_experts is {_kind(experts)}; {rule}")
        if self.top_logprobs is not None and not _are_likeliest(self.top_logprobs, count):
            rule = f"pass a TopLogprobs of integers and floats, both ({count}, k), or None"
            raise SampleError(self.name, f"top_logprobs has other types or shapes; {rule}")
        if any(getattr(self, name) is not None for name in TEACHER_COLUMNS):
            self._check_teacher(count)

    def _check_teacher(self, count: int) -> None:
        logprobs, ids, top = self.teacher_logprobs, self.teacher_top_ids, self.teacher_top_logprobs
        if not isinstance(logprobs, np.ndarray) or logprobs.dtype.kind != "f" or logprobs.shape != (count,):
            raise SampleError(self.name, f"teacher_logprobs is {_kind(logprobs)}; pass float32 ({count},)")
        if len(wrong := np.flatnonzero(self.loss_mask & ~np.isfinite(logprobs))):
            reason = f"token {wrong[0]} is trained and its log-probability under the teacher is {logprobs[wrong[0]]}"
            raise SampleError(self.name, f"{reason}; score the sample again")
        if ids is None and top is None:
            return
        if ids is None or top is None or not _are_likeliest(TopLogprobs(ids, top), count):
            reason = f"teacher_top_ids is {_kind(ids)} and teacher_top_logprobs {_kind(top)}"
            raise SampleError(self.name, f"{reason}; pass int32 and float32, both ({count}, k)")
        trained = ids[self.loss_mask]
        if trained.size and (trained.min() < 0 or np.isnan(top[self.loss_mask]).any()):
            raise SampleError(self.name, "a trained token lacks the teacher's likeliest tokens; score the sample again")

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        tokens, trained, media = len(self.token_ids), np.count_nonzero(self.loss_mask), len(self.media)
        return f"<TrainingSample {self.name:.80}: {tokens} tokens, {trained} trained, {media} media>"


#: The dtypes of the columns: what numpy calls their kinds, and the name for errors.
_COLUMNS: Mapping[str, tuple[str, str]] = {
    "token_ids": ("iu", "integers (int32)"),
    "loss_mask": ("b", "bool"),
    "logprobs": ("f", "floats (float32)"),
    "advantages": ("f", "floats (float32)"),
}
#: The columns that a sample may lack, arrays with one row for each token; `top_logprobs` is a pair of such arrays.
OPTIONAL_COLUMNS = (ROUTED_EXPERTS, *TEACHER_COLUMNS)

_LARGEST_ID = int(np.iinfo(np.int32).max)


def _kind(value: object) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _are_likeliest(top: TopLogprobs, count: int) -> bool:
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
    """Samples with the columns of a teacher, from what `score(samples, teacher)` returned.

    Raises `ValueError` for another number of scores, `SampleError` for scores of other lengths.
    """
    return [
        replace(
            sample,
            teacher_logprobs=scored.logprobs,
            teacher_top_ids=None if scored.top is None else scored.top.token_ids,
            teacher_top_logprobs=None if scored.top is None else scored.top.logprobs,
        )
        for sample, scored in zip(samples, scores, strict=True)
    ]
