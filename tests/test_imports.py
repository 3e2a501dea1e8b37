"""The structure that docs/design.md describes: imports point down and have no cycles, importing groupwise is cheap, a
class name means one thing, and only the trainer, its callbacks and the command line know the trainer."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import groupwise

PACKAGE = Path(groupwise.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# The floors: a part may import those above its own line, and what its line adds.
BASE = {"errors", "seeds", "redaction", "text", "terminal", "paths", "core", "rundir", "stats", "distributed", "plots"}
LIBRARY = BASE | {
    "algorithms",
    "chat_template",
    "config",
    "plugins",
    "user_code",
    "environments",
    "data",
    "model",
    "generate",
    "rewards",
    "grouping",
}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "seeds": set(),
    "redaction": {"errors"},
    "text": {"redaction"},
    "terminal": {"text"},
    "paths": {"errors", "text"},
    "core": {"errors"},
    "rundir": {"errors", "text", "paths"},
    "stats": {"errors"},
    "distributed": {"errors", "text"},
    "plots": {"errors", "rundir", "stats", "text"},
    "packaged": {"errors", "text", "paths"},
    "chat_template": BASE,
    "template_worker": set(),  # a process of its own, which imports nothing of groupwise
    "data": BASE | {"chat_template"},
    "algorithms": BASE,
    "config": BASE | {"algorithms", "packaged"},
    "plugins": BASE,
    "user_code": BASE,
    "environments": BASE | {"user_code"},
    "model": BASE | {"algorithms", "config"},
    "planning": BASE | {"algorithms", "config"},
    "generate": BASE | {"algorithms", "config", "model", "plugins"},
    "rewards": BASE | {"algorithms", "chat_template", "config", "model", "user_code"},
    "grouping": BASE | {"algorithms", "config", "model"},
    "conversations": BASE | {"chat_template", "config", "data", "environments", "model", "generate"},
    "tasks": LIBRARY | {"conversations"},
    "evaluate": LIBRARY | {"conversations", "tasks"},
    "training": LIBRARY | {"conversations", "tasks", "evaluate"},
    "usmle": LIBRARY | {"conversations", "tasks", "evaluate", "training"},
    "analysis": LIBRARY | {"conversations", "tasks", "evaluate", "training"},
    "viewer": BASE | {"algorithms", "config", "tasks", "evaluate", "training", "analysis"},
    "control": BASE,
}
EVERYTHING = set(MAY_IMPORT)
MAY_IMPORT["integrations"] = EVERYTHING - {"usmle", "control"}
MAY_IMPORT["cli"] = EVERYTHING | {"integrations"}
MAY_IMPORT["trl"] = {"errors", "integrations"}  # only re-exports
MAY_IMPORT["__main__"] = {"cli"}
MAY_IMPORT["__init__"] = {"config", "training"}  # for the names at the top, on first use
APPLICATIONS = {"usmle", "control"}

# Packages that only some users have, or that take seconds to load: imported inside the functions that use them.
ONLY_INSIDE_FUNCTIONS = {
    "PIL", "datasets", "gymnasium", "imageio", "math_verify", "matplotlib", "openai", "openenv", "peft", "ray",
    "sentence_transformers", "sklearn", "stable_baselines3", "starlette", "tensorboardX", "trl", "uvicorn",
    "verifiers", "verl", "vllm", "wandb",
}  # fmt: skip


class Import(NamedTuple):
    part: str  # the part of groupwise that imports
    module: str  # what it imports, dotted
    names: tuple[str, ...]  # what it imports from there
    in_function: bool
    where: str

    @property
    def package(self) -> str:
        return self.module.split(".")[0]

    @property
    def imported_part(self) -> str | None:
        names = self.module.split(".")
        return names[1] if names[0] == "groupwise" and len(names) > 1 else None


def imports_of(source: str, path: Path) -> list[Import]:
    """Every import in a file of the package, wherever it is, type-checking blocks included."""
    relative = path.relative_to(PACKAGE)
    part = relative.parts[0].removesuffix(".py")
    tree = ast.parse(source, str(path))
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    imports = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["groupwise", *relative.parent.parts]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            names = tuple(alias.name for alias in node.names)
            # `from groupwise import core` imports a part; `from groupwise.core import gae` imports from one.
            modules = [(f"groupwise.{name}", ()) for name in names] if base == "groupwise" else [(base, names)]
        else:
            continue
        where = f"{relative}:{node.lineno}"
        imports += [Import(part, module, names, node in inside, where) for module, names in modules]
    return imports


@functools.cache
def all_imports() -> dict[str, list[Import]]:
    """The imports of every file of the package, by its module."""
    return {module_of(path): imports_of(path.read_text(), path) for path in FILES}


def violations(imports: list[Import]) -> list[str]:
    problems = []
    for entry in imports:
        target = entry.imported_part
        if target in MAY_IMPORT and target != entry.part and target not in MAY_IMPORT.get(entry.part, set()):
            problems.append(f"{entry.where}: {entry.part} may not import {target}")
        if entry.part == "cli" and target in APPLICATIONS and not entry.where.startswith(f"cli/{target}.py:"):
            problems.append(f"{entry.where}: only cli/{target}.py may import {target}")
        if entry.part == "core" and entry.package not in {"groupwise", "torch"} | set(sys.stdlib_module_names):
            problems.append(f"{entry.where}: core imports {entry.package}, but torch is all it may")
        if not entry.in_function and entry.package in ONLY_INSIDE_FUNCTIONS:
            problems.append(f"{entry.where}: import {entry.package} inside the function that needs it")
    return problems


def test_imports_point_down():
    imports = [entry for entries in all_imports().values() for entry in entries]
    assert len(imports) > 50
    assert violations(imports) == []


def test_every_part_has_its_place():
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert parts == set(MAY_IMPORT)


def module_of(path: Path) -> str:
    parts = ("groupwise", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(sources: dict[str, list[Import]]) -> dict[str, set[str]]:
    """Which file imports which, imports in type-checking blocks included.

    A package's ``__init__`` re-exports its files, and importing one of them runs it first. So an edge from a file to
    its own packages says nothing; and imports inside functions, which a package may use to load its names lazily, are
    left out of ``__init__`` files.
    """
    graph: dict[str, set[str]] = {}
    packages = {module for module in sources if any(other.startswith(f"{module}.") for other in sources)}
    for module, imports in sources.items():
        targets = set()
        for entry in imports:
            if module in packages and entry.in_function:
                continue
            submodules = {f"{entry.module}.{name}" for name in entry.names} & sources.keys()
            targets |= submodules or {entry.module} & sources.keys()
        graph[module] = {target for target in targets if target != module and not module.startswith(f"{target}.")}
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_cycle_between_files():
    sources = all_imports()
    graph = import_graph(sources)
    assert sum(map(len, graph.values())) > 200
    assert find_cycle(graph) == []


def test_a_cycle_would_be_found():
    def imports(module: str) -> Import:
        return Import("a", module, (), False, "")

    sources = {"a": [imports("a.x")], "a.x": [imports("a.y")], "a.y": [imports("a")]}
    assert find_cycle(import_graph(sources)) == []  # a file and its own package
    sources["a.y"].append(imports("a.x"))
    assert set(find_cycle(import_graph(sources))) == {"a.x", "a.y"}


def functions_that_take_a_trainer(source: str) -> list[str]:
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and any(
            argument.arg == "trainer" or "Trainer" in ast.unparse(argument.annotation or ast.Constant(None))
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        )
    ]


def test_only_callbacks_and_the_command_line_take_a_trainer():
    assert functions_that_take_a_trainer("def f(a, *, trainer): ...\ndef g(run: Trainer | None): ...") == ["f", "g"]
    takers = {
        str(path.relative_to(PACKAGE)): names
        for path in FILES
        if (names := functions_that_take_a_trainer(path.read_text()))
        and path.relative_to(PACKAGE).parts[0] not in ("cli", "integrations")  # verl has a trainer of its own
    }
    assert set(takers) <= {"training/trainer.py"}


def test_a_class_name_means_one_thing():
    names: Counter[str] = Counter()
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                names[node.name] += 1
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("file", "source", "problem"),
    [
        ("core/kl.py", "import numpy", "core imports numpy"),
        ("core/kl.py", "def f():\n    from transformers import x", "core imports transformers"),
        ("core/kl.py", "from groupwise.rundir import RunDir", "core may not import rundir"),
        ("stats.py", "from groupwise import plots", "stats may not import plots"),
        ("rundir/run.py", "from ..training import trainer", "rundir may not import training"),
        ("control/main.py", "from groupwise.model.load import load", "control may not import model"),
        ("training/trainer.py", "import groupwise.cli", "training may not import cli"),
        ("training/evaluation.py", "import groupwise.usmle.exam", "training may not import usmle"),
        ("evaluate/answers.py", "def f():\n    import groupwise.integrations.trl", "evaluate may not import integrat"),
        ("cli/evaluate.py", "import groupwise.usmle.exam", "only cli/usmle.py may import usmle"),
        ("plots.py", "import matplotlib.pyplot", "import matplotlib inside the function"),
    ],
)
def test_a_wrong_import_would_be_found(file, source, problem):
    (violation,) = violations(imports_of(source, PACKAGE / file))
    assert problem in violation


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
def test_a_right_import_is_accepted(file, source):
    assert violations(imports_of(source, PACKAGE / file)) == []


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = {"transformers", "sklearn", "gymnasium", "datasets", "matplotlib", "pyarrow", "pandas", "scipy", "trl"}


def test_importing_groupwise_loads_nothing_heavy():
    loaded = loaded_by("import groupwise; groupwise.__version__; dir(groupwise)")
    assert not loaded & (HEAVY | {"torch", "numpy"})


def test_a_recipe_is_read_and_a_display_is_made_without_torch():
    """So that a command shows what it does, and a wrong setting, before torch is loaded."""
    read = "import groupwise.packaged as p, groupwise.config as c, groupwise.algorithms as a\n"
    read += "for path in p.packaged_recipes().values(): c.load_recipe(path)\n"
    read += "for name in a.ALGORITHMS: c.make_recipe({'algorithm': name})\n"
    read += "from groupwise.training.display import make_display; make_display()"
    assert not loaded_by(read) & (HEAVY | {"torch"})


def test_a_page_is_shown_without_torch():
    """So that `groupwise view` opens at once; pyarrow is loaded with the first rollouts."""
    assert not loaded_by("from groupwise.viewer.api import Api; from groupwise.viewer.server import make_app") & (
        HEAVY | {"torch", "numpy"}
    )


def test_importing_the_core_loads_torch_alone():
    loaded = loaded_by("import groupwise; groupwise.core.gae")
    assert "torch" in loaded
    assert not loaded & HEAVY


def test_importing_plots_does_not_load_matplotlib():
    loaded = loaded_by("import groupwise; groupwise.plots, groupwise.stats, groupwise.rundir")
    assert not loaded & HEAVY


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'cor'"):
        _ = groupwise.cor


@pytest.mark.parametrize("package", ["groupwise", *(f"groupwise.{name}" for name in groupwise._SUBMODULES)])
def test_what_a_package_promises_is_there(package):
    """Names that are loaded lazily, too."""
    module = importlib.import_module(package)
    assert [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)] == []
