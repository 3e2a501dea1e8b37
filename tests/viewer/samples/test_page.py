"""The views on samples in a real browser."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from groupwise.training.store.rollout_files import RolloutWriter, read_rollouts
from tests.viewer.samples.conftest import HOSTILE

pytestmark = pytest.mark.slow
expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture(scope="module")
def runs(answers_run, tmp_path_factory):
    """Copies of the run: as it is, and with a text in its last step that must not run in a browser."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(answers_run, folder / "answers")
    hostile = shutil.copytree(answers_run, folder / "hostile")
    table = read_rollouts(hostile, [6]).to_pydict()
    others = len(table["completion"]) - 1
    table["completion"] = [HOSTILE, "😀 yes", *["word " * 300 + str(number) for number in range(1, others)]]
    RolloutWriter(hostile / "rollouts").write(6, table)
    many = shutil.copytree(answers_run, folder / "many")
    row = read_rollouts(many, [1]).to_pylist()[0]
    rows = [
        {**row, "sample": number, "completion": f"So {number % 5} and {number} " + "on " * 200} for number in range(30)
    ]
    RolloutWriter(many / "rollouts").write(1, {name: [one[name] for one in rows] for name in row})
    return folder


@pytest.fixture(scope="module")
def address(view, runs):
    return view(runs)


@pytest.fixture
def go(page, address):
    """Open a view of a run, and wait until its data is there."""

    def show(place, wait):
        page.goto(f"{address}#/run/{place}")
        page.wait_for_selector(wait)
        return page

    return show


def colours(page, selector):
    return page.eval_on_selector_all(selector, "nodes => nodes.map(node => getComputedStyle(node).backgroundColor)")


def test_groups_open_and_filters_change_what_is_shown(go, runs):
    page = go("answers/groups?step=1", "section.group")
    rows = read_rollouts(runs / "answers", [1]).to_pylist()
    assert page.locator("section.group").count() == 3
    assert page.locator("article.answer").count() == len(rows) == 18
    card = page.locator("article.answer").first
    assert f"reward {rows[0]['reward']:.3g}" in card.inner_text()
    assert all(reason not in page.inner_text("main") for reason in ("equal_rewards", "no_advantage"))
    chip = page.locator("button[data-name=disagreement]")
    count = int(chip.locator(".count").inner_text())
    chip.click()
    expect(page.locator("section.group")).to_have_count(count)
    assert 0 < count < 3
    assert page.locator("button[data-name=disagreement]").get_attribute("aria-pressed") == "true"
    assert "filter=disagreement" in page.url
    page.reload()  # the address keeps the choice
    page.wait_for_selector("section.group")
    assert page.locator("section.group").count() == count
    page.locator("button[data-name=all]").click()
    expect(page.locator("section.group")).to_have_count(3)


def test_steps_by_keyboard_and_number(go):
    page = go("answers/groups?step=2", "section.group[data-step='2']")
    page.locator(".step-slider").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("section.group[data-step='3']")
    page.fill(".step-number", "6")
    page.keyboard.press("Enter")
    page.wait_for_selector("section.group[data-step='6']")
    page.get_by_label("previous step").click()
    page.wait_for_selector("section.group[data-step='5']")
    assert "step=5" in page.url


def test_search_in_the_step_and_in_all_steps(go, runs):
    page = go("answers/groups?step=1", "section.group")
    row = read_rollouts(runs / "answers", [1]).to_pylist()[0]
    page.fill("input[type=search]", row["prompt"].strip().upper())
    expect(page.locator("section.group")).to_have_count(1)
    page.get_by_label("search in all steps").check()
    page.wait_for_selector(".matches mark")
    found = {re.match(r"step (\d+)", text)[1] for text in page.locator(".matches a").all_inner_texts()}
    assert found == {
        str(one["step"]) for one in read_rollouts(runs / "answers").to_pylist() if one["row"] == row["row"]
    }
    page.locator(".matches a").first.click()
    page.wait_for_selector(".tree .leaf")


def test_a_prompt_is_followed_through_the_run(go):
    page = go("answers/groups?step=1", "section.group")
    page.get_by_text("follow this prompt").first.click()
    page.wait_for_selector(".chart[data-drawn=true] canvas")
    assert page.locator(".then-and-now section.group").count() == 2
    assert page.locator(".then-and-now article.answer").count() == 12
    page.locator("main select").select_option(index=0)  # the second of three visits
    expect(page).to_have_url(re.compile("at="))
    expect(page.locator(".then-and-now section.group")).to_have_count(2)


def test_one_group_is_a_picture(go):
    page = go("answers/group?step=1&prompt=0", ".tree .leaf")
    leaves = page.locator(".tree .leaf")
    members = ",".join(leaves.nth(place).get_attribute("data-samples") for place in range(leaves.count()))
    assert sorted(map(int, members.split(","))) == list(range(6))
    up, down = colours(page, ".tree .leaf.tone-up"), colours(page, ".tree .leaf.tone-down")
    assert up
    assert down
    assert not set(up) & set(down)
    assert "of the spread of advantages" in page.inner_text(".lesson")
    silent = page.locator(".tree .leaf.silent").count()
    assert page.locator(".verdict .why").count() == silent
    leaves.first.hover()
    assert page.locator(".tree > .dim").count() > 0
    page = go("answers/group?step=1&prompt=0&sample=3", ".leaf.wanted")  # as a finding's example links to it
    assert "3" in page.locator(".leaf.wanted").get_attribute("data-samples").split(",")
    page.get_by_label("next prompt").click()
    expect(page).to_have_url(re.compile("prompt=1"))
    page.wait_for_selector("body:not(:has(.waiting)) .tree .leaf")


def test_many_answers_are_a_line_each_until_they_are_opened(go):
    page = go("many/group?step=1&prompt=0", ".tree.compact .leaf")
    leaf, text = page.locator(".leaf").first, page.locator(".leaf .node-text").first
    low = text.bounding_box()["height"]
    leaf.press("Enter")
    assert leaf.get_attribute("aria-expanded") == "true"
    assert text.bounding_box()["height"] > low
    assert page.locator(".leaf").count() == 30


def test_long_answers_are_folded(go):
    page = go("hostile/group?step=6&prompt=0", ".tree .leaf")
    folds = page.locator(".tree .fold")
    before, count = len(page.inner_text(".tree")), folds.count()
    assert count > 0
    folds.first.click()
    expect(folds).to_have_count(count - 1)
    assert len(page.inner_text(".tree")) > before + 500
    page = go("hostile/groups?step=6", "section.group")
    assert page.locator("article.answer .sample-text").nth(1).inner_text() == "😀 yes"
    card = page.locator("article.answer").nth(2)
    assert "more characters" in card.inner_text()
    card.locator(".fold").click()
    expect(card).to_contain_text("word 1")


def test_tokens_are_coloured_by_each_number(go):
    page = go("answers/tokens?step=5", ".tokens .token")
    seen = {}
    for mode in ("logp", "ratio", "entropy", "kl"):
        page.locator(f"button[data-mode={mode}]").click()
        seen[mode] = tuple(colours(page, ".tokens .token"))
        assert page.locator(".scale-legend .scale").is_visible()
    assert len(set(seen.values())) == 4
    assert len(set(seen["logp"])) > 1  # by its number, not all the same
    page.wait_for_selector(".chart[data-drawn=true] canvas")
    page.locator(".tokens .token").nth(2).hover()
    details = page.inner_text(".token-panel")
    for name in ("id", "log-prob", "ratio to the sampler", "entropy", "KL to the reference"):
        assert name in details
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    assert "4 of 8" in page.inner_text(".token-panel")
    page.locator("button[data-sample='3']").click()
    expect(page).to_have_url(re.compile("sample=3"))


def test_tokens_that_were_not_recorded(go):
    page = go("answers/tokens?step=2", ".box")
    assert "run.save_tokens_every" in page.inner_text("main")
    page.locator("main a", has_text="3").first.click()
    page.wait_for_selector(".tokens .token")


def test_texts_are_never_html(go):
    for place, wait in (
        ("hostile/groups?step=6", "section.group"),
        ("hostile/group?step=6&prompt=0", ".tree .leaf"),
        ("hostile/groups?row=0", ".then-and-now"),
        ("hostile/groups?search=script&everywhere=1", ".matches mark"),
        ("hostile/pairs?step=6", "section.pair"),
        ("hostile/questions?part=train", "table"),
        ("hostile/tokens?step=5", ".tokens .token"),
    ):
        page = go(place, wait)
        page.on("dialog", lambda dialog: pytest.fail(f"a text ran as a script: {dialog.message}"))
        assert page.locator("main script, main img").count() == 0
        if "step=6" in place and "pairs" not in place:
            assert HOSTILE in page.inner_text("main")
    assert all(url.startswith(page.url.split("#")[0]) for url in page.requested)


def test_questions_as_a_heat_map(go):
    page = go("answers/questions?part=train", ".chart[data-drawn=true] canvas")
    assert page.locator("tbody tr").count() == 6
    page.locator("button[data-part=held_out]").click()
    expect(page.locator("tbody tr")).to_have_count(2)
    page.wait_for_selector(".chart[data-drawn=true] canvas")
    chip = page.locator(".chip").nth(1)
    count = int(chip.locator(".count").inner_text())
    chip.click()
    expect(page.locator("tbody tr")).to_have_count(count)
    page.locator("tbody a").first.click()
    page.wait_for_selector(".then-and-now article.answer")
    assert "Held-out question" in page.inner_text("main")


def test_a_click_on_the_heat_map_opens_the_history(go):
    page = go("answers/questions?part=held_out", ".chart[data-drawn=true] canvas")
    box = page.locator(".chart canvas").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 47)  # a cell of the first row
    page.wait_for_selector(".then-and-now article.answer")
    assert "row=" in page.url


def test_pairs_with_their_differences(go):
    page = go("answers/pairs?step=6", "section.pair")
    assert page.locator("section.pair").first.locator("article").count() == 2
    assert page.locator("ins").count() > 0
    assert page.locator("del").count() > 0
    assert "margin" in page.inner_text("section.pair")


def test_clusters_as_a_map(page, view, clusters_run):
    page.goto(f"{view(clusters_run)}#/run/clusters/clusters?step=1")
    page.wait_for_selector(".map[data-drawn=true] canvas")
    assert page.locator(".cluster").count() >= 1
    assert page.locator(".cluster-answer").count() == 6
    page.get_by_text("play").click()
    expect(page).to_have_url(re.compile("step=2"))
    page.wait_for_selector("body:not(:has(.waiting)) .map[data-drawn=true]")


def test_views_that_do_not_apply_say_why(go):
    page = go("answers/groups", "section.group")
    tabs = page.locator("#tabs a").all_inner_texts()
    assert {"Groups", "One group", "Tokens", "Questions", "Pairs"} <= set(tabs)
    assert "Clusters" not in tabs
    assert "similarity_group_grpo" in go("answers/clusters", ".box").inner_text("main")


def test_new_steps_of_a_run_appear(page, view, answers_run, tmp_path):
    folder = shutil.copytree(answers_run, tmp_path / "growing")
    newest = (folder / "rollouts" / "step-000006.parquet").rename(tmp_path / "later.parquet")
    page.goto(f"{view(folder)}#/run/growing/groups")
    page.wait_for_selector("section.group[data-step='5']")
    newest.rename(folder / "rollouts" / "step-000006.parquet")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "reward": 0.5}) + "\n")
    page.wait_for_timeout(700)  # files are looked at twice a second
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # asks at once
    page.wait_for_selector("section.group[data-step='6']")


@pytest.mark.parametrize("width", [400, 1280])
def test_no_view_is_wider_than_the_window(go, width):
    for place, wait in (
        ("answers/groups?step=1", "section.group"),
        ("answers/group?step=1&prompt=0", ".tree .leaf"),
        ("answers/tokens?step=5", ".tokens .token"),
        ("answers/questions", ".chart[data-drawn=true]"),
        ("answers/pairs", "section.pair"),
    ):
        page = go(place, wait)
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
