"""Runs the blocks of a documentation page in order, in an empty folder, without network.

Conventions, also in CONTRIBUTING.md: ``bash`` blocks are commands; a block with ``title="name"`` is a file that later
blocks use; ``python`` blocks without a title share one namespace per page; ``toml`` blocks without a title are parts of
a recipe and are parsed; ``text`` is output. In the line before a block, ``<!-- not run: REASON -->`` excludes it (it is
still parsed), and ``<!-- run with: … -->`` adds settings. What neither they nor a command set is at
most as large as in `SMALL`.

Real models are replaced by the embedded tiny one, data sets of the hub by a few rows, embedders by a small local one.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.weights import wordllama

ROOT = Path(__file__).parents[1]
LANGUAGES = ("bash", "python", "toml", "json", "text", "markdown", "yaml")
REASONS = (
    "needs a GPU",
    "needs a server",
    "needs the network",
    "needs another package",
    "takes minutes",
    "takes hours",
    "runs until Ctrl-C",
)
SIMPLE_COMMANDS = ("ls", "cat", "head", "tail", "mkdir", "wc", "cp", "echo", "export", "rm", "find")
WITH_SETTINGS = ("train", "check", "eval")

# The largest values of settings that neither the command nor its marker sets.
SMALL = {
    "train.steps": 2,
    "train.batch_size": 2,
    "train.accumulation": 1,
    "sampling.samples_per_prompt": 4,
    "sampling.max_new_tokens": 8,
    "sampling.min_new_tokens": 0,
    "evaluate.max_new_tokens": 8,
    "data.train_rows": 8,
    "data.held_out_rows": 4,
    "data.held_out_from_train": 2,
    "preference.held_out_from_train": 2,
    "sft.steps": 2,
    "sft.batch_size": 2,
    "preference.batch_size": 2,
}

# Models and data sets that exist on the hub and that pages may name; one that is misspelt fails the test.
HUB_MODELS = {
    "HuggingFaceTB/SmolLM2-135M",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "HuggingFaceTB/SmolLM2-360M-Instruct",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
}
HUB_ROWS: dict[str, list[dict[str, Any]]] = {
    "openai/gsm8k": [{"question": f"What is {n} + {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(16)],
    "trl-lib/tldr": [{"prompt": f"SUBREDDIT: r/n{n} POST: {n} TL;DR:", "completion": f" {n}"} for n in range(16)],
    "trl-lib/ultrafeedback-prompt": [{"prompt": [{"role": "user", "content": f"Say {n}"}]} for n in range(16)],
    "HuggingFaceH4/ultrafeedback_binarized": [
        {"prompt": f"Say {n}", "chosen": f"{n}.", "rejected": f"{n + 1}."} for n in range(16)
    ],
}


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # of the opening fence, from 1
    language: str
    title: str | None
    text: str
    not_run: str | None = None  # the reason
    run_with: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(path: Path) -> list[Block]:
    """The fenced blocks of a page."""
    lines = path.read_text(encoding="utf-8").splitlines()
    page = path.relative_to(ROOT).as_posix()
    blocks: list[Block] = []
    number = 0
    while number < len(lines):
        fence = re.match(r"( *)(`{3,}) *(\w*)(.*)$", lines[number])
        number += 1
        if fence is None:
            continue
        start, indent, ticks = number, fence[1], fence[2]
        while lines[number].strip() != ticks:
            number += 1
        body = "\n".join(line.removeprefix(indent) for line in lines[start:number])
        markers = _markers(lines, start - 1)
        title = re.search(r'title="([^"]+)"', fence[4])
        blocks.append(
            Block(
                page,
                start,
                fence[3],
                title[1] if title else None,
                body + "\n",
                markers.get("not run"),
                markers.get("run with", ""),
            )
        )
        number += 1
    return blocks


def _markers(lines: Sequence[str], fence: int) -> dict[str, str]:
    """The comments right above a fence."""
    markers = {}
    while fence > 0 and (match := re.fullmatch(r"\s*<!-- (not run|run with): (.*?) -->", lines[fence - 1])):
        markers[match[1]] = match[2]
        fence -= 1
    return markers


class PageRunner:
    """The state of a page: its folder, its Python names, its shell variables."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.variables: dict[str, str] = {}
        self.overrides: dict[str, Any] = {}
        self.given: set[str] = set()  # settings that stay as they are
        self.output = ""
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("COLUMNS", "120")
        self._replace_models()
        self._replace_data_sets()
        self._replace_recipes()

    def run(self, block: Block) -> None:
        """Run a block, or write its file, or parse it; an exception names its place."""
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                self._run(block)
        except pytest.skip.Exception:
            raise
        except BaseException as error:
            shown = output.getvalue()[-2000:]
            raise AssertionError(f"{block.place}: {type(error).__name__}: {error}\n{shown}") from error
        self.output = output.getvalue()

    def _run(self, block: Block) -> None:
        if block.not_run:
            self._check(block)
        elif block.title is not None:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            if path.suffix == ".py":
                self.monkeypatch.delitem(sys.modules, path.stem, raising=False)
        elif block.language == "bash":
            for words in commands_of(block.text, self.variables):
                self._command(words, shlex.split(block.run_with))
        elif block.language == "python":
            self.overrides = _parse_overrides(block.run_with.split())
            self.given = set(self.overrides)
            exec(compile("\n" * block.line + block.text, block.page, "exec"), self.names)
        elif block.language == "toml":
            parse_recipe_part(block.text)

    def _check(self, block: Block) -> None:
        """What can be said about a block without running it."""
        if block.language == "python":
            compile("\n" * block.line + block.text, block.page, "exec")
        elif block.language == "bash":
            for words in commands_of(block.text, dict(self.variables)):
                check_command(words)
        elif block.language == "toml":
            parse_recipe_part(block.text)

    def _command(self, words: list[str], extra: list[str]) -> None:
        if words[0] == "cd":
            os.chdir(words[1])
        elif words[0] == "groupwise" and words[1:3] != ["models", "fetch"]:
            self._groupwise(words[1:], extra)
        elif words[0] in ("python", "python3") and words[1].endswith(".py") and Path(words[1]).exists():
            self.overrides = _parse_overrides(extra)
            self.given = set(self.overrides)
            self.monkeypatch.setattr(sys, "argv", words[1:])
            runpy.run_path(words[1], run_name="__main__")
        elif words[0] in ("python", "python3") and words[1] == "-c":
            exec(words[2], {"__name__": "__main__"})
        elif words[0] in SIMPLE_COMMANDS:
            subprocess.run(shlex.join(words).replace("'*'", "*"), shell=True, check=True, capture_output=True)
        else:
            check_command(words)
            assert words[0] in ("pip", "make", "groupwise", "git", "source"), f"{words[0]} is not run; add a marker"

    def _groupwise(self, words: list[str], extra: list[str]) -> None:
        from groupwise.cli import main

        self.overrides = {}
        is_control = words[0] == "control" and words[1] in ("train", "compare")
        if extra and (words[0] in WITH_SETTINGS or is_control):
            words = with_options(words, extra)
        self.given = {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
        try:
            status = main(words)
        except SystemExit as error:  # of --help
            status = error.code
        assert status in (0, None), f"exit status {status} of: groupwise {shlex.join(words)}"

    def _replace_models(self) -> None:
        import transformers

        from groupwise.model import load, source, weights

        original = source.resolve_source

        def resolve(name: Any, **options: Any) -> Any:
            if isinstance(name, str) and not Path(name).exists():
                if "/" in name and name.count("/") == 1 and not name.startswith((".", "~")):
                    assert name in HUB_MODELS, f"{name}: is it on the hub? Then add it to HUB_MODELS"
                if name in HUB_MODELS or (name in weights.CATALOGUE and weights.CATALOGUE[name].kind == "gguf"):
                    return original("tiny", seed=options.get("seed", 0))
            return original(name, **options)

        for module in (source, load):
            self.monkeypatch.setattr(module, "resolve_source", resolve)
        for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
            self._replace_from_pretrained(kind)

    def _replace_from_pretrained(self, kind: Any) -> None:
        original = kind.from_pretrained

        def from_pretrained(name: Any, *arguments: Any, **options: Any) -> Any:
            if str(name) not in HUB_MODELS:
                return original(name, *arguments, **options)
            folder = self.folder / ".tiny"
            if not folder.exists():
                from groupwise.model import load_model_and_tokenizer

                for part in load_model_and_tokenizer("tiny"):
                    part.save_pretrained(folder)
            return original(folder)

        self.monkeypatch.setattr(kind, "from_pretrained", from_pretrained)

    def _replace_data_sets(self) -> None:
        import datasets

        def load_dataset(name: str, subset: str | None = None, *, split: str | None = None, **_: Any) -> Any:
            assert name in HUB_ROWS, f"{name}: is it on the hub? Then add a few rows of its form to HUB_ROWS"
            rows = datasets.Dataset.from_list(HUB_ROWS[name])
            slice_of = re.search(r"\[:(\d+)\]", split or "")
            if slice_of:
                rows = rows.select(range(min(len(rows), int(slice_of[1]))))
            return rows if split else datasets.DatasetDict(train=rows, test=rows)

        self.monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    def _replace_recipes(self) -> None:
        """Let every new recipe have the block's settings, a local embedder, and room for prompts in bytes."""
        import groupwise.training.from_rows
        from groupwise import config
        from groupwise.config import layers, with_settings

        original = layers.make_recipe

        def make_recipe(table: Any = None, *, base: Any = None, **options: Any) -> Any:
            if base:
                return original(table, base=base, **options)  # of `with_settings`
            recipe = original(table, base=base, **options)
            changes = {**_smaller(recipe, self.given), **self.overrides}
            if recipe.data.max_prompt_length is not None and recipe.model.source != "tiny":
                changes.setdefault("data.max_prompt_length", max(2000, recipe.data.max_prompt_length))
            if recipe.advantages.grouping == "similarity" or recipe.grouping.log_diversity:
                wordllama()
                changes |= {"grouping.embedder": "wordllama", "grouping.workers": 0}
            if recipe.preference.train is not None:
                changes["preference.cache_ref_logps"] = False
            return with_settings(recipe, changes) if changes else recipe

        for module in (layers, config, groupwise.training.from_rows):
            self.monkeypatch.setattr(module, "make_recipe", make_recipe)


def _smaller(recipe: Any, given: Collection[str]) -> dict[str, Any]:
    """The settings of `SMALL` that are larger in a recipe, except those that were given."""
    values = {name: recipe.get(name) for name in SMALL if name not in given}
    return {
        name: limit
        for name, limit in SMALL.items()
        if name in values and (values[name] is None or values[name] > limit)
    }


def commands_of(text: str, variables: dict[str, str]) -> Iterator[list[str]]:
    """The words of each command of a block, with its variables filled in; assignments are remembered."""
    for line in text.replace("\\\n", "").splitlines():
        line = line.strip().removeprefix("$ ")
        for name, value in variables.items():
            line = re.sub(rf"\$\{{?{name}\b\}}?", value, line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in ("&&", ";", "|"):
                while words and (assigned := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0])):
                    variables[assigned[1]] = assigned[2]
                    words.pop(0)
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def check_command(words: Sequence[str]) -> None:
    """Check a command that is not run: it parses, its files, targets and extras exist."""
    if words[0] == "groupwise":
        _check_groupwise(list(words[1:]))
    elif words[0] == "pip" or words[:3] == ["python", "-m", "pip"]:
        pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        known = pyproject["project"]["optional-dependencies"]
        for extras in re.findall(r"(?:groupwise|\.)\[([^\]]+)\]", " ".join(words)):
            for extra in extras.split(","):
                assert extra.strip() in known, f"there is no extra {extra!r}"
    elif words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in words[1:]:
            assert "=" in target or re.search(rf"^{target}:", makefile, re.MULTILINE), f"there is no make {target}"
    elif words[0].startswith("python") and len(words) > 1 and words[1].startswith(("benchmarks/", "tools/")):
        assert (ROOT / words[1]).exists(), f"there is no {words[1]}"


def _check_groupwise(words: list[str]) -> None:
    from groupwise.cli import _parse
    from groupwise.cli.settings import parse_settings
    from groupwise.model.catalogue import CATALOGUE

    if words[:2] == ["models", "fetch"]:
        assert set(words[2:]) <= set(CATALOGUE), f"unknown model in {words[2:]}"
    if "--help" not in words:
        parse_settings(getattr(_parse(words), "settings", ()))


def with_options(words: Sequence[str], extra: Sequence[str]) -> list[str]:
    """The command with extra options, which replace those of the same name."""
    names = {word.partition("=")[0] for word in extra if word.startswith("--")}
    kept: list[str] = []
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = word.partition("=")[0] in names
            if not skipping:
                kept.append(word)
            skipping = skipping and "=" not in word
        elif skipping:
            skipping = False
        else:
            kept.append(word)
    return [*kept, *extra]


def parse_recipe_part(text: str) -> None:
    """Check a part of a recipe: every key, and its schedule."""
    from groupwise.config import make_recipe
    from groupwise.training.inputs import make_schedule

    table = tomllib.loads(text)
    if any("rewards" in entry for entry in table.get("rewards", ()) if isinstance(entry, Mapping)):
        raise AssertionError("[[rewards]] inside [[rewards]]")
    make_schedule(make_recipe(table))


def _parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Settings as ``train.steps=1`` or ``--train.steps 1``."""
    from groupwise.config import parse_override

    pairs = [word.partition("=")[::2] for word in words if "=" in word]
    plain = [word for word in words if "=" not in word]
    pairs += list(zip(plain[::2], plain[1::2], strict=True))
    return {name.lstrip("-"): parse_override(name.lstrip("-"), value) for name, value in pairs}
