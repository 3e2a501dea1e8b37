"""The page in a real browser, on real runs: runs, curves, compare, settings, time, live updates, themes, safety."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.viewer.conftest import QUIZ, environment, groupwise, until

pytestmark = pytest.mark.slow

SCRIPT = "<script>window.hacked = 1<script>"
DRAWN = "article.curve .chart[data-drawn]"
# The options of the first chart of a metric, as ECharts has them; null until it is drawn.
OPTIONS = """metric => {
  const element = document.querySelector(`article[data-metric="${metric}"] .chart[data-drawn]`);
  if (!element) return null;
  const chart = echarts.getInstanceByDom(element);
  const {series, xAxis} = chart.getOption();
  return {max: chart.getModel().getComponent("xAxis").axis.scale.getExtent()[1],
    series: series.map(one => ({data: one.data, opacity: one.lineStyle.opacity ?? 1,
      marks: ((one.markLine || {}).data || []).length, areas: ((one.markArea || {}).data || []).length}))};
}"""


def options(page: Any, metric: str) -> Any:
    until(page, f"({OPTIONS})('{metric}')")
    return page.evaluate(OPTIONS, metric)


@pytest.fixture(scope="module")
def runs(quiz_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs, of which one has another setting, a name with markup, phases, and cut-off completions."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(quiz_run, folder / "quiz")
    other = folder / SCRIPT
    shutil.copytree(quiz_run, other)
    recipe = json.loads((other / "recipe.json").read_text())
    recipe["loss"]["kl_coef"] = 0.7
    recipe["task"] = "<img src=x onerror='window.hacked = 2'>"
    recipe["phases"] = [{"name": "<b>hot</b>", "steps": 4, "temperature": 1.2}, {"name": "late", "temperature": 0.9}]
    (other / "recipe.json").write_text(json.dumps(recipe))
    lines = (other / "metrics.jsonl").read_text().splitlines()
    cut = [json.loads(line) for line in lines]
    cut = [{**row, "completions/clipped_ratio": 1.0} if "reward" in row else row for row in cut]
    (other / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in cut))
    return folder


@pytest.fixture(scope="module")
def address(runs: Path, view: Any) -> str:
    return view(runs)


@pytest.fixture(autouse=True)
def _nothing_from_outside(page: Any) -> Iterator[None]:
    yield
    assert {urlsplit(url).hostname for url in page.requested} <= {"127.0.0.1"}
    assert page.evaluate("window.hacked") is None


def other_id(page: Any, address: str) -> str:
    listed = page.request.get(f"{address}api/runs").json()["runs"]
    return next(run["id"] for run in listed if run["name"] == SCRIPT)


def test_the_list_shows_runs_and_compares_the_chosen_ones(page, address):
    page.goto(address)
    page.wait_for_selector("tbody tr")
    assert page.locator("tbody tr").count() == 2
    text = page.locator("tbody").inner_text()
    assert SCRIPT in text  # as text
    assert "<img src=x" in text
    assert "finished" in text
    assert "12 / 12" in text
    compare = page.get_by_role("button", name=re.compile("Compare"))
    assert compare.is_disabled()
    for box in page.locator("tbody input").all():
        box.check()
    compare.click()
    page.wait_for_selector(DRAWN)
    settings = page.locator("section[data-table=settings] tbody tr")
    names = settings.locator("td:first-child").all_inner_texts()
    assert {"loss.kl_coef", "task", "phases"} == set(names)
    row = settings.filter(has_text="loss.kl_coef").inner_text()
    assert "0.3" in row
    assert "0.7" in row
    page.get_by_label("Only differences").uncheck()
    assert settings.count() > 100
    assert page.locator("tr.differs").count() == 3
    data = options(page, "reward")["series"]
    assert len([one for one in data if one["opacity"] == 1]) == 2  # a line for each run


def test_curves_appear_and_are_smoothed(page, address):
    page.goto(f"{address}#/run/quiz/curves")
    page.wait_for_selector(DRAWN)
    assert page.locator("nav a[aria-current]").inner_text() == "Curves"
    assert page.locator("section.curves h2").first.inner_text() == "Main"
    pixels = """() => {
      const canvas = document.querySelector("article.curve canvas");
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      const colors = new Set();
      for (let place = 0; place < data.length; place += 4) colors.add(data.slice(place, place + 4).join());
      return colors.size;
    }"""
    assert page.evaluate(pixels) > 10  # something is drawn
    recorded = page.request.get(f"{address}api/run/quiz/metrics?names=reward").json()["columns"]["reward"]["values"]
    slider = page.locator("#smoothing")
    slider.fill("0")
    until(page, f"({OPTIONS})('reward')?.series.length === 1")
    (line,) = options(page, "reward")["series"]
    assert [point[1] for point in line["data"]] == pytest.approx(recorded)
    slider.fill("0.9")
    until(page, f"({OPTIONS})('reward')?.series.length === 2")
    raw, smooth = options(page, "reward")["series"]
    assert raw["opacity"] < 1
    assert [point[1] for point in raw["data"]] == pytest.approx(recorded)
    means, total, weight = [], 0.0, 0.0
    for value in recorded:  # the exponential moving average, divided by the sum of its weights
        total, weight = 0.9 * total + 0.1 * value, 0.9 * weight + 0.1
        means.append(total / weight)
    assert [point[1] for point in smooth["data"]] == pytest.approx(means)
    assert "smooth=0.9" in page.url


def test_the_axis_is_steps_tokens_or_time(page, address):
    column = page.request.get(f"{address}api/run/quiz/metrics?names=reward").json()["columns"]["reward"]
    page.goto(f"{address}#/run/quiz/curves")
    page.wait_for_selector(DRAWN)
    for button, name in (("tokens", "tokens"), ("time", "seconds"), ("step", "steps")):
        page.get_by_role("button", name=button, exact=True).click()
        wanted = column[name][-1]
        until(page, f"({OPTIONS})('reward')?.series.at(-1).data.at(-1)[0] === {wanted}")
        assert options(page, "reward")["max"] == wanted
    page.goto(f"{address}#/run/quiz/curves?x=tokens")  # a link has the state
    page.reload()
    page.wait_for_selector(DRAWN)
    assert options(page, "reward")["max"] == column["tokens"][-1]


def test_metrics_are_searched_and_described(page, address):
    page.goto(f"{address}#/run/quiz/curves")
    page.wait_for_selector(DRAWN)
    page.get_by_label("Search metrics").fill("entropy")
    shown = page.locator("article.curve:visible")
    assert set(shown.locator(".metric").all_inner_texts()) == {"entropy"}
    shown.first.locator(".metric").click()
    assert "entropy of the policy" in shown.first.inner_text()


def test_charts_out_of_sight_are_not_drawn_or_read(page, address):
    page.goto(f"{address}#/run/quiz/curves")
    page.wait_for_selector(DRAWN)
    page.wait_for_load_state("networkidle")
    assert page.locator("article.curve .chart:not([data-drawn])").count() > 5
    asked = "".join(url for url in page.requested if "/metrics" in url)
    assert "step_time" not in asked
    page.locator("article[data-metric=step_time]").scroll_into_view_if_needed()
    page.wait_for_selector("article[data-metric=step_time] [data-drawn]")


def test_phases_and_evaluations_are_marked_and_a_zoom_is_for_all_charts(page, address):
    page.goto(f"{address}#/run/{other_id(page, address)}/curves")
    page.wait_for_selector(DRAWN)
    series = options(page, "reward")["series"][-1]
    assert series["areas"] == 2
    assert series["marks"] == 4  # evaluations at 0, 4, 8 and 12
    page.get_by_label("Phases and evaluations").uncheck()
    until(page, f"({OPTIONS})('reward')?.series.at(-1).areas === 0")
    box = page.locator("article[data-metric=reward] .chart").first.bounding_box()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 80)
    page.mouse.down()
    for share in (0.5, 0.6, 0.7):
        page.mouse.move(box["x"] + share * box["width"], box["y"] + 80)
    page.mouse.up()
    page.wait_for_selector("text=Show all")
    until(page, f"({OPTIONS})('reward')?.max < 12")
    maximum = options(page, "reward")["max"]
    assert options(page, "entropy")["max"] == maximum
    page.get_by_role("button", name="Show all").click()
    until(page, f"({OPTIONS})('entropy')?.max === 12")


def test_settings_time_and_findings(page, address):
    page.goto(f"{address}#/run/quiz/settings")
    page.wait_for_selector("tbody tr")
    text = page.locator("main").inner_text()
    assert "loss.kl_coef" in text
    assert "loss.clip_low" not in text  # the default
    assert "torch" in text
    page.get_by_role("link", name="Time").click()
    page.wait_for_selector(".chart[data-drawn]")
    text = page.locator("main").inner_text()
    assert "in 12 steps" in text
    assert "sampling completions" in text


def test_findings_lead_to_their_examples(page, address):
    page.goto(f"{address}#/run/{other_id(page, address)}/settings")
    page.wait_for_selector("nav a .badge")  # their number is on the tab
    page.get_by_role("link", name="Findings").click()
    page.wait_for_selector(".finding")
    finding = page.locator(".finding[data-finding=truncated]")
    assert "sampling.max_new_tokens = 1" in finding.inner_text()
    finding.get_by_role("link").first.click()
    assert re.search(r"/group\?step=\d+&prompt=\d+&sample=\d+", page.url)


def test_a_wrong_address_says_so(page, address):
    page.goto(f"{address}#/run/zebra/curves")
    page.wait_for_selector("[role=alert]")
    assert "zebra" in page.locator("[role=alert]").inner_text()
    page.goto(f"{address}#/run/quiz/nonsense")
    page.wait_for_selector("[role=alert]:has-text('nonsense')")
    page.goto(f"{address}#/")
    page.wait_for_selector("tbody tr")
    page.errors[:] = [error for error in page.errors if "404" not in error and "nonsense" not in error]


def test_light_and_dark(page, address):
    background = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="dark")
    page.goto(f"{address}#/run/quiz/curves")
    page.wait_for_selector(DRAWN)
    dark = page.evaluate(background)
    page.emulate_media(color_scheme="light")
    until(page, f"{background} !== {dark!r}")
    light = page.evaluate(background)
    for wanted in (light, dark):  # the button goes from "as the system" to light to dark
        page.locator("#theme").click()
        assert page.evaluate(background) == wanted
    page.reload()
    page.wait_for_selector(DRAWN)
    assert page.evaluate(background) == dark  # it is remembered


def test_the_keyboard_reaches_everything(page, address):
    page.goto(address)
    page.wait_for_selector("tbody tr")
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(
            page.evaluate("document.activeElement.tagName + ' ' + (document.activeElement.textContent || '').trim()")
        )
    assert any(name.startswith("A quiz") for name in seen)
    assert any(name.startswith("INPUT") for name in seen)
    page.get_by_role("link", name="quiz", exact=True).focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(DRAWN)


def test_a_narrow_page_does_not_scroll_sideways(page, address):
    page.set_viewport_size({"width": 400, "height": 800})
    for view in ("curves", "time", "settings", "findings"):
        page.goto(f"{address}#/run/quiz/{view}")
        page.wait_for_selector(f".view-{view} *")
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, view
        tab = page.locator("#tabs [aria-current]").bounding_box()
        assert 0 <= tab["x"] < tab["x"] + tab["width"] <= 400, view


@pytest.mark.parametrize(
    ("task", "model", "shown"),
    [
        ("/home/me/recipes/modes.py:task", "owner/name", "modes.py:task · owner/name · dapo"),
        ("./modes.py:task", "~/models/small/", "modes.py:task · small · dapo"),
        ("package.module:task", "D:\\models\\small", "package.module:task · small · dapo"),
        ("rows", None, "rows · dapo"),
    ],
)
def test_of_paths_the_last_part_is_shown(page, address, task, model, shown):
    page.goto(address)
    page.wait_for_selector("tbody tr")
    assert page.evaluate("run => gw.facts(run)", {"task": task, "model": model, "algorithm": "dapo"}) == shown


def test_a_running_run_updates_by_itself(page, view, tmp_path):
    """`groupwise train` in the background: its steps appear without a reload, and at its end the page says so."""
    options = {**QUIZ, "train.steps": 100000, "run.folder": tmp_path / "runs" / "live"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value).lower())]
    words[words.index("--run.folder") + 1] = str(tmp_path / "runs" / "live")
    with (tmp_path / "log").open("w") as log:
        command = groupwise("train", "quiz", *words)
        training = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
    try:
        metrics = tmp_path / "runs" / "live" / "metrics.jsonl"
        while training.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            page.wait_for_timeout(200)
        assert training.poll() is None, (tmp_path / "log").read_text()
        address = view(tmp_path / "runs")
        page.goto(f"{address}#/run/live/curves")
        page.wait_for_selector(".badge.running")
        until(page, f"({OPTIONS})('reward')")
        steps = len(metrics.read_text().splitlines())  # at least as many as the page has
        until(page, f"({OPTIONS})('reward')?.series.at(-1).data.at(-1)[0] > {steps}")
        assert "of 100,000" in page.locator("header").inner_text()
        page.set_viewport_size({"width": 400, "height": 800})
        page.evaluate("document.getElementById('tabs').scrollLeft = 40")  # by hand; an update leaves it there
        steps = len(metrics.read_text().splitlines())
        until(page, f"({OPTIONS})('reward')?.series.at(-1).data.at(-1)[0] > {steps}")
        assert page.evaluate("document.getElementById('tabs').scrollLeft") == 40
    finally:
        training.terminate()
        training.wait(60)
    page.wait_for_selector(".badge.stopped")
