"""A report is one HTML file with the curves, mismatch, throughput, errors and episodes of a run."""

from rollouts.report.write import WrittenReport, write_report

__all__ = ["WrittenReport", "write_report"]
