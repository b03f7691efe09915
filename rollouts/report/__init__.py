"""The report of a run, one HTML file with curves, mismatch, throughput, errors, episodes; the comparison of several."""

from rollouts.report.comparison_page import write_comparison
from rollouts.report.write import WrittenReport, write_report

__all__ = ["WrittenReport", "write_comparison", "write_report"]
