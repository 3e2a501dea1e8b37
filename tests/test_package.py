"""The release: what the files that are uploaded hold, and a user's first commands with nothing else installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import groupwise
from groupwise.config.names import RENAMED, RENAMED_VALUES
from groupwise.packaged import recipes_folder

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = groupwise.__version__
SKIPPED = ("__pycache__", ".pyc")
FEW_STEPS = ["--train.steps=3", "--train.batch_size=4", "--evaluate.every=0"]


# --- the project's own files -----------------------------------------------------------------------------------------


def test_the_changelog_has_this_version_and_every_renamed_setting():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE)[0] == VERSION
    values = [value for renamed in RENAMED_VALUES.values() for pair in renamed.items() for value in pair]
    assert [name for name in [*RENAMED, *RENAMED.values(), *values] if name not in text] == []


def test_every_dependency_is_pinned():
    """Also those of the extras, so that an installation with the constraints is always the same."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines if "==" in line}
    # constraints-verl.txt; constraints-vllm.txt; the others are not in the development environment
    own_environment = {"verl", "vllm", "wandb", "openenv", "verifiers"}
    for extra, requirements in {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}.items():
        names = {re.split(r"[\[<>=!; ]", requirement)[0].lower() for requirement in requirements} - {"groupwise"}
        assert extra in own_environment or names <= pinned, extra


def test_python_versions():
    assert PROJECT["requires-python"] == ">=3.11"
    versions = [name.split(" :: ")[-1] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert versions == ["3.11", "3.12"]


def test_messages_name_only_extras_that_exist():
    extras = {*PROJECT["optional-dependencies"]}
    named = set()
    for path in [*ROOT.glob("groupwise/**/*.py"), *ROOT.glob("recipes/*"), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            for listed in re.findall(r"groupwise\[([\w,]+)\]", text):
                named |= set(listed.split(","))
            named |= set(re.findall(r"MissingExtraError\([^)]*\"(\w+)\"\)", text))
    assert {"lora", "gguf", "hub"} <= named <= extras


def test_the_workflow_calls_what_must_pass():
    assert "- run: .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    script = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^make (\S+)$", script, re.MULTILINE) == ["lint", "docs", "build", "test-all"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


# --- the built files -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the source archive, and with the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    assert {path.suffix for path in folder.iterdir()} == {".gz", ".whl"}
    return folder


def run(*words, status=0, **options) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=1800, **options)
    assert done.returncode == status, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def files_in(folder: Path) -> set[str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)) for path in paths if not any(skipped in str(path) for skipped in SKIPPED)}


@pytest.mark.slow
def test_the_built_files(built):
    wheel = zipfile.ZipFile(next(built.glob("*.whl")))
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {f"groupwise/{name}" for name in files_in(ROOT / "groupwise")}
    assert names == package | {f"groupwise/recipes/{name}" for name in files_in(recipes_folder())}
    assert "groupwise/py.typed" in names
    assert {
        f"groupwise/cli/starter/{name}" for name in ("recipe.toml", "rewards.py", "rows.jsonl", "README.md")
    } <= names
    facts = message_from_string(wheel.read(f"groupwise-{VERSION}.dist-info/METADATA").decode())
    assert facts["Version"] == VERSION
    assert facts["License-Expression"] == "Apache-2.0"
    assert {url.split(",")[0] for url in facts.get_all("Project-URL")} >= {
        "Homepage",
        "Documentation",
        "Changelog",
        "Issues",
    }
    assert "Typing :: Typed" in facts.get_all("Classifier")
    readme = facts.get_payload()
    targets = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", readme)
    assert len(targets) > 20
    assert all("".join(target).startswith(("https://", "#")) for target in targets)  # a package index has no files
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "CHANGELOG.md",
        "LICENSE",
        "README.md",
        "constraints.txt",
        "recipes/quiz.toml",
        "tests/conftest.py",
    } <= inside
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir())


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The ``bin`` folder of an environment that has the wheel and its base dependencies only."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    binaries = folder / "bin"
    wheel = next(built.glob("*.whl"))
    run(binaries / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    return binaries


def make_user(installed, tmp_path):
    """A function that runs the installed command in an empty folder, without the source tree or a fetched model."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"GROUPWISE_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    work = tmp_path / "work"
    work.mkdir(parents=True)

    def groupwise_in(*words, status=0):
        done = run(installed / "groupwise", *words, status=status, cwd=work, env=environment)
        assert "Traceback" not in done.stderr
        return done

    groupwise_in.folder = work
    groupwise_in.python = lambda code: run(installed / "python", "-c", code, cwd=work, env=environment).stdout.strip()
    return groupwise_in


def first_commands(groupwise_in):
    folder = groupwise_in.folder
    package = Path(groupwise_in.python("import groupwise; print(groupwise.__file__)")).parent
    assert ROOT not in package.parents
    assert groupwise_in("--version").stdout == f"groupwise {VERSION}\n"
    assert re.search(r"^quiz .*\n +needs nothing else", groupwise_in("recipes").stdout, re.MULTILINE)

    before = files_in(package / "recipes")
    small = ["--sft.steps=2", "--data.held_out_rows=16"]
    groupwise_in("train", "quiz", *FEW_STEPS, *small)
    (quiz,) = (folder / "runs").glob("*-quiz")
    assert (quiz / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (quiz / "model" / "model.safetensors").exists()
    more = ["--train.steps=4", *FEW_STEPS[1:]]
    assert "step 4/4" in groupwise_in("train", "quiz", *more, *small, "--resume").stdout
    assert files_in(package / "recipes") == before


def starter(groupwise_in):
    folder = groupwise_in.folder
    groupwise_in("init", "x")
    assert "steps: 3" in groupwise_in("check", "x/recipe.toml", "--quick", *FEW_STEPS).stdout
    groupwise_in("train", "x/recipe.toml", *FEW_STEPS)
    (run_folder,) = (folder / "runs").iterdir()
    assert (run_folder / "curves.png").exists()
    load = f"AutoModelForCausalLM.from_pretrained({str(run_folder / 'model')!r})"
    code = f"from transformers import AutoModelForCausalLM; print(type({load}))"
    assert "ForCausalLM" in groupwise_in.python(code)
    groupwise_in("sample", run_folder / "model", "Use only digits: ", "-n", "1", "--max-new-tokens", "4")


def missing_extras(groupwise_in):
    for words, extras in (
        (["train", "quiz", "--model.lora.rank", "4"], "lora"),
        (["train", "gsm8k", "--model.lora.rank", "4"], "gguf,lora,hub"),
        (["check", "creative"], "gguf,embed"),
        (["sample", "smollm2-135m", "Hello"], "gguf"),
        (["control", "train"], "control"),
    ):
        error = groupwise_in(*words, status=2).stderr.strip().splitlines()[-1]
        assert error.endswith(f"pip install 'groupwise[{extras}]'"), error
    assert not (groupwise_in.folder / "runs").exists()


def copied_recipe(groupwise_in):
    groupwise_in("recipes", "copy", "preference", "mine")
    groupwise_in(
        "train", "mine/preference.toml", *FEW_STEPS, "--sft.steps=2", "--data.held_out_rows=8", "--run.plot=false"
    )
    error = groupwise_in("recipes", "copy", "preference", "mine", status=2).stderr
    assert "exist already" in error


@pytest.mark.slow
def test_a_user_with_only_the_wheel(installed, tmp_path):
    """One test, so that parallel workers do not each install an environment of more than a gigabyte."""
    for part in (first_commands, starter, missing_extras, copied_recipe):
        part(make_user(installed, tmp_path / part.__name__))
