"""From trajectories to gradients: samples, batches, model inputs, losses and the mismatch. Needs the `torch` extra."""

from rollouts.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError("rollouts.training", "torch", "torch") from error

from rollouts.training.advantages import DegenerateGroup, degenerate_groups, group_advantages
from rollouts.training.batch.micro_batches import micro_batches
from rollouts.training.batch.tensor_list import TensorList
from rollouts.training.batch.training_batch import TrainingBatch
from rollouts.training.logprobs import token_logprobs, token_logprobs_and_entropy
from rollouts.training.losses import (
    PolicyLoss,
    cispo_loss,
    kl_loss,
    policy_gradient_loss,
    sequence_ratio_loss,
    sft_loss,
    truncated_ratio_loss,
    truncated_ratios,
)
from rollouts.training.mismatch import (
    Hypothesis,
    MismatchReport,
    check_mismatch,
    diagnose_mismatch,
    diagnosis_text,
    merge_reports,
    mismatch_report,
    plot_mismatch,
    replace_tokens,
    report_json,
    report_text,
)
from rollouts.training.model_inputs import model_inputs
from rollouts.training.packing.plan import PackingPlan, pack_samples
from rollouts.training.packing.truncation import Truncation, truncate_sample
from rollouts.training.quarantine import Quarantine, QuarantinedRow
from rollouts.training.samples import TrainingSample, sample_from_rendered, samples_from_trajectory
from rollouts.training.sequence_logprobs import SequenceLogprobs, sequence_logprobs
from rollouts.training.staleness import (
    Staleness,
    StalenessSplit,
    fresh_token_mask,
    sample_staleness,
    split_by_staleness,
    token_lags,
)

__all__ = [
    "DegenerateGroup",
    "Hypothesis",
    "MismatchReport",
    "PackingPlan",
    "PolicyLoss",
    "Quarantine",
    "QuarantinedRow",
    "SequenceLogprobs",
    "Staleness",
    "StalenessSplit",
    "TensorList",
    "TrainingBatch",
    "TrainingSample",
    "Truncation",
    "check_mismatch",
    "cispo_loss",
    "degenerate_groups",
    "diagnose_mismatch",
    "diagnosis_text",
    "fresh_token_mask",
    "group_advantages",
    "kl_loss",
    "merge_reports",
    "micro_batches",
    "mismatch_report",
    "model_inputs",
    "pack_samples",
    "plot_mismatch",
    "policy_gradient_loss",
    "replace_tokens",
    "report_json",
    "report_text",
    "sample_from_rendered",
    "sample_staleness",
    "samples_from_trajectory",
    "sequence_logprobs",
    "sequence_ratio_loss",
    "sft_loss",
    "split_by_staleness",
    "token_lags",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "truncate_sample",
    "truncated_ratio_loss",
    "truncated_ratios",
]
