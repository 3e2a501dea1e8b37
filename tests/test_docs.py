"""The commands and the code of the README and the docs run, links lead somewhere, and generated pages are fresh."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.docs_runner import (
    LANGUAGES,
    REASONS,
    ROOT,
    PageRunner,
    commands_of,
    parse_recipe_part,
    read_blocks,
    with_options,
)
from tools import docs_reference
from tools.docs_docstrings import as_markdown

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
QUICK = ("README.md", "docs/index.md", "docs/quickstart.md", "docs/core.md", "docs/models.md", "docs/generation.md")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def pages_with_blocks() -> Iterator[Any]:
    for page in PAGES:
        if any(block.language in ("bash", "python", "toml") for block in read_blocks(page)):
            slow = [] if name_of(page) in QUICK else [pytest.mark.slow]
            yield pytest.param(page, id=name_of(page), marks=slow)


@pytest.mark.parametrize("page", pages_with_blocks())
def test_the_commands_and_code_of_a_page_run(page, tmp_path, monkeypatch):
    runner = PageRunner(tmp_path, monkeypatch)
    for block in read_blocks(page):
        runner.run(block)
    check_results(page, runner.names)


def check_results(page: Path, names: Mapping[str, Any]) -> None:
    """What the examples of some pages must leave behind."""
    if "rollout" in names:
        assert len(names["rollout"].ids) == 16
    if "loss" in names:
        assert names["loss"].isfinite()
        learns = names["model"].lm_head.weight if "model" in names else names["logps"]
        assert learns.grad is not None or "masters" in names
    if "result" in names and hasattr(names["result"], "model"):
        assert (names["result"].model / "model.safetensors").exists()
    if "choice" in names:
        assert f"# {names['choice'].letter} {names['choice'].rule}\n" in page.read_text()
    if "training" in names:
        assert names["training"].progress.env_steps >= 2000
        assert Path("runs/pole/play.gif").exists()


def test_examples_leave_what_is_checked():
    """Each kind of result that `check_results` looks for is in some page."""
    code = "\n".join(block.text for page in PAGES for block in read_blocks(page) if block.language == "python")
    for name in ("rollout", "loss", "result", "choice", "training"):
        assert re.search(rf"^\s*(\w+, )*{name}(, \w+)* = ", code, re.MULTILINE), name


def test_blocks_that_are_not_run_have_a_reason():
    not_run = [block for page in PAGES for block in read_blocks(page) if block.not_run]
    for block in not_run:
        print(f"{block.place}: {block.not_run}")
        assert block.not_run.startswith(REASONS), block.place
    assert len(not_run) < 40


def test_every_block_has_a_language():
    for page in PAGES:
        for block in read_blocks(page):
            assert block.language in LANGUAGES, block.place
            if block.language == "text":  # output: a command to try must be in a bash block
                assert not re.match(r"(groupwise|pip|make) [a-z]", block.text), block.place


def test_markers_are_read(tmp_path):
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        markers = len(re.findall(r"^\s*<!-- (?:not run|run with): ", text, re.MULTILINE))
        read = sum(bool(block.not_run) + bool(block.run_with) for block in read_blocks(page))
        assert markers == read, f"{page.name}: a marker that no block follows"


def test_the_readme_says_what_comes_out():
    text = (ROOT / "README.md").read_text()
    from groupwise.core import group_advantages

    said = re.search(r"the rewards ([\d, ]+) become ([-\d., ]+)\.\n", text)
    if said is None:  # then the page of the core says it
        said = re.search(r"the rewards ([\d, ]+) become ([-\d., ]+)\.\n", (DOCS / "core.md").read_text())
    rewards, advantages = ([float(x) for x in part.split(",")] for part in said.groups())
    assert [round(x, 2) for x in group_advantages(torch.tensor(rewards), 4).tolist()] == advantages


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_files_exist(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        place = page.parent / file if file else page
        assert place.exists(), target
        if name_of(page).startswith("docs/"):  # the site has no other files
            assert place.resolve().is_relative_to(DOCS), target
        if anchor and place.suffix == ".md":
            assert anchor in anchors_of(place), target


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them, and its ids."""
    text = page.read_text(encoding="utf-8")
    outside = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+?) *(?:\{#.*\})?$", outside, re.MULTILINE)
    slugs = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}
    return slugs | set(re.findall(r'id="([^"]+)"', text)) | set(re.findall(r"\{#([\w.-]+)\}", text))


def test_the_public_names_are_in_the_api_reference():
    import groupwise
    from groupwise import core, generate, model, tasks

    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api.md", *(DOCS / "api").glob("*.md")))
    described = set(re.findall(r"^::: [\w.]*\.(\w+)$|^ +- (\w+)$|`(\w+)`", text, re.MULTILINE))
    names = {name for match in described for name in match if name}
    modules = {
        "Callback",
        "Recipe",
        "RunResult",
        "StepReport",
        "Trainer",
        "load_recipe",
        "make_recipe",
        "read_rollouts",
    }
    assert modules <= set(groupwise.__all__)
    assert modules - names == set()
    assert set(core.__all__) - names == set()
    assert {"Engine", "PlainGenerator", "Rollout", "Sampling", "StopStrings"} <= names & set(generate.__all__)
    assert {"load_model_and_tokenizer", "MasterWeights", "prepare"} <= names & set(model.__all__)
    assert {"Task", "TaskDefinition"} <= names & set(tasks.__all__)


def test_the_navigation_lists_every_page():
    def files(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for part in entry.values() if isinstance(entry, dict) else entry:
                yield from files(part)

    navigation = list(files(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert len(navigation) == len(set(navigation))
    assert set(navigation) == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_the_site_needs_no_network():
    theme = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["theme"]
    assert theme["font"] is False
    for page in DOCS.rglob("*.md"):
        assert not re.search(r"<(script|link)\b|<img[^>]+src=.https?:|!\[[^\]]*\]\(https?:", page.read_text()), page


def test_generated_pages_are_fresh():
    assert docs_reference.stale_pages() == [], "run: make docs"


def test_every_setting_is_in_the_reference():
    from groupwise.config import setting_names

    page = (DOCS / "settings.md").read_text(encoding="utf-8")
    names = [name for name, _ in setting_names() if name not in docs_reference.TABLES]
    assert len(names) > 150
    assert [name for name in names if f'id="{name}"' not in page] == []


def test_stale_pages_are_found(tmp_path):
    for name, make in docs_reference.PAGES.items():
        (tmp_path / name).write_text(make(), encoding="utf-8")
    assert docs_reference.stale_pages(tmp_path) == []
    (tmp_path / "metrics.md").write_text("old", encoding="utf-8")
    (tmp_path / "settings.md").unlink()
    assert docs_reference.stale_pages(tmp_path) == ["settings.md", "metrics.md"]


def test_docstrings_as_markdown():
    parameters = "logps, mask: ``(B, T)``, and\n    more.\nloss: a name. mask: more."
    text = f"A loss.\n\n{parameters}\n\nThe end: see :func:`core.loss`."
    lines = as_markdown(text, {"logps", "mask", "loss"}).splitlines()
    assert lines[2:4] == ["- **`logps`**, **`mask`**: ``(B, T)``, and", "  more."]
    assert lines[4:6] == ["- **`loss`**: a name.", "- **`mask`**: more."]
    assert lines[-1] == "The end: see `core.loss`."


def test_commands_of_a_block():
    variables: dict[str, str] = {}
    text = "A=1,2\ngroupwise train quiz \\\n  --x $A  # a comment\n$ mkdir a && ls 'a b'\n"
    assert list(commands_of(text, variables)) == [
        ["groupwise", "train", "quiz", "--x", "1,2"],
        ["mkdir", "a"],
        ["ls", "a b"],
    ]
    words = ["train", "quiz", "--train.steps", "100", "--resume", "--a=3", "--b", "1"]
    extra = ["--train.steps", "2", "--a", "4"]
    assert with_options(words, extra) == ["train", "quiz", "--resume", "--b", "1", *extra]


def test_a_part_of_a_recipe_is_checked():
    from groupwise.errors import ConfigError

    parse_recipe_part("[ramps]\ntemperature = { from = 1.0, to = 0.7, steps = 10 }\n")
    for text in ("[sampling]\ntemperatur = 1.0\n", "[ramps]\ntemperature = { from = 1.0 }\n"):
        with pytest.raises(ConfigError):
            parse_recipe_part(text)


def test_a_failing_block_names_its_place(tmp_path, monkeypatch):
    runner = PageRunner(tmp_path, monkeypatch)
    page = DOCS / "core.md"
    block = read_blocks(page)[0]
    for text, language in (("groupwise train nothing\n", "bash"), ("1 / 0\n", "python"), ("[no]\nx = 1\n", "toml")):
        broken = type(block)(block.page, block.line, language, None, text)
        with pytest.raises(AssertionError, match=rf"docs/core.md:{block.line}"):
            runner.run(broken)


def test_the_counts_in_the_docs_are_right():
    from groupwise.core import KINDS, LOSSES

    numbers = {10: "ten", 14: "fourteen", 15: "fifteen"}
    readme, core = (ROOT / "README.md").read_text(), (DOCS / "core.md").read_text()
    if "policy losses" in readme:
        assert f"{numbers[len(LOSSES)]} policy losses" in readme
        assert f"{numbers[len(KINDS)]} preference losses" in readme
    assert f"DPO and {numbers[len(KINDS) - 1]} relatives" in core
    for name in LOSSES:
        assert f"`{name}`" in core


def test_every_make_command_that_is_named_exists():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for command in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE):
            assert re.search(rf"^{command}:", makefile, re.MULTILINE), f"{page.name}: make {command}"


def test_the_files_that_the_design_names_exist():
    """The page follows a step file by file; a file that was moved must be moved there too."""
    text = (DOCS / "design.md").read_text()
    names = re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?)`", text)
    assert len(names) > 40
    missing = [name for name in names if not any((ROOT / place / name).exists() for place in ("groupwise", "."))]
    assert missing == []
