"""The panel: the numbers are there, every line fits the terminal, and odd metrics break nothing."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys
import threading
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from groupwise.training.display import LineDisplay, RunFacts, make_display
from groupwise.training.display.base import SampleCompletion
from groupwise.training.display.live import LiveDisplay
from tests.training.display.samples import DPO, FACTS, METRICS, OFFLINE, ManualClock, evaluation


@pytest.fixture
def clock():
    return ManualClock()


def run_of(display, clock, steps=120, every=20):
    rng = np.random.default_rng(0)
    for step in range(steps + 1):
        if step % every == 0:
            display.evaluation(step, evaluation(0.25 + 0.5 * step / 300))
        if step:
            clock.time += 0.9
            display.step(step, {**METRICS, "reward": 0.4123 if step == steps else step / 300 + rng.normal() / 20})


def picture(display, width, height=24, **options):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, **options)
    console.print(display)
    return console.file.getvalue()


def live(width=80, height=24, clock=None):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height)
    return LiveDisplay(console, clock or ManualClock())


@pytest.fixture
def panel(clock):
    with live(clock=clock) as display:
        display.start(FACTS)
        yield display


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 50), (74, 24), (73, 40), (40, 60), (200, 18)])
def test_the_panel_fits_and_holds_the_numbers(panel, clock, width, height):
    run_of(panel, clock)
    panel.stage("saving")
    panel.say("a warning that is very long " * 10)
    shown = picture(panel, width, height, color_system=None)
    *lines, last = shown.splitlines()
    assert last == ""
    assert {cell_len(line) for line in lines} == {width}
    assert len(lines) + 1 < height
    expected = ["quiz [bold]x[/]", "step 120/300", "reward  0.412 ±0.310", "entropy", "1.234", "0.0004", "1.2 %"]
    expected += ["12 %", "1,205.3", "7.1 %", "0.770", "1.0e-06", "1,830", "61.2 GiB", "saving", "step 120: a warning"]
    expected += ["1 min 48 s, about 2 min 42 s left", "45.0 %"]
    expected += ["run: 1 min 48 s"] if width >= 73 else []
    expected += ["accuracy, held out  45.0 % +20.0", " 120 │"] if width >= 74 else []
    expected += ["smollm2-135m (135 M) · dapo", "cpu · runs/quiz"] if width >= 73 else []
    for text in expected:
        assert text in shown, text


def test_the_curves_are_drawn(panel, clock):
    run_of(panel, clock)
    lines = picture(panel, 80, color_system=None).splitlines()
    chart = [line for line in lines if re.search("[│┤].*[│┤].*[│┤]", line)]
    assert len(chart) == 8
    assert sum(line.count("●") for line in chart) == 7  # evaluations
    left = [line[line.index("┤" if "┤" in line else "│", 2) : 38] for line in chart]
    right_half = [bool(re.search("[\u2801-\u28ff]", line[16:])) for line in left]
    assert right_half[:3] == [True] * 3  # it rises to the right
    assert not any(right_half[6:])
    assert "81 % ┤" in chart[0]  # the goal is in the picture
    assert "20 % ┤" in chart[-1]  # and so is the lowest interval


def test_colours_are_used_and_markup_is_not(panel, clock):
    run_of(panel, clock)
    for text in ("[red]not red[/]", "two", "three"):
        panel.say(text)
    above = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", panel.console.file.getvalue()).splitlines()
    assert "step 120: [red]not red[/]" in [line.strip() for line in above]
    panel.say("[red]nor this[/]")
    shown = picture(panel, 100)
    assert "\x1b[36m" in shown
    assert "[red]nor this[/]" in shown
    assert "[bold]x[/]" in shown


def test_without_a_metric_the_reward_has_the_full_width(clock):
    display = live(clock=clock)
    display.start(RunFacts("a", "b", 1, "cpu", "grpo", 5, None, "c"))
    for step in range(1, 5):
        display.step(step, {"reward": step})
    display.evaluation(4, {"accuracy": 0.5})
    shown = picture(display, 80, color_system=None)
    assert "held out" not in shown
    (axis,) = [line for line in shown.splitlines() if "└" in line]
    assert axis.count("─") > 60
    display.close()


def test_before_and_after_the_first_step(panel, clock):
    shown = picture(panel, 80, color_system=None)
    assert "waiting for the first step" in shown
    assert "waiting for the first evaluation" in shown
    assert "⠋ training" in shown or "training" in shown
    panel.step(1, METRICS)
    panel.evaluation(1, evaluation(0.5))
    assert "waiting" not in picture(panel, 80, color_system=None)


def test_numbers_that_were_not_measured_are_left_out(panel):
    panel.step(1, {"reward": 1.0, "entropy": 2.0})
    shown = picture(panel, 80, color_system=None)
    assert "entropy" in shown
    for label in ("KL", "clipped", "memory", "tokens/s", "learning rate"):
        assert label not in shown


@pytest.mark.parametrize(("width", "height"), [(80, 24), (74, 24), (140, 50), (50, 40)])
def test_a_run_on_pairs_alone_shows_their_margin_instead_of_a_reward(clock, width, height):
    display = live(width, height, clock=clock)
    display.start(DPO)
    assert "reward" not in picture(display, width, height, color_system=None)
    for step in range(1, 31):
        clock.time += 1
        display.step(step, {**OFFLINE, "preference/margin": OFFLINE["preference/margin"] * step / 30})
        if step % 10 == 0:
            display.evaluation(step, {"preference_accuracy": step / 40})
    shown = picture(display, width, height, color_system=None)
    *lines, last = shown.splitlines()
    assert last == ""
    assert {cell_len(line) for line in lines} == {width}
    assert len(lines) + 1 < height
    for text in ("margin of pairs  0.523", "└ 1 ─", "pairs", "16", "preferred", "71 %", "6.200", "1.0e-06", "75.0 %"):
        assert text in shown, text
    assert re.search("[\u2801-\u28ff]", shown)  # a curve
    for text in ("reward", "tokens/s", "waiting", "grad cosine"):
        assert text not in shown, text
    if width >= 74:
        assert "preferred, held out  75.0 % +50.0" in shown
    else:
        assert re.search("held out +pairs +preferred", shown)
    display.close()


def test_a_run_with_rewards_and_pairs_has_numbers_for_both(panel, clock):
    """The gradients' cosine is measured in some steps only: its last value stays, also in a resumed run."""
    pairs = {name: value for name, value in OFFLINE.items() if name.startswith("preference/")}
    run_of(panel, clock, steps=4)
    panel.step(5, {**METRICS, **pairs, "grad_cosine/grpo_preference": -0.251})
    panel.step(6, {**METRICS, **pairs})
    shown = picture(panel, 80, color_system=None)
    assert "reward  0.412 ±0.310" in shown
    assert "margin of pairs" not in shown
    assert re.search(r"pairs +margin .*\n.* 16 +0\.523 ", shown)
    assert re.search(r"preferred +grad cosine .*\n.* 71 % +-0\.25 ", shown)
    assert "1,830" in shown
    resumed = live(clock=clock)
    resumed.start(FACTS, first_step=5, past=[{"step": 5, "reward": 0.1, "grad_cosine/grpo_preference": 0.5}])
    resumed.step(6, METRICS)
    assert "+0.50" in picture(resumed, 80, color_system=None)
    resumed.close()


def test_a_resumed_run_shows_its_past(clock):
    past = [{"step": 0, "eval/accuracy": 0.25}, *({"step": step, "reward": 0.1} for step in range(1, 41))]
    display = live(clock=clock)
    display.start(FACTS, first_step=40, past=past)
    clock.time += 2
    display.step(41, {"reward": 0.5})
    display.evaluation(41, {"accuracy": 0.5})
    shown = picture(display, 80, color_system=None)
    assert "50.0 % +25.0" in shown
    assert "└ 1 ──" in shown
    assert "step  41/300" in shown
    assert display.seconds_left() == pytest.approx(2 * 259)
    display.close()


def test_a_smoothed_curve_starts_as_a_plain_mean(panel):
    for step, reward in enumerate((1.0, 2.0, 6.0), start=1):
        panel.step(step, {"reward": reward})
    assert [smooth for _, _, smooth in panel._rewards] == pytest.approx([1.0, 1.5, 3.0])
    for step in range(4, 12):
        panel.step(step, {"reward": 3.0})
    panel.step(12, {"reward": 13.0})
    assert panel._rewards[-1][2] == pytest.approx(4.0)  # later the newest value has a weight of 0.1


def test_a_long_run_keeps_a_bounded_curve(panel):
    for step in range(1, 6001):
        panel.step(step, {"reward": step})
    assert 2000 <= len(panel._rewards) <= 4001
    assert panel._rewards[0][0] == 1
    assert picture(panel, 80, color_system=None).count(" 6000 ") == 1


odd = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(10**400), 10**400),
    st.none(),
    st.text(max_size=3),
    st.booleans(),
    st.just(torch.ones(2)),
    st.sampled_from([0.0, 1e-320, -1e-320, 1e30, -1e30, 1e300, 5.0, 5.0 + 1e-12]),
)
odd_names = [*METRICS, *OFFLINE, "grad_cosine/grpo_preference", "accuracy", "accuracy_low", "accuracy_high"]
odd_metrics = st.dictionaries(st.sampled_from([*odd_names, "preference_accuracy"]), odd)


@given(st.lists(odd_metrics, max_size=6), st.integers(20, 150), st.integers(1, 40), odd, st.sampled_from([0, 3, 300]))
def test_odd_metrics_break_nothing(rows, width, height, goal, steps):
    goal = float(goal) if isinstance(goal, float) else None
    facts = RunFacts("a\nb", "m", 0, "", "", steps, "accuracy", "", goal)
    clock = ManualClock()
    for display in (live(width, height, clock), LineDisplay(io.StringIO(), clock)):
        with display:
            display.start(facts)
            for step, row in enumerate(rows):
                display.evaluation(step, row)
                clock.time += 1
                display.step(step, row)
                if isinstance(display, LiveDisplay):
                    shown = picture(display, width, height, color_system=None)
                    assert all(cell_len(line) <= width for line in shown.splitlines())
            display.say("")
            display.finish([])


def test_huge_numbers_are_shown_but_not_drawn(panel):
    for step, value in enumerate((0.25, 1.7e308, -1.7e308, math.inf, 0.75), start=1):
        panel.step(step, {"reward": value, "grad_norm": 1.7e308})
        panel.evaluation(step, {"accuracy": value})
    shown = picture(panel, 80, color_system=None)
    assert "1.7e+308" in shown
    assert "accuracy, held out  75.0 % +50.0" in shown
    assert [step for step, _, _ in panel._rewards] == [1, 5]


# --- what is happening ---


SAMPLES = [
    SampleCompletion("Which drug treats a cough?\nAnswer: ", "B\x1b[31m because\nit does", 1.0),
    SampleCompletion("a prompt that is much too long for its part of a line " * 4, "日本語 " * 60, -0.25),
]


@pytest.mark.parametrize(
    ("width", "height", "seen"), [(120, 40, True), (80, 24, True), (40, 60, True), (80, 22, False)]
)
def test_completions_are_shown_if_there_is_room(panel, clock, width, height, seen):
    run_of(panel, clock, steps=20)
    panel.samples(SAMPLES)
    panel.step(21, METRICS)
    *lines, _ = picture(panel, width, height, color_system=None).splitlines()
    assert {cell_len(line) for line in lines} == {width}
    assert len(lines) + 1 < height
    shown = "\n".join(lines)
    assert ("completions  step 21" in shown) == seen
    assert ("treats a cough? Answer: → B\\x1b[31m because it does" in shown) == (seen and width > 40)
    assert ("-0.250  …" in shown) == seen
    panel.samples([])
    assert "completions " not in picture(panel, width, height, color_system=None)


def test_an_activity_with_a_count_has_a_bar_and_its_times(panel, clock):
    panel.progress("evaluating", 128, 512, "rows")
    assert "evaluating · 128 of 512 rows" in picture(panel, 80, color_system=None)
    clock.time += 12
    panel.progress("evaluating", 256, 512, "rows")
    for width in (80, 50):
        shown = picture(panel, width, color_system=None)
        assert "256 of 512 rows · stage: 12 s" in shown
        assert bool(re.search("evaluating ━+.* stage: 12 s, about 12 s left", shown)) == (width == 80)
    panel.stage("saving")
    assert re.search("saving +│", picture(panel, 80, color_system=None))  # its time starts anew
    panel.step(1, METRICS)
    assert "training" in picture(panel, 80, color_system=None)


def test_before_the_start_there_is_only_the_activity(clock):
    display = live(clock=clock)
    display.stage("loading PyTorch")
    clock.time += 3
    assert picture(display, 80, color_system=None).split("\n")[1:] == ["", ""]
    assert "loading PyTorch · stage: 3 s" in picture(display, 80, color_system=None)
    display.progress("SFT", 15, 60, "supervised steps")
    clock.time += 10
    shown = picture(display, 80, color_system=None)
    assert re.search("SFT ━+.* 15 of 60 supervised steps · stage: 10 s, about 30 s left", shown)
    display.close()
    assert picture(display, 80, color_system=None) == ""


def test_a_signal_is_shown_in_the_panel_and_not_printed(panel, clock):
    run_of(panel, clock, steps=4)
    before = panel.console.file.getvalue()
    panel.interrupted("SIGINT: finishing this step")
    assert panel.console.file.getvalue() == before  # a signal handler must not draw
    assert "SIGINT: finishing this step" in picture(panel, 80, color_system=None)
    panel.close()
    assert "SIGINT" not in picture(panel, 80, color_system=None)


def test_notices_are_in_the_panel_and_then_above_it(panel, clock):
    """Each is on the screen once at any time, and printed once."""

    def printed():
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", panel.console.file.getvalue()).splitlines()

    def above(text):
        return sum(line.startswith(text) for line in printed())

    run_of(panel, clock, steps=4)
    panel.begin_step(5)
    panel.say("a notice")
    panel.say("step 4: another one")
    panel.stage("saving")
    shown = picture(panel, 80, color_system=None)
    assert shown.count("│ step 5: a notice") == 1
    assert shown.count("│ step 4: another one") == 1
    assert above("step 5: a notice") == 0
    panel.say("a third one, with many words " * 20)
    shown = picture(panel, 80, color_system=None)
    assert "a notice" not in shown
    assert len(re.findall("with many", shown)) >= 3  # two lines of it
    assert (above("step 5: a notice"), above("step 4: another one")) == (1, 0)
    panel.close()
    last = picture(panel, 80, color_system=None)
    for text in ("notice", "another one", "third", "saving", " left"):
        assert text not in last
    assert last.endswith("╯\n")
    texts = ("step 5: a notice", "step 4: another one", "step 5: a third one")
    assert [above(text) for text in texts] == [1, 1, 1]
    panel.say("at the end")
    assert above("step 5: at the end") == 1


def test_notices_before_the_start_are_kept_in_the_panel(clock):
    display = live(clock=clock)
    display.say("before anything")  # nothing is drawn yet
    assert "before anything" in display.console.file.getvalue()
    display.stage("loading")
    display.say("resuming after step 2")
    assert "\nresuming after step 2" in picture(display, 80, color_system=None)
    display.start(FACTS, first_step=2)
    shown = picture(display, 80, color_system=None)
    assert shown.count("│ resuming after step 2") == 1
    assert "before anything" not in shown
    display.close()


def test_the_step_that_runs_is_shown(panel):
    def head():
        return picture(panel, 80, color_system=None).splitlines()[1][2:].partition("━")[0].partition("  run")[0].strip()

    heads = [head()]
    for step in (1, 2):
        panel.begin_step(step)
        heads.append(head())
        panel.step(step, METRICS)
        heads.append(head())
    assert heads == ["before training", *["step   1/300"] * 2, *["step   2/300"] * 2]


def test_the_last_evaluation_has_a_time(panel, clock):
    run_of(panel, clock, steps=20)
    clock.time += 40
    panel.evaluation(20, evaluation(0.5))
    panel.step(300, METRICS)
    assert re.search("step 300/300 ━+ run: .*, about .* left", picture(panel, 80, color_system=None))
    panel.evaluation(300, evaluation(0.5))
    assert " left" not in picture(panel, 80, color_system=None)


@pytest.mark.parametrize(("width", "tokens", "bar"), [(120, True, True), (70, False, True), (44, False, False)])
def test_a_bar_leaves_out_the_tokens_if_there_is_no_room(panel, clock, width, tokens, bar):
    panel.progress("evaluating", 2.5, 8, "rows", detail="123,456 tokens")
    clock.time += 12
    panel.progress("evaluating", 4.5, 8, "rows", detail="234,567 tokens")
    (line,) = [line for line in picture(panel, width, color_system=None).splitlines() if "evaluating" in line]
    assert cell_len(line) == width
    assert "56 % of 8 rows" in line
    assert ("234,567 tokens" in line) == tokens
    assert ("━━━" in line) == bar
    assert "stage: 12 s" in line or not bar


@pytest.mark.parametrize("measured", [True, False])
def test_a_run_that_ends_before_its_first_step_leaves_no_panel(clock, measured):
    display = live(clock=clock)
    display.start(FACTS)
    if measured:
        display.evaluation(0, evaluation(0.5))
    display.close()
    erased = re.search(r"(\x1b\[1A\x1b\[2K)+\s*$", display.console.file.getvalue().replace("\x1b[?25h", ""))
    assert bool(erased) == (not measured)


def test_a_terminal_of_another_size_is_drawn_anew(panel):
    panel.stage("sampling")
    panel._live.refresh()
    assert "\x1b[2J" not in panel.console.file.getvalue()
    panel.console.width = 60
    panel._live.refresh()
    cleared = panel.console.file.getvalue().split("\x1b[2J\x1b[H")
    assert len(cleared) == 2
    assert "╭" in cleared[1]
    panel._live.refresh()
    assert panel.console.file.getvalue().count("\x1b[2J") == 1


def test_a_constant_metric_has_a_readable_axis(panel):
    for step in range(1, 30):
        panel.step(step, {"reward": 0.25 + 1e-17 * step})
        panel.evaluation(step, {"accuracy": 0.0})
    shown = picture(panel, 80, color_system=None)
    assert "0.31 ┤" in shown
    assert re.search("0.25 ┤[\u2801-\u28ff]", shown)
    assert "0.19 ┤" in shown
    assert "100 % ┤" not in shown  # the goal is at 80 %
    assert "0 % ┤" in shown


# --- on a terminal ---


def test_a_pipe_gets_lines(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(make_display(io.StringIO()), LineDisplay)
    assert isinstance(make_display(), LineDisplay)


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ({"TERM": "xterm-256color"}, "LiveDisplay"),
        ({"TERM": "dumb"}, "LineDisplay"),
        pytest.param({"TERM": "xterm", "PYTHONIOENCODING": "ascii"}, "LineDisplay", marks=pytest.mark.slow),
    ],
)
def test_the_display_of_a_terminal(environment, kind):
    shown = on_a_terminal(
        "from groupwise.training.display import make_display; print(type(make_display()))", environment
    )
    assert kind in shown


RUN = """
import sys
from groupwise.training.display import *
with make_display() as display:
    display.stage("SFT 3 of 5")
    display.start(RunFacts("quiz", "tiny", 4000, "cpu", "dapo", 40, "accuracy", "runs/quiz"))
    for step in range(1, 41):
        display.step(step, {"reward": step / 40})
        if step == 20:
            print("a reward printed [this]")
            print("and that on stderr", file=sys.stderr)
            display.say("a notice")
    display.evaluation(40, {"accuracy": 0.5})
    display.finish([("accuracy", "50 %"), "done"])
display.stage("after the end")
print(type(sys.stdout).__name__)
"""


def on_a_terminal(code, environment=()):
    """What a program writes to a terminal of 80 columns."""
    master, slave = pty.openpty()
    size = {"COLUMNS": "80", "LINES": "24", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, **size, "TERM": "xterm-256color", **dict(environment)},
    )
    os.close(slave)
    shown = b""
    with suppress(OSError):  # raised when the other end is closed
        while chunk := os.read(master, 65536):
            shown += chunk
    os.close(master)
    assert process.wait() == 0, shown.decode()
    return shown.decode()


def test_a_run_on_a_terminal():
    shown = on_a_terminal(RUN)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "SFT 3 of 5" in plain.split("╭")[0]  # before the start
    assert plain.count("a reward printed [this]") == 1
    assert plain.count("and that on stderr") == 1
    assert "step 20: a notice" in plain
    assert "step 40/40" in plain
    assert "after the end" not in plain
    end = plain[plain.rindex("╰") :].splitlines()[1:]
    assert [line for line in end if line] == ["accuracy  50 %", "done", "TextIOWrapper"]
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is restored


@pytest.mark.slow
def test_the_cursor_is_restored_without_close():
    code = RUN.split("    for step")[0].replace("with make_display() as display:", "display = make_display()\nif True:")
    shown = on_a_terminal(code)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_redrawing_and_training_do_not_deadlock(monkeypatch, clock):
    monkeypatch.setattr("groupwise.training.display.live.REFRESHES", 500)
    display = live(clock=clock)
    display.start(FACTS)

    def train():
        for step in range(1, 200):
            display.step(step, METRICS)
            display.stage(f"part {step}")
            if step % 50 == 0:
                display.evaluation(step, evaluation(0.5))
                display.say("a notice")

    worker = threading.Thread(target=train, daemon=True)
    worker.start()
    worker.join(300)
    assert not worker.is_alive()
    display.close()
    assert "step 199/300" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", display.console.file.getvalue())


def test_a_terminal_that_goes_away_does_not_stop_a_run(clock):
    display = live(clock=clock)
    display.console.file.close()
    display.stage("SFT")
    display.start(FACTS)
    display.step(1, METRICS)
    display.say("a notice")
    display.finish(["done"])
