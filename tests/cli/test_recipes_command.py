"""Packaged recipes by name, and `groupwise recipes`: list, show, copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise import packaged
from groupwise.cli import _parse, main
from groupwise.cli.recipes import describe_needs, files_of, summary_of
from groupwise.cli.train import recipe_file_name, recipe_of
from groupwise.config import load_recipe, make_recipe
from groupwise.errors import ConfigError
from groupwise.packaged import find_recipe, packaged_recipes, recipes_folder
from groupwise.rundir import read_metrics
from groupwise.tasks import load_task

NAMES = [
    "creative",
    "distill-quiz",
    "format",
    "game",
    "gsm8k",
    "modes",
    "preference",
    "preference-data",
    "quiz",
    "usmle",
    "usmle-short",
]
SMALL = {
    "train.steps": 2,
    "train.batch_size": 2,
    "sft.steps": 1,
    "sft.batch_size": 2,
    "sampling.samples_per_prompt": 2,
    "data.held_out_rows": 2,
    "run.tensorboard": "false",
    "run.plot": "false",
}


def small(**settings):
    return [f"--{name}={value}" for name, value in {**SMALL, **settings}.items()]


# --- where they are --------------------------------------------------------------------------------------------------


def test_the_recipes_of_the_source_tree():
    assert recipes_folder() == Path(packaged.__file__).resolve().parents[1] / "recipes"
    assert list(packaged_recipes()) == NAMES


def test_the_recipes_of_an_installed_package(tmp_path, monkeypatch):
    """They are inside the package, and a folder ``recipes`` beside it is somebody else's."""
    for folder in ("site/groupwise/recipes", "site/recipes"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"{Path(folder).parts[-2]}.toml").touch()
    monkeypatch.setattr(packaged, "__file__", str(tmp_path / "site" / "groupwise" / "packaged.py"))
    assert list(packaged_recipes()) == ["groupwise"]


# --- a recipe by its name --------------------------------------------------------------------------------------------


def test_a_name_is_a_packaged_recipe(folder):
    assert find_recipe("quiz") == recipes_folder() / "quiz.toml"
    assert load_recipe("quiz") == load_recipe(recipes_folder() / "quiz.toml")
    (folder / "quiz").mkdir()  # a folder is no recipe
    assert find_recipe("quiz") == recipes_folder() / "quiz.toml"


def test_a_file_wins(folder):
    (folder / "quiz").write_text('algorithm = "gspo"')
    assert find_recipe("quiz") == Path("quiz")
    assert load_recipe("quiz").algorithm == "gspo"
    assert find_recipe("./quiz") == Path("quiz")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "quizz",
            ["there is no recipe quizz; did you mean 'quiz'?", "packaged recipes: creative, distill-quiz"],
        ),
        (
            "nothing",
            ["there is no recipe nothing (recipes here: mine.toml; packaged recipes: creative, distill-quiz"],
        ),
        ("nope.toml", ["there is no recipe nope.toml (recipes here: mine.toml; packaged recipes: creative"]),
        ("starter/nope.toml", ["there is no recipe starter/nope.toml (recipes in starter: recipe.toml; packaged"]),
        ("empty/nope.toml", ["there is no recipe empty/nope.toml (packaged recipes: creative"]),
        ("gone/nope.toml", ["there is no recipe gone/nope.toml: there is no folder gone (packaged recipes: creative"]),
        ("quiz.toml", ["there is no recipe quiz.toml", "without a folder and without .toml: quiz"]),
        ("recipes/quiz.toml", ["there is no recipe recipes/quiz.toml", "without a folder and without .toml: quiz"]),
        ("rows.jsonl", ["rows.jsonl does not exist", "a recipe is a TOML file"]),
        ("recipe.yaml", ["there is no recipe recipe.yaml", "a .toml file or the name of a packaged one: creative"]),
        ("mine", ["there is no recipe mine; did you mean mine.toml?"]),
        ("mien.toml", ["there is no recipe mien.toml; did you mean mine.toml?"]),
        ("starter", ["starter is a folder", "did you mean starter/recipe.toml?"]),
        ("empty", ["empty is a folder", "give a recipe's file"]),
        ("several", ["several is a folder", "give a recipe's file, such as one of a.toml, b.toml"]),
    ],
)
def test_a_name_that_is_no_recipe(folder, name, words):
    (folder / "mine.toml").touch()
    for inner in ("starter", "empty", "several"):
        (folder / inner).mkdir()
    for file in ("a.toml", "b.toml", "pyproject.toml"):
        (folder / "several" / file).touch()
    (folder / "starter" / "recipe.toml").touch()
    with pytest.raises(ConfigError) as error:
        find_recipe(name)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_every_command_names_the_packaged_recipes(folder, error_of, command):
    assert "did you mean 'quiz'?" in error_of(command, "quizz")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train quiz --resum", "`groupwise train` has no option --resum; did you mean '--resume'?"),
        ("train quiz --allow_changs", "did you mean '--allow-changed'?"),
        ("eval quiz --answer x", "`groupwise eval` has no option --answer; did you mean '--answers'?"),
        ("check quiz train.steps=3", "given as --section.key VALUE; did you mean --train.steps=3?"),
        ("check quiz other.toml", "'other.toml' is not understood"),
    ],
)
def test_misspelt_options(error_of, words, message):
    assert message in error_of(*words.split())


@pytest.mark.slow
def test_check_and_eval_take_a_name(folder, output_of):
    assert "task = 'quiz'" in output_of("check", "quiz", "--quick", *small())
    assert "accuracy" in output_of("eval", "quiz", "--data.held_out_rows", "4")


def test_a_run_is_found_by_the_name_of_its_recipe_s_file(folder):
    for words in (["quiz"], [str(recipes_folder() / "quiz.toml")]):
        arguments = _parse(["train", *words])
        assert recipe_of(arguments).task == "quiz"
        assert recipe_file_name(arguments.recipe) == "quiz.toml"
    (folder / "a").mkdir()
    assert recipe_file_name(Path("a/recipe.toml")) == "a/recipe.toml"
    assert recipe_file_name(Path("recipe.toml")) == f"{folder.name}/recipe.toml"


@pytest.mark.slow
def test_training_by_name_and_resuming(folder, output_of):
    """A run of a packaged recipe is found again by its name and by its path, and nothing is written to its folder."""
    before = listing(recipes_folder())
    output_of("train", "quiz", *small(**{"train.steps": 1}))
    (run,) = (folder / "runs").iterdir()
    output_of("train", "quiz", *small(), "--resume")
    assert steps_of(run) == [1, 2]
    output_of("train", str(recipes_folder() / "quiz.toml"), *small(**{"train.steps": 3}), "--resume")
    assert steps_of(run) == [1, 2, 3]
    assert listing(recipes_folder()) == before


def steps_of(run):
    return [row["step"] for row in read_metrics(run / "metrics.jsonl") if "learning_rate" in row]


def listing(folder):
    """Every file with its time and size; Python's own cache of compiled files does not count."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return sorted((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in paths if path.is_file())


@pytest.mark.slow
def test_two_folders_with_a_recipe_of_the_same_name(folder, output_of):
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "recipe.toml").write_text('task = "quiz"\n[data]\nchat = false\n')
        output_of("train", f"{name}/recipe.toml", *small(**{"run.name": name, "sampling.max_new_tokens": 1}))
    settings = small(**{"run.name": "a", "train.steps": 3, "sampling.max_new_tokens": 1})
    output_of("train", "a/recipe.toml", *settings, "--resume")
    steps = {path.name[-1]: steps_of(path) for path in (folder / "runs").iterdir()}
    assert steps == {"a": [1, 2, 3], "b": [1, 2]}


# --- list ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["recipes"], ["recipes", "list"]])
def test_the_list(folder, output_of, words):
    lines = output_of(*words).splitlines()
    assert [line.split()[0] for line in lines if line[:1].strip() and " " in line.strip()][:-1] == NAMES
    text = " ".join(" ".join(lines).split())
    for name, path in packaged_recipes().items():
        assert f"{name} {summary_of(path)} needs " in text
    assert (
        "needs qwen2.5-coder-1.5b (1.1 GB), openai/gsm8k from the hub, pip install 'groupwise[gguf,hub]', a GPU" in text
    )
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", NAMES)
def test_the_first_line_is_a_sentence(name):
    summary = summary_of(packaged_recipes()[name])
    assert len(summary) <= 100
    assert summary[0].isupper()
    assert summary.endswith(".")


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("quiz", []),
        ("preference", []),
        ("modes", ["wordllama (19 MB)"]),
        ("format", ["smollm2-135m (93 MB)", "pip install 'groupwise[gguf]'"]),
        ("creative", ["smollm2-135m (93 MB)", "minilm (84 MB)", "pip install 'groupwise[gguf,embed]'", "a GPU"]),
        ("usmle", ["qwen2.5-coder-1.5b (1.1 GB)", "pip install 'groupwise[gguf]'", "a GPU"]),
    ],
)
def test_needs(folder, name, needs):
    assert list(describe_needs(load_recipe(name))) == needs


def test_needs_of_other_recipes(folder):
    recipe = make_recipe({"model": {"source": "owner/model"}, "data": {"train": "rows.jsonl"}})
    assert list(describe_needs(recipe)) == ["owner/model", "the file rows.jsonl", "a GPU"]


# --- show and copy ---------------------------------------------------------------------------------------------------


def test_show(folder, output_of):
    assert output_of("recipes", "show", "quiz") == (recipes_folder() / "quiz.toml").read_text()


@pytest.mark.parametrize("name", ["quiz", "quizz", "quiz.toml"])
def test_a_forgotten_show(error_of, name):
    assert error_of("recipes", name).startswith(
        f"there is no `groupwise recipes {name}`; did you mean `groupwise recipes show quiz`? (there are: list, show"
    )


def test_an_unknown_action(error_of):
    assert "; did you mean 'copy'? (there are: list" in error_of("recipes", "cpy")
    assert error_of("recipes", "frob") == "there is no `groupwise recipes frob` (there are: list, show, copy)"
    assert "NAME is missing; usage: groupwise recipes show NAME, as in: " in error_of("recipes", "show")


@pytest.mark.parametrize("action", ["show", "copy"])
def test_an_unknown_name(folder, error_of, action):
    assert "no packaged recipe 'quizz'; did you mean 'quiz'? (there are: creative" in error_of(
        "recipes", action, "quizz"
    )
    assert error_of("recipes", action, "quiz.toml").endswith("without .toml: quiz")
    assert "no packaged recipe '../recipes/quiz'" in error_of("recipes", action, "../recipes/quiz")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("quiz", ["quiz.toml"]),
        ("format", ["format.py", "format.toml"]),
        ("preference", ["preference.py", "preference.toml"]),
        ("creative", ["creative.toml", "data/writing_prompts.jsonl"]),
        (
            "preference-data",
            ["data/preference_pairs.jsonl", "data/writing_prompts.jsonl", "preference-data.toml"],
        ),
    ],
)
def test_the_files_of_a_recipe(name, files):
    assert files_of(packaged_recipes()[name]) == files


def test_files_in_folders_and_options_belong_to_a_recipe(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("data/1.jsonl", "data/2.jsonl", "mine.py", "unused.py", "rubric.txt"):
        (tmp_path / name).write_text("{}")
    path = tmp_path / "r.toml"
    path.write_text(
        '[data]\ntrain = "data"\n[loss]\nname = "mine.py:loss"\n'
        '[[rewards]]\nfunction = "judge"\noptions = { model = "m", rubric = "rubric.txt" }\n'
    )
    assert files_of(path) == ["data/1.jsonl", "data/2.jsonl", "mine.py", "r.toml", "rubric.txt"]


def test_copying(folder, output_of):
    output = output_of("recipes", "copy", "creative", "mine")
    assert output.splitlines() == [
        "wrote mine/creative.toml",
        "wrote mine/data/writing_prompts.jsonl",
        "next: groupwise train mine/creative.toml",
    ]
    for name in ("creative.toml", "data/writing_prompts.jsonl"):
        assert (folder / "mine" / name).read_bytes() == (recipes_folder() / name).read_bytes()
    assert load_recipe("mine/creative.toml").data.train == "mine/data/writing_prompts.jsonl"


def test_the_default_folder_has_the_recipe_s_name(folder, output_of):
    output_of("recipes", "copy", "quiz")
    assert [path.relative_to(folder) for path in folder.rglob("*.*")] == [Path("quiz/quiz.toml")]


def test_a_copy_into_a_folder_with_other_files(folder, output_of):
    (folder / "other.txt").touch()
    output_of("recipes", "copy", "quiz", ".")
    assert sorted(path.name for path in folder.iterdir()) == ["other.txt", "quiz.toml"]


def test_next_is_a_command_that_a_shell_understands(folder, output_of):
    assert output_of("recipes", "copy", "quiz", "my run").endswith("next: groupwise train 'my run/quiz.toml'\n")


def test_nothing_is_overwritten(folder, error_of):
    (folder / "mine").mkdir()
    (folder / "mine" / "format.py").write_text("mine")
    error = error_of("recipes", "copy", "format", "mine")
    assert "mine/format.py exists already" in error
    assert [path.name for path in (folder / "mine").iterdir()] == ["format.py"]
    assert (folder / "mine" / "format.py").read_text() == "mine"
    (folder / "mine" / "format.toml").symlink_to("nowhere")  # a link that leads nowhere is in the way, too
    assert "mine/format.py, mine/format.toml exist already" in error_of("recipes", "copy", "format", "mine")


def test_a_file_in_the_place_of_a_folder(folder, error_of):
    (folder / "file").write_text("mine")
    for target in ("file", "file/deeper"):
        assert "file is a file, not a folder" in error_of("recipes", "copy", "quiz", target)
    assert (folder / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_written(folder, error_of, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert error_of("recipes", "copy", "quiz", "new") == "new/quiz.toml cannot be written: Permission denied"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gsm8k"])
def test_a_copy_is_complete(folder, output_of, name, monkeypatch):
    """Its task, its rows and its functions are found, although the packaged folder is out of reach."""
    output_of("recipes", "copy", name, "copy")
    monkeypatch.setattr(packaged, "recipes_folder", lambda: folder / "nowhere")
    recipe = load_recipe(f"copy/{name}.toml", {"data.train_rows": 60, "data.held_out_rows": 2})
    task = load_task(recipe)
    assert task.train
    assert str(recipes_folder()) not in str(recipe.model_dump())


@pytest.mark.slow
def test_a_copy_trains_in_another_process(tmp_path):
    groupwise = [sys.executable, "-m", "groupwise"]
    environment = {**os.environ, "PYTHONPATH": str(Path(packaged.__file__).parents[1])}
    run = {"cwd": tmp_path, "env": environment, "check": True, "capture_output": True}
    subprocess.run([*groupwise, "recipes", "copy", "quiz", "copy"], **run)
    subprocess.run([*groupwise, "train", "copy/quiz.toml", *small(**{"run.folder": "run"})], **run)
    assert steps_of(tmp_path / "run") == [1, 2]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_package(folder, monkeypatch, output_of):
    copy = folder / "site" / "groupwise" / "recipes"
    shutil.copytree(recipes_folder(), copy)
    for path in [*copy.rglob("*"), copy]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    monkeypatch.setattr(packaged, "recipes_folder", lambda: copy)
    assert main(["train", "quiz", *small()]) == 0
