"""Curves on a terminal, drawn in braille characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from rich.text import Text

Array = np.ndarray[Any, Any]

# The bit of each dot in Unicode's braille patterns (from 0x2800): rows from the top, left and right.
DOTS = np.array([[[0x01, 0x08]], [[0x02, 0x10]], [[0x04, 0x20]], [[0x40, 0x80]]])


class Chart:
    """A chart of braille characters with two by four dots each, and axis labels."""

    def __init__(self, width: int, rows: int, steps: Array, span: Sequence[float], share: bool) -> None:
        from groupwise.plots import axis_range  # not above: it is not needed for the first text on the screen

        low, high = axis_range(min(span), max(span), share)
        unit = 10.0 ** (math.floor(math.log10(high - low)) - 1)
        self.low, self.high = math.floor(low / unit - 0.5) * unit, math.ceil(high / unit + 0.5) * unit
        if share and low >= 0 and high <= 1 and low < high:
            self.low, self.high = max(self.low, 0.0), min(self.high, 1.0)  # shares are between 0 and 1
        places = {0: self.high, rows // 2: (self.high + self.low) / 2, rows - 1: self.low}
        self.labels = {row: _axis_label(value, unit, share) for row, value in places.items()}
        self.margin = max(map(len, self.labels.values()))
        self.rows, self.columns = rows, max(4, width - self.margin - 2)
        self.first, self.last = int(steps.min()), max(int(steps.max()), int(steps.min()) + 1)
        self.layers: list[tuple[Array, str]] = []  # (rows, columns) of character codes, 0 if empty; and their style

    def dots(self, steps: Array, values: Array, style: str) -> None:
        seen, canvas = (values >= self.low) & (values <= self.high), self._canvas()
        canvas[self._down(values[seen]), self._across(steps[seen])] = True
        self._add(canvas, style)

    def line(self, steps: Array, values: Array, style: str) -> None:
        columns = np.arange(self._across(steps).max() + 1)
        at = self.first + columns / (2 * self.columns - 1) * (self.last - self.first)
        down = self._down(np.interp(at, steps, values))
        before = np.concatenate([down[:1], down[:-1]])
        self._bars(columns, np.minimum(down, before), np.maximum(down, before), style)

    def intervals(self, steps: Array, low: Array, high: Array, style: str) -> None:
        self._bars(self._across(steps), self._down(high), self._down(low), style)

    def _bars(self, columns: Array, tops: Array, bottoms: Array, style: str) -> None:
        canvas = self._canvas()
        for column, top, bottom in zip(columns, tops, bottoms, strict=True):
            canvas[top : bottom + 1, column] = True
        self._add(canvas, style)

    def level(self, value: float, style: str) -> None:
        canvas = self._canvas()
        canvas[self._down(np.array([value])), ::3] = True
        self._add(canvas, style)

    def marks(self, steps: Array, values: Array, style: str) -> None:
        codes = np.zeros((self.rows, self.columns), dtype=int)
        codes[self._down(values) // 4, self._across(steps) // 2] = ord("●")
        self.layers.append((codes, style))

    def text(self, head: Text) -> Text:
        """The chart below its heading. Where layers overlap, the last one is on top."""
        width = self.margin + 2 + self.columns
        head.truncate(width, overflow="ellipsis")
        codes = np.full((self.rows, self.columns), ord(" "))
        owners = np.zeros((self.rows, self.columns), dtype=int)
        for number, (layer, _) in enumerate(self.layers):
            codes, owners = np.where(layer, layer, codes), np.where(layer, number, owners)
        lines = [head]
        for row in range(self.rows):
            label = f"{self.labels.get(row, ''):>{self.margin}} {'┤' if row in self.labels else '│'}"
            line = Text.assemble((label, "dim"))
            cells = zip(codes[row].tolist(), owners[row].tolist(), strict=True)
            for owner, run in groupby(cells, key=lambda cell: cell[1]):
                line.append("".join(chr(code) for code, _ in run), self.layers[owner][1])
            lines.append(line)
        first, last = f" {self.first} ", f" {self.last}"
        rule = "─" * max(0, self.columns - len(first) - len(last))
        lines.append(Text(f"{'':>{self.margin}} └{first}{rule}{last}"[:width], style="dim"))
        return Text("\n", no_wrap=True).join(lines)

    def _canvas(self) -> Array:
        return np.zeros((4 * self.rows, 2 * self.columns), dtype=bool)

    def _add(self, canvas: Array, style: str) -> None:
        bits = (canvas.reshape(self.rows, 4, self.columns, 2) * DOTS).sum((1, 3))
        self.layers.append((np.where(bits, 0x2800 + bits, 0), style))

    def _across(self, steps: Array) -> Array:
        share = (steps - self.first) / (self.last - self.first)
        return np.rint(share * (2 * self.columns - 1)).astype(int)

    def _down(self, values: Array) -> Array:
        share = (self.high - np.clip(values, self.low, self.high)) / (self.high - self.low)
        return np.rint(share * (4 * self.rows - 1)).astype(int)


def empty_chart(head: Text, width: int, rows: int, text: str) -> Text:
    """A chart without data, with a message."""
    lines = "\n" * (rows // 2) + text.center(width) + "\n" * (rows - rows // 2)
    return Text("\n", no_wrap=True).join([head, Text(lines, style="dim")])


def _axis_label(value: float, unit: float, share: bool) -> str:
    if share:
        value, unit = 100 * value, 100 * unit
    text = f"{value:.{max(0, -round(math.log10(unit)))}f}"
    return f"{text if len(text) < 8 else format(value, '.1e')}{' %' if share else ''}"
