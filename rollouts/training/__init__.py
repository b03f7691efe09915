"""Trajectories become samples, batches and model inputs; losses and the mismatch are computed from these.

The package needs the extra `torch`.
"""

from renderers.errors import MissingExtraError
from rollouts.scoring import TokenScores, score, with_scores
from rollouts.teacher import check_teacher

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError("rollouts.training", "torch", "torch") from error

from rollouts.training.advantages import DegenerateGroup, degenerate_groups, group_advantages
from rollouts.training.batch import TrainingBatch, micro_batches
from rollouts.training.checkpoints import save_checkpoint
from rollouts.training.correction import rollout_correction
from rollouts.training.distillation import (
    distillation_advantages,
    forward_kl_loss,
    generalised_jsd_loss,
    reverse_kl_loss,
)
from rollouts.training.losses import (
    PolicyLoss,
    cispo_loss,
    dro_loss,
    importance_sampling_loss,
    kl_loss,
    policy_gradient_loss,
    sequence_ratio_loss,
    sft_loss,
)
from rollouts.training.masked_terms import Correction
from rollouts.training.media_tensors import concatenated_media
from rollouts.training.mismatch import (
    Hypothesis,
    MismatchReport,
    check_mismatch,
    diagnose_mismatch,
    diagnosis_text,
    merge_reports,
    mismatch_report,
    replace_tokens,
    report_text,
)
from rollouts.training.model_inputs import model_inputs
from rollouts.training.packing import PackingPlan, pack_samples
from rollouts.training.samples import TrainingSample, sample_from_rendered, with_teacher
from rollouts.training.sequence_logprobs import SequenceLogprobs, sequence_logprobs
from rollouts.training.staleness import (
    Staleness,
    StalenessSplit,
    sample_staleness,
    split_by_staleness,
    token_lags,
)
from rollouts.training.token_logprobs import candidate_logprobs, token_logprobs, token_logprobs_and_entropy
from rollouts.training.trajectory_samples import samples_from_trajectory
from rollouts.training.truncation import Truncation, truncate_sample

__all__ = [
    "Correction",
    "DegenerateGroup",
    "Hypothesis",
    "MismatchReport",
    "PackingPlan",
    "PolicyLoss",
    "SequenceLogprobs",
    "Staleness",
    "StalenessSplit",
    "TokenScores",
    "TrainingBatch",
    "TrainingSample",
    "Truncation",
    "candidate_logprobs",
    "check_mismatch",
    "check_teacher",
    "cispo_loss",
    "concatenated_media",
    "degenerate_groups",
    "diagnose_mismatch",
    "diagnosis_text",
    "distillation_advantages",
    "dro_loss",
    "forward_kl_loss",
    "generalised_jsd_loss",
    "group_advantages",
    "importance_sampling_loss",
    "kl_loss",
    "merge_reports",
    "micro_batches",
    "mismatch_report",
    "model_inputs",
    "pack_samples",
    "policy_gradient_loss",
    "replace_tokens",
    "report_text",
    "reverse_kl_loss",
    "rollout_correction",
    "sample_from_rendered",
    "sample_staleness",
    "samples_from_trajectory",
    "save_checkpoint",
    "score",
    "sequence_logprobs",
    "sequence_ratio_loss",
    "sft_loss",
    "split_by_staleness",
    "token_lags",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "truncate_sample",
    "with_scores",
    "with_teacher",
]
