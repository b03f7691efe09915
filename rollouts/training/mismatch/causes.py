"""The causes of a mismatch that this package names, and what to do about each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple


class Cause(StrEnum):
    """Why log-probabilities of sampler and trainer differ. The value is the name for people."""

    DOUBLED_NORMALISATION = "doubled normalisation"
    MISSING_NORMALISATION = "missing normalisation"
    DROPPED_IMAGE = "dropped image"
    SWAPPED_IMAGE = "swapped image"
    WRONG_TEMPLATE = "wrong template"
    STALE_WEIGHTS = "stale weights"
    WRONG_TEMPERATURE = "wrong temperature"
    PROCESSED_LOGPROBS = "processed log-probabilities"
    SHIFTED_LOGPROBS = "shifted log-probabilities"
    MISSING_LOGPROBS = "missing log-probabilities"
    MOE_ROUTING = "MoE routing"

    @property
    def cure(self) -> str:
        return _CURES[self]


class LikelyCause(NamedTuple):
    """A cause that the log-probabilities alone suggest; `diagnose_mismatch` tests causes by computing them again.

    `others` are the causes that show in the same way; `evidence` has the figures. Where none of them is more likely
    than `cause`, each has an entry of its own with the same evidence, and their order says nothing.
    """

    cause: Cause
    evidence: str
    others: tuple[Cause, ...] = ()


_CURES: Mapping[Cause, str] = MappingProxyType(
    {
        Cause.DOUBLED_NORMALISATION: "send raw uint8 pixels to a server that normalises, and floats to one that does "
        "not (`rollouts doctor` checks the server)",
        Cause.MISSING_NORMALISATION: "send the processor's floats to a server that does not normalise "
        "(`rollouts doctor` checks the server)",
        Cause.DROPPED_IMAGE: "check that each request holds its images and that the server's route uses them",
        Cause.SWAPPED_IMAGE: "check the order and the hashes of the images of each request",
        Cause.WRONG_TEMPLATE: "send token ids to the sampler, or give sampler and trainer the same chat template and "
        "options, and compare their prompt ids",
        Cause.STALE_WEIGHTS: "update the sampler's weights before it samples, or leave out tokens by their version",
        Cause.WRONG_TEMPERATURE: "have the sampler report log-probabilities before temperature (vLLM: "
        "--logprobs-mode raw_logprobs), or divide the trainer's logits by the same temperature",
        Cause.PROCESSED_LOGPROBS: "have the sampler report log-probabilities before top-k, top-p and penalties (vLLM: "
        "--logprobs-mode raw_logprobs)",
        Cause.SHIFTED_LOGPROBS: "align the log-probabilities with their tokens: that of token t is predicted at t - 1",
        Cause.MISSING_LOGPROBS: "request the log-probability of each sampled token; never replace a missing one by 0",
        Cause.MOE_ROUTING: "replay the sampler's routing in the trainer (`routed_experts` of a completion), or compute "
        "the router in float32 on both sides",
    }
)
