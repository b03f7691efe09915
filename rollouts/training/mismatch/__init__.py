"""The mismatch: figures, tested causes, text, JSON and plots of the difference between sampler and trainer."""

from rollouts.training.mismatch.compared import ComparedTokens
from rollouts.training.mismatch.diagnosis import Diagnosis, HypothesisResult, diagnose_mismatch, diagnosis_text
from rollouts.training.mismatch.hypotheses import Cause, Hypothesis, replace_tokens
from rollouts.training.mismatch.plot import plot_mismatch
from rollouts.training.mismatch.report import (
    DifferenceStatistics,
    MismatchGroup,
    MismatchOutlier,
    MismatchReport,
    MismatchWarning,
    check_mismatch,
    merge_reports,
    mismatch_report,
)
from rollouts.training.mismatch.report_text import report_json, report_text

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
    "MismatchWarning",
    "check_mismatch",
    "diagnose_mismatch",
    "diagnosis_text",
    "merge_reports",
    "mismatch_report",
    "plot_mismatch",
    "replace_tokens",
    "report_json",
    "report_text",
]
