"""The code in the README and the docs runs, what it says it prints is true, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def python_blocks():
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
            slow = [pytest.mark.slow] if page.name == "control.md" else []
            yield pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}", marks=slow)


@pytest.mark.parametrize("block", python_blocks())
def test_example_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a run is kept below the current folder
    names: dict = {}
    exec(compile(block, "example", "exec"), names)
    if "rollout" in names:
        assert len(names["rollout"].ids) == 16
    if "loss" in names:
        assert names["loss"].isfinite()
        learns = names["model"].lm_head.weight if "model" in names else names["logps"]
        assert learns.grad is not None or "masters" in names
    if "result" in names:
        assert names["result"].step == 2
        assert (names["result"].model / "model.safetensors").exists()
    if "choice" in names:
        assert f"# {names['choice'].letter} {names['choice'].rule}\n" in f"{block}\n"
    if "training" in names:
        assert names["training"].progress.env_steps >= 2000
        assert (tmp_path / "runs" / "mine" / "play.gif").exists()
    assert {"rollout", "loss", "result", "choice", "training"} & names.keys()


def test_the_readme_says_what_comes_out():
    text = (ROOT / "README.md").read_text()
    from groupwise.core import group_advantages

    rewards, said = re.search(r"the rewards ([\d, ]+) become ([-\d., ]+)\.\n", text).groups()
    advantages = group_advantages(torch.tensor([float(x) for x in rewards.split(",")]), 4)
    assert [round(x, 2) for x in advantages.tolist()] == [float(x) for x in said.split(",")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_the_counts_in_the_docs_are_right():
    from groupwise.core import KINDS, LOSSES

    numbers = {10: "ten", 14: "fourteen", 15: "fifteen"}
    readme, core = (ROOT / "README.md").read_text(), (ROOT / "docs" / "core.md").read_text()
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
    text = (ROOT / "docs" / "design.md").read_text()
    names = re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?)`", text)
    assert len(names) > 40
    missing = [name for name in names if not any((ROOT / place / name).exists() for place in ("groupwise", "."))]
    assert missing == []
