"""Finished training runs side by side: algorithms on environments over seeds, as CSV, Markdown and pictures."""

from groupwise.control.comparison.curves import MeanCurve, mean_curve
from groupwise.control.comparison.runs import Run
from groupwise.control.comparison.write import write_comparison

__all__ = ["MeanCurve", "Run", "mean_curve", "write_comparison"]
