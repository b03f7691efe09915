"""The mismatch of sampler and trainer has figures, tested causes and a text."""

from rollouts.compared_tokens import ComparedTokens
from rollouts.training.mismatch.diagnosis import Diagnosis, HypothesisResult, diagnose_mismatch, diagnosis_text
from rollouts.training.mismatch.hypotheses import Cause, Hypothesis, replace_tokens
from rollouts.training.mismatch.report import (
    DifferenceStatistics,
    MismatchGroup,
    MismatchOutlier,
    MismatchReport,
    check_mismatch,
    merge_reports,
    mismatch_report,
)
from rollouts.training.mismatch.report_text import report_text

__all__ = [
    "Cause",
    "ComparedTokens",
    "Diagnosis",
    "DifferenceStatistics",
    "Hypothesis",
    "HypothesisResult",
    "MismatchGroup",
    "MismatchOutlier",
    "MismatchReport",
    "check_mismatch",
    "diagnose_mismatch",
    "diagnosis_text",
    "merge_reports",
    "mismatch_report",
    "replace_tokens",
    "report_text",
]
