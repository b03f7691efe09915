"""The mismatch: figures, likely causes, text, JSON and plots of the difference between sampler and trainer."""

from rollouts.training.mismatch.causes import Cause, LikelyCause
from rollouts.training.mismatch.compared import ComparedTokens
from rollouts.training.mismatch.diagnosis import Diagnosis, HypothesisResult, diagnose_mismatch, diagnosis_text
from rollouts.training.mismatch.hypotheses import Hypothesis, replace_tokens
from rollouts.training.mismatch.plot import plot_mismatch
from rollouts.training.mismatch.report import MismatchOutlier, MismatchReport, merge_reports, mismatch_report
from rollouts.training.mismatch.statistics import DifferenceStatistics, MismatchGroup
from rollouts.training.mismatch.text import report_json, report_text
from rollouts.training.mismatch.thresholds import MismatchWarning, check_mismatch

__all__ = [
    "Cause",
    "ComparedTokens",
    "Diagnosis",
    "DifferenceStatistics",
    "Hypothesis",
    "HypothesisResult",
    "LikelyCause",
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
