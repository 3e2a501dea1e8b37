"""Imports point one way, as docs/design.md says, and importing groupwise costs nothing until it is used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import groupwise

PACKAGE = Path(groupwise.__file__).parent
BASE = {"errors", "text", "core", "rundir", "stats", "plots"}

# What each part may import of the others. A part that is not built yet is listed all the same: the line waits for it.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "text": set(),
    "core": {"errors"},
    "rundir": {"errors", "text"},
    "stats": {"errors"},
    "plots": {"errors", "rundir", "stats"},
    "data": BASE,
    "algorithms": BASE,
    "config": BASE | {"algorithms"},
    "model": BASE | {"algorithms", "config"},
    "generate": BASE | {"algorithms", "config", "model"},
    "rewards": BASE | {"algorithms", "config"},
    "grouping": BASE | {"algorithms", "config", "model"},
    "tasks": BASE | {"data", "algorithms", "config", "model", "generate", "rewards", "grouping"},
    "evaluate": BASE | {"data", "algorithms", "config", "model", "generate", "rewards", "grouping", "tasks"},
    "train": BASE | {"data", "algorithms", "config", "model", "generate", "rewards", "grouping", "tasks", "evaluate"},
    "comparison": BASE,
    "control": BASE | {"comparison"},
}
EVERYTHING = set(MAY_IMPORT)
MAY_IMPORT["integrations"] = EVERYTHING
MAY_IMPORT["cli"] = EVERYTHING
MAY_IMPORT["__main__"] = {"cli"}

# Packages that only some users have, or that take seconds to load: imported inside the functions that use them.
ONLY_INSIDE_FUNCTIONS = {
    "PIL", "datasets", "gymnasium", "imageio", "matplotlib", "openai", "peft", "ray", "sentence_transformers",
    "sklearn", "stable_baselines3", "tensorboardX", "trl", "verl", "vllm", "wandb",
}  # fmt: skip


class Import(NamedTuple):
    part: str  # the part of groupwise that imports
    module: str  # what it imports, dotted
    at_top: bool
    where: str

    @property
    def package(self) -> str:
        return self.module.split(".")[0]

    @property
    def imported_part(self) -> str | None:
        names = self.module.split(".")
        return names[1] if names[0] == "groupwise" and len(names) > 1 else None


def imports_of(source: str, path: Path) -> list[Import]:
    """Every import in a file of the package, wherever it stands, type-checking blocks included."""
    relative = path.relative_to(PACKAGE)
    part = relative.parts[0].removesuffix(".py")
    tree = ast.parse(source, str(path))
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["groupwise", *relative.parent.parts]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            # `from groupwise import core` imports a part; `from groupwise.core import gae` imports from one.
            modules = [f"groupwise.{a.name}" for a in node.names] if base == "groupwise" else [base]
        else:
            continue
        found += [Import(part, module, node not in inside, f"{relative}:{node.lineno}") for module in modules]
    return found


def violations(imports: list[Import]) -> list[str]:
    problems = []
    for entry in imports:
        target = entry.imported_part
        if target in MAY_IMPORT and target != entry.part and target not in MAY_IMPORT.get(entry.part, set()):
            problems.append(f"{entry.where}: {entry.part} may not import {target}")
        if entry.part == "core" and entry.package not in {"groupwise", "torch"} | set(sys.stdlib_module_names):
            problems.append(f"{entry.where}: core imports {entry.package}, but torch is all it may")
        if entry.at_top and entry.package in ONLY_INSIDE_FUNCTIONS:
            problems.append(f"{entry.where}: import {entry.package} inside the function that needs it")
    return problems


FILES = sorted(PACKAGE.rglob("*.py"))


def test_direction():
    assert len(FILES) > 15
    found = [entry for path in FILES for entry in imports_of(path.read_text(), path)]
    assert len(found) > 50
    assert violations(found) == []


def test_every_part_has_its_place():
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert parts <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("file", "source", "problem"),
    [
        ("core/kl.py", "import numpy", "core imports numpy"),
        ("core/kl.py", "def f():\n    from transformers import x", "core imports transformers"),
        ("core/kl.py", "from groupwise.rundir import RunDir", "core may not import rundir"),
        ("stats.py", "from groupwise import plots", "stats may not import plots"),
        ("rundir/run.py", "from ..train import loop", "rundir may not import train"),
        ("control/main.py", "from groupwise.model.load import load", "control may not import model"),
        ("train/trainer.py", "import groupwise.cli", "train may not import cli"),
        ("evaluate.py", "def f():\n    import groupwise.integrations.trl", "evaluate may not import integrations"),
        ("plots.py", "import matplotlib.pyplot", "import matplotlib inside the function"),
    ],
)
def test_a_wrong_import_would_be_found(file, source, problem):
    found = violations(imports_of(source, PACKAGE / file))
    assert len(found) == 1
    assert problem in found[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("core/kl.py", "import torch\nfrom torch.nn import functional\nimport math\nfrom . import losses"),
        ("core/kl.py", "from groupwise.core.losses import log_ratio\nfrom groupwise.errors import InputError"),
        ("plots.py", "def f():\n    import matplotlib"),
        ("control/main.py", "from groupwise.core import gae\nfrom groupwise.control.utils import MLP"),
        ("rundir/run.py", "from groupwise import __version__"),
    ],
)
def test_a_right_import_is_not(file, source):
    assert violations(imports_of(source, PACKAGE / file)) == []


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = {"transformers", "sklearn", "gymnasium", "datasets", "matplotlib", "pyarrow", "pandas", "scipy", "trl"}


def test_importing_groupwise_loads_nothing_heavy():
    loaded = loaded_by("import groupwise; groupwise.__version__; dir(groupwise)")
    assert not loaded & (HEAVY | {"torch", "numpy"})


def test_importing_the_core_loads_torch_alone():
    loaded = loaded_by("import groupwise; groupwise.core.gae")
    assert "torch" in loaded
    assert not loaded & HEAVY


def test_importing_the_rest_waits_for_matplotlib():
    loaded = loaded_by("import groupwise; groupwise.plots, groupwise.stats, groupwise.rundir")
    assert not loaded & HEAVY


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'cor'"):
        _ = groupwise.cor


@pytest.mark.parametrize("package", ["groupwise", *(f"groupwise.{name}" for name in groupwise._SUBMODULES)])
def test_what_a_package_promises_is_there(package):
    """Names that are loaded when they are asked for, too."""
    module = importlib.import_module(package)
    assert [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)] == []
