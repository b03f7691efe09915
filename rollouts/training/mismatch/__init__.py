"""The mismatch: figures, likely causes, text, JSON and plots of the difference between sampler and trainer."""

from rollouts.training.mismatch.causes import Cause, LikelyCause
from rollouts.training.mismatch.compared import ComparedTokens
from rollouts.training.mismatch.plot import plot_mismatch
from rollouts.training.mismatch.report import MismatchOutlier, MismatchReport, merge_reports, mismatch_report
from rollouts.training.mismatch.statistics import DifferenceStatistics, MismatchGroup
from rollouts.training.mismatch.text import report_json, report_text
from rollouts.training.mismatch.thresholds import MismatchWarning, check_mismatch

__all__ = [
    "Cause",
    "ComparedTokens",
    "DifferenceStatistics",
    "LikelyCause",
    "MismatchGroup",
    "MismatchOutlier",
    "MismatchReport",
    "MismatchWarning",
    "check_mismatch",
    "merge_reports",
    "mismatch_report",
    "plot_mismatch",
    "report_json",
    "report_text",
]
