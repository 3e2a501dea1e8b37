"""Comparing finished runs: algorithms on environments over seeds, as CSV, Markdown and plots."""

from groupwise.control.comparison.curves import MeanCurve, mean_curve
from groupwise.control.comparison.runs import ComparedRun
from groupwise.control.comparison.write import write_comparison

__all__ = ["ComparedRun", "MeanCurve", "mean_curve", "write_comparison"]
