"""Finished training runs side by side: algorithms on environments over seeds, as CSV, Markdown and pictures."""

from groupwise.comparison.curves import MeanCurve, mean_curve
from groupwise.comparison.runs import Run
from groupwise.comparison.write import write_comparison

__all__ = ["MeanCurve", "Run", "mean_curve", "write_comparison"]
