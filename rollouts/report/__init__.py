"""The report of a run, one HTML file with curves, mismatch, throughput, errors and episodes."""

from rollouts.report.write import WrittenReport, write_report

__all__ = ["WrittenReport", "write_report"]
