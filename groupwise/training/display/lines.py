"""Plain lines, for log files and pipes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from groupwise.terminal import write_text
from groupwise.text import fixed, one_line, plural
from groupwise.training.display.base import (
    MARGIN,
    REWARD,
    Clock,
    Display,
    RunFacts,
    as_numbers,
    format_count,
    format_times,
    shorten_start,
)
from groupwise.training.preference import PREFERENCE_ACCURACY

LINE_SECONDS = 1.0  # between the lines of quick steps
STAGE_SECONDS = 20.0  # without a line before the current activity is written
PROMPT_WIDTH, COMPLETION_WIDTH = 48, 72  # characters of a sample

COLUMNS: dict[str, Callable[[float], str]] = {
    "frac_reward_zero_std": lambda value: f"equal groups {100 * value:3.0f} %",
    "similarity_groups/avg_groups_per_prompt": lambda value: f"clusters {value:4.1f}",
    "diversity/mean_distance": lambda value: f"distance {value:.2f}",
    "completions/mean_length": lambda value: f"length {value:6.1f}",
    "preference/pairs": lambda value: f"pairs {value:3,.0f}",
    "distillation/kl": lambda value: f"KL to the teacher {fixed(value, '6.3f')}",
    MARGIN: lambda value: f"margin {fixed(value, '6.3f')}",
    "preference/accuracy": lambda value: f"preferred {100 * value:3.0f} %",
    "tokens_per_second": lambda value: f"{value:7,.0f} tokens/s",
    "step_time": lambda value: f"{value:5.1f} s/step",
}


class LineDisplay(Display):
    """A line per step, at most about one per second; always for evaluations and the last step.

    With ``log_every`` > 1 a line every so many steps, and also in between if these are slow. What the run is doing is
    written before the first step, in slow steps, and whenever there was no line for a while.
    """

    def __init__(self, stream: TextIO | None = None, clock: Clock = time.monotonic, *, activities: bool = True) -> None:
        super().__init__(clock)
        self._activities = activities
        self._stream = sys.stdout if stream is None else stream
        self._written = self._step_written = -math.inf
        self._pending = False

    def start(self, facts: RunFacts, first_step: int = 0, past: Iterable[Mapping[str, Any]] = ()) -> None:
        super().start(facts, first_step, past)
        model = f"{facts.model} ({format_count(facts.parameters)} weights) on {facts.device}"
        self._print(" · ".join([facts.name, model, facts.algorithm, plural(facts.steps, "step"), facts.folder]))

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        super().step(step, metrics)
        self._pending = True
        waited, every = self._clock() - self._step_written, self.facts.log_every
        due = waited >= (LINE_SECONDS if every == 1 else STAGE_SECONDS) or (every > 1 and step % every == 0)
        if due or step >= self.facts.steps:
            self._write_step()

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        count = len(self._evaluations)
        super().evaluation(step, metrics)
        if len(self._evaluations) > count:
            text = self._format_evaluation(as_numbers(metrics).get(PREFERENCE_ACCURACY))
        else:
            numbers = [f"{name} {value:.4g}" for name, value in as_numbers(metrics).items()]
            text = ", ".join(numbers[:6]) or "nothing measured"
        self._print(f"{self._position(step)} · held out: {text}")
        for sample in self._samples:
            prompt = shorten_start(one_line(sample.prompt), PROMPT_WIDTH)
            completion = one_line(sample.completion)
            if len(completion) > COMPLETION_WIDTH:
                completion = completion[: COMPLETION_WIDTH - 1] + "…"
            self._print(f"  sample · reward {fixed(sample.reward, '6.3f')} · {prompt} → {completion or '(empty)'}")

    def stage(self, text: str) -> None:
        self._show_activity(self._begin(text))

    def progress(
        self, text: str, done: float, total: int, unit: str = "", *, estimated: bool = True, detail: str = ""
    ) -> None:
        self._show_activity(self._begin(text, done, total, unit, estimated, detail))

    def say(self, text: str) -> None:
        self._print(text)

    def announce(self, text: str) -> None:
        if not self._activities:
            self._print(text)

    def close(self) -> None:
        if self._pending:
            self._write_step()

    def _format_evaluation(self, preferred: float | None) -> str:
        """The last evaluation, and the accuracy on held-out pairs unless that is its metric."""
        last, change = self._evaluations[-1], self._change()
        text = f"{self.facts.metric} {self._format_metric(last.value)}"
        if last.low is not None and last.high is not None:
            text += f" ({self._format_metric(last.low)} to {self._format_metric(last.high)})"
        if change is not None:
            points = " points" if self._in_percent() else ""
            text += f", {self._format_metric(change, signed=True)}{points} since the first"
        if preferred is not None and self.facts.metric != PREFERENCE_ACCURACY:
            text += f"; preferred {100 * preferred:.1f} %"
        return text

    def _show_activity(self, is_new: bool) -> None:
        if not self._activity.text or not self._activities:
            return
        waited, pace = self._clock() - self._written, self._seconds_per_step()
        slow = pace is None or pace >= STAGE_SECONDS
        if waited >= STAGE_SECONDS or (is_new and slow and waited >= LINE_SECONDS):
            text = self._activity.describe(self._clock())
            self._print(f"{self._position(self._current)} · {text}" if self.facts.steps else text)

    def _write_step(self) -> None:
        self._pending, self._step_written = False, self._clock()
        values, cells = self._metrics, [self._position(self._step)]
        spread = f" ±{fixed(values['reward_std'], '.2f')}" if "reward_std" in values else ""
        if "reward" in values:
            cells.append(f"reward {fixed(values['reward'], '6.3f')}{spread}")
        if self._evaluations:
            last = self._evaluations[-1]
            name = "held out" if self.facts.metric == REWARD else f"held-out {self.facts.metric}"
            at = f"step {last.step}" if last.step else "before training"
            cells.append(f"{name} {self._format_metric(last.value):>6} ({at})")
        cells += [form(values[name]) for name, form in COLUMNS.items() if name in values]
        left = self.seconds_left() if self._step < self.facts.steps else None
        cells.append(format_times("run", self._clock() - self._began, left))
        self._print(" · ".join(cells))

    def _print(self, text: str) -> None:
        self._written = self._clock()
        try:
            write_text(text.replace("\n", " ") + "\n", self._stream)
        except BrokenPipeError:
            self.on_broken_pipe()
        except (OSError, ValueError):  # a terminal that is gone, or a closed file, must not stop training
            pass
