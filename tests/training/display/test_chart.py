"""Charts of braille characters."""

from __future__ import annotations

import numpy as np
import pytest

from groupwise.training.display.chart import Chart


def test_a_chart_of_known_points():
    from rich.text import Text

    chart = Chart(10, 2, np.array([0, 7]), [0.0, 7.0], share=False)
    assert (chart.low, chart.high) == pytest.approx((-0.1, 7.1))
    chart.low, chart.high = 0.0, 7.0  # eight dots across and eight down: a step and a unit each
    chart.line(np.array([0, 7]), np.array([0.0, 7.0]), "cyan")
    chart.marks(np.array([7]), np.array([0.0]), "bold")
    lines = chart.text(Text("head")).plain.splitlines()
    assert lines == ["head", " 7.1 ┤  ⣠⠞", "-0.1 ┤⣠⠞⠁●", "     └ 0  "]


def test_a_jump_in_a_chart_is_joined():
    from rich.text import Text

    chart = Chart(10, 2, np.array([0, 7]), [0.0, 7.0], share=False)
    chart.low, chart.high = 0.0, 7.0
    chart.level(3.0, "yellow")
    chart.intervals(np.array([4]), np.array([1.0]), np.array([2.0]), "dim")
    chart.line(np.array([0, 1, 7]), np.array([0.0, 7.0, 7.0]), "cyan")
    drawn = chart.text(Text())
    assert drawn.plain.splitlines()[1:3] == [" 7.1 ┤⢸⠉⠉⠉", "-0.1 ┤⣸⠈⠆⠁"]
    styles = {drawn.plain[span.start : span.end]: span.style for span in drawn.spans}
    assert (styles["⠈"], styles["⠆"], styles["⣸"]) == ("yellow", "dim", "cyan")  # the last layer is on top
