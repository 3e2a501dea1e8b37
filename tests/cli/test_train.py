"""`groupwise train`, `check` and `eval` on the command line, and their error messages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest

from groupwise.cli import main
from groupwise.cli.settings import USUAL, parse_settings, settings_help, split_settings
from groupwise.config import Recipe, load_recipe, make_recipe, scheduled_names, setting_names
from groupwise.config.names import USUAL_SETTINGS
from groupwise.rundir import read_metrics

RECIPE = """
[model]
gradient_checkpointing = false

[data]
train = "rows.jsonl"
chat = false

[sampling]
max_new_tokens = 8
samples_per_prompt = 4

[train]
steps = 2
batch_size = 2
accumulation = 1

[run]
tensorboard = false
plot = false

[[rewards]]
function = "scores.py:vowels"
"""
SCORES = """
def vowels(prompts, completions, **_):
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]

def needs_gold(prompts, completions, gold, **_):
    return [0.0] * len(prompts)

def breaks(prompts, completions, **_):
    return [1 / 0 for _ in prompts]

def counts_steps(prompts, completions, trainer_state, **_):
    return [float(trainer_state.global_step + number % 2) for number in range(len(prompts))]
"""
GSM8K = [
    {"question": f"Tom has {number} apples and buys one more. How many has he?", "answer": f"#### {number + 1}"}
    for number in range(4)
]


def jsonl(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory with a recipe, rows and rewards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "r.toml").write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text(jsonl(*({"prompt": f"Say {number}: "} for number in range(4))))
    (tmp_path / "scores.py").write_text(SCORES)
    return tmp_path


def run_folders(folder):
    return [path.name for path in (folder / "runs").glob("*")]


@pytest.fixture
def complaint(capsys):
    """Run a command that fails with exit status 2, and return its one line on stderr."""

    def run(*arguments):
        assert main(list(arguments)) == 2
        output = capsys.readouterr()
        assert output.err.startswith("groupwise: ")
        assert output.err.endswith("\n")
        assert output.err.count("\n") == 1
        return output.err.removeprefix("groupwise: ").rstrip()

    return run


# --- errors, in one line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_a_misspelt_key_on_the_command_line(complaint, command):
    message = complaint(command, "r.toml", "--train.setps", "3")
    assert message.startswith("unknown setting --train.setps; did you mean 'train.steps'?")
    assert "--help" in message


@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_a_renamed_setting(complaint, here, command):
    assert complaint(command, "r.toml", "--train.refill", "3") == "--train.refill is now --train.resample_rounds"
    assert complaint(command, "r.toml", "--model.name=tiny") == "--model.name is now --model.source"
    assert complaint(command, "r.toml", "--loss.kl", "full_document") == (
        "on the command line: loss.kl 'full_document' is now 'full_ratio_weighted'"
    )
    (here / "r.toml").write_text(RECIPE.replace("plot = false", "picture = false"))
    assert complaint(command, "r.toml") == "r.toml: run.picture is now run.plot"


@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_a_misspelt_key_in_the_recipe(complaint, here, command):
    (here / "r.toml").write_text(RECIPE.replace("[train]\nsteps", "[train]\nstpes"))
    assert complaint(command, "r.toml") == "r.toml: unknown key 'train.stpes'; did you mean 'steps'?"


# a command line, and what its error must contain
WRONG = [
    (["--train.steps", "three"], ["on the command line: train.steps = 'three'", "an integer of at least 0"]),
    (["--train.steps=4.0"], ["on the command line: train.steps = 4.0", "an integer of at least 0: write 4"]),
    (["--train.steps"], ["--train.steps needs a value: an integer of at least 0"]),
    (["--loss.kl", "--train.steps", "3"], ["--loss.kl needs a value: one of k1, k2, k3, unbiased"]),
    (["--model.source", "--train.steps=3"], ["--model.source needs a value: a string"]),
    (["--rewards.0.weight"], ["--rewards.0.weight needs a value: a number"]),
    (["--rewards.1.weight", "2"], ["no rewards.1: the recipe has 1 entry of [[rewards]], numbered from 0"]),
    (["--phases.0.steps", "2"], ["no phases.0: the recipe has no [[phases]]"]),
    (["--rewards.weight", "2"], ["--rewards.0.weight"]),
    (["--use_unbiased_kl"], ["did you mean `--loss.kl unbiased`?"]),
    (["--train.steps", "3", "--train.steps=4"], ["--train.steps is given twice"]),
    (["--algorithm", "grop"], ["on the command line: unknown algorithm 'grop'; did you mean 'grpo'?", "'dapo'"]),
    (["--task", "quizz"], ["unknown task 'quizz'; did you mean 'quiz'?", "'rows'", "'gsm8k'", "'usmle'"]),
    (["--loss.kl", "unbiasd"], ["on the command line: loss.kl cannot be 'unbiasd'; did you mean 'unbiased'?", "k1"]),
    (["more.toml"], ["'more.toml' is not understood", "--section.key VALUE"]),
    (["-x"], ["'-x' is not understood"]),
    (["--rewards", "[]"], ["no reward", "[[rewards]]"]),
    (["--rewards", '[{function = "scores.py:vowls"}]'], ["'scores.py:vowls'", "did you mean 'vowels'?", "needs_gold"]),
    (["--rewards", '[{function = "nomodule:f"}]'], ["'nomodule:f'", "'nomodule'", "{here}"]),
    (["--rewards", '[{function = "nofile.py:f"}]'], ["'nofile.py:f'", "{here}/nofile.py"]),
    (["--model.source", "smollm2-135"], ["'smollm2-135'", "did you mean 'smollm2-135m'?", "tiny", "owner/name"]),
    (["--model.source", "./nowhere"], ["nowhere", "{here}"]),
    (["--data.train", "row.jsonl"], ["'row.jsonl' in {here}; did you mean 'rows.jsonl'?"]),
    (["--data.train", "none"], ["the task 'rows'", "data.train", ".jsonl"]),
    (["--data.prompt", "question"], ["no row of rows.jsonl has a column 'question' (columns: 'prompt')"]),
    (["--data.max_prompt_length", "5"], ["rows.jsonl, line 1: the prompt has 7 tokens", "max_prompt_length=5",
                                         "4 prompts are too long", "on_too_long='drop'"]),
    (["--data.system_prompt", "Be brief."], ["system_prompt", "plain texts", "chat=True"]),
    (["--sampling.max_new_tokens", "5000"], ["7 tokens", "sampling.max_new_tokens 5000", "4096"]),
    (["--data.held_out", "rows.jsonl", "--evaluate.max_new_tokens", "5000"],
     ["held-out", "7 tokens", "evaluate.max_new_tokens 5000", "4096"]),
    (["--phases", '[{ name = "a", temprature = 0.5 }]'], ["[[phases]] number 1", "'temprature'", "'temperature'?"]),
    (["--advantages.function", "scores.py:mine"], ["'scores.py:mine'", "no 'mine' in scores.py", "vowels"]),
    (["--advantages.grouping", "promt"], ["'promt'; did you mean 'prompt'?", "'similarity'", "'module:function'"]),
    (["--data.held_out", "rows.jsonl", "--evaluate.metric", "accuracy"], ["evaluate.metric 'accuracy'", "reward"]),
]  # fmt: skip


def test_wrong_command_lines(complaint, here):
    failures = []
    for words, fragments in WRONG:
        message = complaint("train", "r.toml", *words)
        missing = [fragment for fragment in fragments if fragment.replace("{here}", str(here)) not in message]
        if missing or (here / "runs").exists():
            failures.append((words, message, missing, run_folders(here)))
    assert not failures


@pytest.mark.parametrize(
    "words",
    [
        ["--rewards", '[{function = "scores.py:vowls"}]'],
        ["--data.train", "row.jsonl"],
        ["--sampling.max_new_tokens", "5000"],
        ["--advantages.function", "scores.py:mine"],
        ["--advantages.grouping", "promt"],
        ["--data.held_out", "rows.jsonl", "--evaluate.metric", "accuracy"],
    ],
)
def test_check_and_train_have_the_same_errors(complaint, words):
    assert complaint("check", "r.toml", "--quick", *words) == complaint("train", "r.toml", *words)


@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_a_metric_is_checked_before_the_model_is_loaded(complaint, monkeypatch, command):
    monkeypatch.setattr("groupwise.training.components.load_model_and_tokenizer", None)
    words = ["--data.held_out", "rows.jsonl", "--evaluate.metric"]
    message = complaint(command, "r.toml", *words, "rewrad")
    assert "evaluate.metric 'rewrad'" in message
    assert "did you mean 'reward'?" in message
    message = complaint(command, "r.toml", *words, "x", "--preference.held_out", "rows.jsonl")
    assert "(there are: reward, preference_accuracy)" in message


def test_a_reward_that_needs_a_missing_column(complaint):
    message = complaint("check", "r.toml", "--rewards", '[{function = "scores.py:needs_gold"}]')
    assert "'needs_gold' needs" in message
    assert "'gold'" in message


BAD_ROWS = [
    ('{"prompt": "a"}\n{"prompt": 5}\n', "bad.jsonl, line 2: the prompt is of type int"),
    ('{"prompt": "a"}\n{"prompt": "b"\n', "bad.jsonl, line 2, column 15: this is not JSON"),
    ('{"prompt": "a"}\n\n{"prompt": " "}\n', "bad.jsonl, line 3: the prompt is empty"),
    ('{"prompt": "a"}\n{"promt": "b"}\n', "bad.jsonl, line 2 has no column 'prompt'; did you mean 'promt'?"),
    ("", "bad.jsonl is empty"),
    ("\n\n", "bad.jsonl is empty"),
    (jsonl({"prompt": "a"}, {"prompt": "x" * 600}), "bad.jsonl, line 2: the prompt has 600 tokens"),
]


@pytest.mark.parametrize("part", ["train", "held_out"])
def test_bad_rows_by_file_and_line(complaint, here, part):
    for text, sentence in BAD_ROWS:
        (here / "bad.jsonl").write_text(text)
        assert complaint("train", "r.toml", f"--data.{part}", "bad.jsonl").startswith(sentence)
        assert not run_folders(here), text


def test_a_model_without_a_chat_template(complaint, capsys, here):
    from groupwise.model.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tiny_model().save_pretrained(here / "plain")
    tokenizer.save_pretrained(here / "plain")
    capsys.readouterr()
    (here / "chat.jsonl").write_text(jsonl({"prompt": [{"role": "user", "content": "Hi"}]}))
    words = ["check", "r.toml", "--quick", "--model.source", "./plain"]
    message = complaint(*words, "--data.train", "chat.jsonl")
    assert message.startswith("the column 'prompt' holds messages, but the tokenizer has no chat template")
    assert complaint(*words, "--data.chat").startswith("chat=True, but the tokenizer has no chat template")
    assert main(words) == 0


def test_recipes_that_cannot_be_read(complaint, here):
    assert complaint("train", "t.toml").startswith(
        "there is no recipe t.toml (recipes here: r.toml; packaged recipes: "
    )
    (here / "bad.toml").write_text("[train]\nsteps = \n")
    assert complaint("train", "bad.toml") == "bad.toml is not valid TOML: Invalid value (at line 2, column 9)"
    (here / "bad.json").write_text('{"train": ')
    assert complaint("check", "bad.json") == "bad.json is not valid JSON: Expecting value (at line 1, column 11)"


def test_several_errors_have_a_line_each(capsys, here):
    assert main(["check", "r.toml", "--train.steps", "-1", "--sampling.temperature", "hot\n\x1b[0m"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [
        "groupwise: 2 errors on the command line:",
        "  sampling.temperature = 'hot\\n\\x1b[0m' cannot be used; "
        "it should be a number of at least 1e-06 and at most 1e+06",
        "  train.steps = -1 cannot be used; it should be an integer of at least 0",
    ]
    (here / "r.toml").write_text(RECIPE.replace("steps = 2\nbatch_size", "setps = 2\nbatchsize"))
    assert main(["check", "r.toml"]) == 2
    first, *errors = capsys.readouterr().err.splitlines()
    assert first == "groupwise: 2 errors in r.toml:"
    assert errors == [
        "  unknown key 'train.setps'; did you mean 'steps'?",
        "  unknown key 'train.batchsize'; did you mean 'batch_size'?",
    ]


def test_rows_instead_of_a_recipe(complaint, here):
    (here / "nothere.toml").write_text(RECIPE)
    for name in ("nothere.jsonl", "rows.jsonl"):
        message = complaint("train", name)
        assert "a recipe is a TOML file" in message
        assert "groupwise init" in message
        assert f"--data.train {name}" in message
        assert "did you mean" not in message


def test_a_reward_that_breaks_during_training(complaint):
    message = complaint("train", "r.toml", "--rewards", '[{function = "scores.py:breaks"}]', "--run.folder", "run")
    assert "reward 'breaks'" in message
    assert "ZeroDivisionError: division by zero (scores.py, line 9)" in message


def test_nothing_to_evaluate(complaint, here):
    assert "data.held_out" in complaint("eval", "r.toml")
    assert "--answers . is a folder" in complaint("eval", "r.toml", "--data.held_out", "rows.jsonl", "--answers", ".")


def test_nothing_to_resume(complaint, here):
    message = complaint("train", "r.toml", "--resume")
    assert "r.toml" in message
    assert "--run.folder" in message
    assert "gone" in complaint("train", "r.toml", "--resume", "--run.folder", "gone")


def test_without_a_recipe(capsys):
    assert main(["train", "--train.steps", "3"]) == 2
    assert "RECIPE is missing; usage: groupwise train RECIPE" in capsys.readouterr().err


@pytest.mark.slow
def test_as_a_process(here):
    """Exit status 2 and one line on stderr, without a traceback or colours."""
    command = [sys.executable, "-m", "groupwise", "check", "r.toml", "--trian.steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "40"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("groupwise: unknown setting --trian.steps; did you mean 'train.steps'?")
    assert done.stderr.count("\n") == 1


# --- settings on the command line ------------------------------------------------------------------------------------


def test_settings_are_parsed():
    _, settings = split_settings(
        ["--train.steps", "3", "--loss.entropy_coef", "-0.5", "--run.name=a=b", "--data.shuffle", "--train.batch-size",
         "2", "--sampling.stop", '["a"]', "--model.revision", "none", "--optimizer.learning-rate=-1e-3"], ()
    )  # fmt: skip
    assert parse_settings(settings) == {
        "train.steps": 3,
        "loss.entropy_coef": -0.5,
        "run.name": "a=b",
        "data.shuffle": True,
        "train.batch_size": 2,
        "sampling.stop": ["a"],
        "model.revision": None,
        "optimizer.learning_rate": -1e-3,
    }
    assert parse_settings([]) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.steps", "3"], "'train.steps' is not understood; settings are given as --section.key VALUE"),
        (["--train.steps", "3", "4"], "'4' is not understood"),
        (["--train.batch-size", "3", "--train.batch_size", "3"], "--train.batch_size is given twice"),
    ],
)
def test_invalid_settings(complaint, words, message):
    assert complaint("train", "r.toml", *words).startswith(message)


def test_settings_may_come_before_the_recipe(capsys):
    assert main(["check", "--train.steps", "7", "r.toml", "--quick", "--loss.entropy_coef", "-1e-3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  train.steps = 7" in lines
    assert "  loss.entropy_coef = -0.001" in lines


def test_split_settings():
    words = ["--a.b", "1", "r.toml", "--quick", "--c.d=2", "-h", "--switch", "--answers", "file", "--e.f", "-3", "x"]
    command, settings = split_settings(words, {"--quick", "--answers", "-h"})
    assert command == ["r.toml", "--quick", "-h", "--answers", "file", "x"]
    assert settings == [("a.b", "1"), ("c.d", "2"), ("switch", None), ("e.f", "-3")]


def test_a_switch_needs_no_value():
    switches = ["--data.shuffle", "--data.chat", "--model.compile", "--task_options.anything"]
    command, settings = split_settings([*switches, "--train.steps", "3"], ())
    assert command == []
    assert parse_settings(settings) == {
        "data.shuffle": True,
        "data.chat": True,
        "model.compile": True,
        "task_options.anything": True,
        "train.steps": 3,
    }


def test_an_entry_of_a_list_on_the_command_line(capsys):
    words = ["--rewards.0.weight", "0.5", "--rewards.0.name=mine"]
    assert main(["check", "r.toml", "--quick", *words]) == 0
    assert "rewards: mine × 0.5" in capsys.readouterr().out.splitlines()


# --- help ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def help_of(capsys, monkeypatch):
    """What a help option prints."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        with pytest.raises(SystemExit) as caught:
            main(list(words))
        assert caught.value.code == 0
        output = capsys.readouterr()
        assert output.err == ""
        return output.out

    return run


@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_help_has_the_usual_settings_and_the_sections(command, help_of):
    text = help_of(command, "--help")
    lines = text.splitlines()
    assert lines[0].startswith(f"usage: groupwise {command} RECIPE")
    assert len(lines) <= 75
    assert [line for line in text.split("examples:")[0].splitlines() if len(line) > 80] == []
    settings = re.findall(r"^  --(\w+\.?[\w.]*)  +\S", text, re.MULTILINE)
    fields = dict(setting_names())
    usual = [name for name in settings if name in fields]
    assert usual == list(USUAL.get(command, USUAL_SETTINGS))
    assert len(usual) == (20 if command != "eval" else 11)
    for name in Recipe.model_fields:
        if name not in ("task", "algorithm"):
            assert re.search(rf"^  {name}  +\S", text, re.MULTILINE), name
    assert f"`groupwise {command} --help SECTION`" in text
    assert "--help all" in text
    assert text.split("examples:\n")[1].startswith(f"  groupwise {command} ")


def test_the_usual_settings_show_their_defaults(help_of):
    text = help_of("train", "-h")
    for name in USUAL_SETTINGS:
        default = dict(setting_names())[name].get_default()
        (line,) = [line for line in text.splitlines() if line.startswith(f"  --{name} ")]
        if isinstance(default, (int, float)) and name != "model.lora.rank":
            assert line.endswith(f"[{default:g}]"), line


@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_help_all_lists_every_setting(command, help_of):
    text = help_of(command, "--help", "all")
    flat = " ".join(text.split())
    for name, field in setting_names():
        if name not in ("rewards", "phases", "ramps", "rules"):
            assert f"\n  --{name}\n" in text
            assert " ".join(field.description.split()) in flat
    assert max(map(len, text.splitlines())) <= 120


def test_help_of_a_section(help_of, complaint):
    text = help_of("train", "--help", "model")
    shown = re.findall(r"^  --(\S+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted(name for name, _ in setting_names() if name.startswith("model."))
    assert shown[-1].startswith("model.lora.")
    assert help_of("check", "r.toml", "--help=reference") == help_of("train", "--help", "[reference]")
    assert "--rewards.0.weight" in help_of("train", "--help", "rewards")
    assert 'function = "rewards.py:is_short"' in help_of("train", "--help", "rewards")
    for table in ("phases", "ramps", "rules"):
        text = help_of("train", "--help", table)
        assert f"[{table}]" in text
        assert "sampling.temperature" in text  # what can be scheduled
    assert help_of("eval", "--help", "train.steps").startswith("  --train.steps\n")
    message = complaint("train", "--help", "samplin")
    assert message.startswith("there is no section 'samplin'; did you mean 'sampling'? (sections: model, ")


@pytest.mark.parametrize("words", [["train", "--help"], ["eval", "--help", "all"], ["check", "r.toml", "-h", "loss"]])
def test_help_does_not_load_torch(words):
    code = f"import sys\nfrom groupwise.cli import main\ntry:\n    main({words})\nfinally:\n"
    code += "    print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "pydantic" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "rich"}


def test_defaults_and_choices_in_help():
    text = settings_help()
    flat = " ".join(text.split())
    assert "(one of auto, float32, bfloat16, float16, float64; default: auto)" in flat
    assert "(one of token, sequence, sequence_product)" in flat  # off by default
    assert "on-policy ratios differ from 1 (default: 0)" in flat  # not false
    assert "(default: 1e-06)" in flat
    assert "default: True" not in flat
    assert "default: None" not in flat
    assert re.findall(r"^  \[(\w+)\]$", text, re.MULTILINE) == [
        "model", "data", "scoring", "sampling", "environment", "vllm", "advantages", "grouping", "loss",
        "preference", "distillation", "masks", "reference", "optimizer", "sft", "train", "evaluate", "run",
    ]  # fmt: skip
    for name in scheduled_names(make_recipe()):
        assert name in flat


def test_the_examples_in_the_help_are_recipes():
    from groupwise.training.inputs import make_schedule

    lines = settings_help().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("  [[rewards]]"))
    shown = [line[6:] for line in lines[start:] if line.startswith("      ")]
    end = next(number for number, line in enumerate(shown) if "scoring.overlong_buffer," in line)
    table = tomllib.loads("\n".join(shown[:end]))
    recipe = make_recipe(table)
    assert set(table) == {"rewards", "phases", "ramps", "rules"}
    assert recipe.rewards[0].function == "rewards.py:is_short"
    schedule = make_schedule(recipe)
    assert schedule.phase(0, 0) == "warm-up"
    assert schedule.values(0, 0)["sampling.temperature"] == 1.0  # a ramp overrides a phase
    assert schedule.values(100, 0)["loss.kl_coef"] == pytest.approx(0.01)


# --- check -----------------------------------------------------------------------------------------------------------


def test_check_shows_everything_and_writes_nothing(here, capsys):
    before = sorted(here.rglob("*"))
    assert main(["check", "r.toml", "--all", "--data.held_out", "rows.jsonl", "--data.held_out_rows", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [path for path in sorted(here.rglob("*")) if "__pycache__" not in str(path)] == before
    assert lines[0] == "settings (algorithm dapo; * differs from the default)"
    shown = {line[4:].partition(" = ")[0]: line for line in lines if line.startswith(("  * ", "    "))}
    for name, _ in setting_names():
        assert name in shown or name.startswith(("model.lora.", "task_options"))
    assert shown["train.steps"] == "  * train.steps = 2"
    assert shown["train.seed"] == "    train.seed = 0"
    text = "\n".join(lines)
    assert "data: 4 rows to train on, 3 held out; prompts of 7 tokens on average, 7 at most" in lines
    assert "rewards: vowels × 1" in lines
    assert "the first prompt, as the model sees it: 'Say 0: '" in lines
    assert "model: tiny, 279,552 weights to train, torch.float32, on cpu" in lines
    assert "    1.1 MiB  weights" in lines  # 279,552 × 4 bytes
    assert "    2.1 MiB  AdamW" in lines
    assert re.search(r" beside the weights, of [\d.]+ GiB that are free: fits", text)
    assert "steps: 2, each with 8 completions of up to 8 tokens" in lines
    assert re.search(r"reward vowels of 4 completions of 8 tokens: [\d.]+ to [\d.]+", text)
    assert re.search(r"time: about [\d.]+ s a step .* \(from completions of 8 tokens", text)


def test_check_shows_the_chosen_settings(capsys):
    assert main(["check", "r.toml", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  train.steps = 2" in lines
    assert not any("train.seed" in line for line in lines)
    assert "--all" in lines[0]


def test_check_calls_the_rewards(complaint, here, capsys):
    """A reward that always fails is found before training, unless nothing is sampled."""
    (here / "boom.py").write_text("def boom(completions, **columns):\n    raise ValueError('no key')\n")
    words = ["r.toml", "--rewards.0.function", "boom.py:boom"]
    message = complaint("check", *words)
    assert "'boom'" in message
    assert "no key" in message
    assert main(["check", *words, "--quick"]) == 0
    capsys.readouterr()
    assert main(["check", *words, "--scoring.on_error", "drop"]) == 0
    assert "reward boom failed on 4 of 4 completions" in capsys.readouterr().out


def test_check_quick_has_no_time(capsys):
    assert main(["check", "r.toml", "--quick"]) == 0
    assert "time: about" not in capsys.readouterr().out


PHASES = """
data = { train = "rows.jsonl", chat = false }
rewards = [{ function = "scores.py:vowels" }]
train = { batch_size = 2, accumulation = 1 }
sampling = { samples_per_prompt = 2, max_new_tokens = 4 }
phases = [{ name = "first", steps = 4, kl_coef = 0.1 }, { name = "second", LENGTH, kl_coef = 0.2 }]
"""


@pytest.mark.parametrize(
    ("length", "words", "steps", "phases"),
    [
        ("epochs = 2", [], "8", "first (4 steps), second (4 steps)"),  # of four rows
        ("epochs = 2", ["--train.steps=4"], "4", "first (4 steps), second (4 steps, not reached)"),
        ("tokens = 65", [], "at least 9", "first (4 steps), second (65 tokens)"),  # at most 16 a step
        ("share = 0.5", ["--train.epochs=5"], "10", "first (4 steps), second (5 steps)"),
    ],
)
def test_check_shows_the_phases(capsys, here, length, words, steps, phases):
    (here / "r.toml").write_text(PHASES.replace("LENGTH", length))
    assert main(["check", "r.toml", "--quick", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"steps: {steps}, each with 4 completions of up to 4 tokens" in lines
    assert f"phases: {phases}" in lines


@pytest.mark.parametrize("command", ["check", "train"])
def test_phases_that_do_not_fit(here, complaint, command):
    (here / "r.toml").write_text(PHASES.replace("LENGTH", "share = 0.5"))
    error = complaint(command, "r.toml")
    assert "no room for phase 'second'" in error
    assert "7 steps or more, and the run has 6 (train.epochs 3)" in error
    assert not list((here / "runs").glob("*"))


def test_check_with_many_settings(capsys, here):
    words = ["--model.lora.rank", "4", "--loss.kl_coef", "0.1", "--phases", '[{ name = "first", temperature = 0.5 }]',
             "--data.max_prompt_length", "6", "--data.on_too_long", "drop"]  # fmt: skip
    (here / "rows.jsonl").write_text(jsonl({"prompt": "Short:"}, {"prompt": "Longer: "}))
    assert main(["check", "r.toml", "--quick", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  model.lora.rank = 4" in lines
    assert "phases: first (to the end)" in lines
    assert "1 of 2 training rows are left out: their prompts have more than 6 tokens" in lines
    assert any(line.endswith("  reference") for line in lines)


@pytest.fixture
def pairs(here, monkeypatch):
    """A recipe for a dataset of pairs, without rows, rewards or sampling."""
    monkeypatch.setenv("GROUPWISE_CACHE", str(here / "cache"))
    rows = [{"prompt": f"Say {n}: ", "chosen": f"{n} is said", "rejected": "no"} for n in range(10, 20)]
    (here / "pairs.jsonl").write_text(jsonl(*rows))
    (here / "p.toml").write_text(
        'algorithm = "dpo"\n[model]\nsource = "tiny"\ngradient_checkpointing = false\n[data]\nchat = false\n'
        '[preference]\ntrain = "pairs.jsonl"\nheld_out_from_train = 2\nbatch_size = 4\n'
        "[run]\ntensorboard = false\nplot = false\n"
    )
    return here


def test_check_of_pairs_alone(pairs, capsys):
    assert main(["check", "p.toml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # A byte is a token: 8 of the prompt, 10 of the longer answer, and EOS.
    (data,) = [line for line in lines if line.startswith("pairs of pairs.jsonl: 8 to train on, 2 held out")]
    assert "19 tokens on average, 19 at most" in data
    (first,) = [line for line in lines if line.startswith("the first pair")]
    assert re.search(r"sees it: 'Say (\d\d): ', chosen '\1 is said<\|end\|>', rejected 'no<\|end\|>'$", first)
    assert "    1.1 MiB  reference" in lines
    assert "steps: 6, each with 4 pairs" in lines  # three epochs
    (time,) = [line for line in lines if line.startswith("time: ")]
    assert re.match(r"time: about [\d.]+ s a step, \d+ s in all.* \(from 4 pairs", time)
    assert "log-probs of 8 pairs" in lines[-1]
    text = "\n".join(lines)
    for absent in ("rewards:", "data: ", "the first prompt", " completions of up to", "cache of"):
        assert absent not in text
    assert not (pairs / "runs").exists()


def test_check_of_completions_and_pairs(pairs, capsys):
    words = ["--algorithm", "pg_grpo", "--preference.train", "pairs.jsonl", "--preference.pairs", "both",
             "--loss.kl_coef", "0", "--preference.pairs_per_group", "5"]  # fmt: skip
    assert main(["check", "r.toml", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "rewards: vowels × 1" in lines
    assert any(line.startswith("pairs of sampled completions: up to 2 of each 4") for line in lines)
    assert any(line.startswith("pairs of pairs.jsonl: 10 to train on, 0 held out; ") for line in lines)
    assert "    1.1 MiB  reference" in lines  # which pairs need, without a KL
    assert any(re.match(r"steps: 2, each with 8 completions of up to 8 tokens and 16 pairs", line) for line in lines)
    assert any("(from completions of 8 tokens and 4 pairs" in line for line in lines)


def test_check_with_pairs_only_held_out(pairs, capsys):
    assert main(["check", "r.toml", "--quick", "--preference.held_out", "pairs.jsonl"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("pairs of pairs.jsonl: 0 to train on, 10 held out; ") for line in lines)
    assert "    1.1 MiB  reference" in lines
    assert "steps: 2, each with 8 completions of up to 8 tokens" in lines


def test_check_needs_training_rows_like_train(complaint):
    words = ["r.toml", "--data.train", "none", "--data.held_out", "rows.jsonl"]
    assert complaint("check", *words) == complaint("train", *words)


def test_train_on_pairs_alone(pairs, capsys):
    words = ["--run.folder", "run", "--train.steps", "2", "--optimizer.learning_rate", "0.01"]
    assert main(["train", "p.toml", *words]) == 0
    said = capsys.readouterr().out
    assert re.search(r"step 2/2 · held-out preference_accuracy .* · pairs   4 · margin +[\d.]+ · preferred ", said)
    assert re.search(
        r"2 held-out pairs +before.* +after \d steps\npreference_accuracy +50\.0% \[50\.0%, 50\.0%\]", said
    )
    assert "tokens/s" not in said
    assert "reward" not in said
    rows = read_metrics(pairs / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "preference/margin" in row] == [1, 2]
    assert all("reward" not in row for row in rows)


@pytest.mark.usefixtures("pairs")
def test_wrong_task_options_of_a_run_on_pairs_alone(complaint):
    assert "[task_options]: the task 'rows' has no options" in complaint("train", "p.toml", "--task_options.x", "1")


# --- train and resume ------------------------------------------------------------------------------------------------


def test_train_and_resume(here, capsys):
    from safetensors.torch import load_file

    assert main(["train", "r.toml", "--run.folder", "one", "--train.steps", "3"]) == 0
    said = capsys.readouterr().out
    assert "step 3/3" in said
    assert "model: one/model" in said
    assert main(["train", "r.toml", "--run.folder", "two", "--train.steps", "2"]) == 0
    capsys.readouterr()
    assert main(["train", "r.toml", "--run.folder", "two", "--train.steps", "3", "--resume"]) == 0
    said = capsys.readouterr().out
    assert "after step 2, from checkpoint-2" in said
    assert "train.steps: 2 before, 3 now" in said
    assert [row["step"] for row in read_metrics(here / "two" / "metrics.jsonl")] == [1, 2, 3]
    one, other = (load_file(here / name / "checkpoint-3" / "masters.safetensors") for name in ("one", "two"))
    assert all(one[name].equal(other[name]) for name in one)


def state_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_finished_run_has_nothing_to_resume(here, capsys, monkeypatch):
    words = ["train", "r.toml", "--run.folder", "run", "--train.steps", "1"]
    assert main(words) == 0
    before = state_of(here)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("groupwise.training.trainer.load_components", None)  # no model is loaded
        assert main([*words, "--resume"]) == 0
        out = capsys.readouterr().out
        assert "the run in run has finished its 1 step; there is nothing to resume" in out
        assert "--train.steps 2" in out
        assert "leave out --resume" in out
        assert main(["train", "run/recipe.json", "--resume"]) == 0
        assert "the run in run has finished its 1 step" in capsys.readouterr().out
    assert state_of(here) == before
    assert main([*words[:-1], "2", "--resume"]) == 0
    out = capsys.readouterr().out
    assert "nothing to resume" not in out
    assert "step 2/2" in out
    assert main([*words[:-1], "2", "--resume"]) == 0
    assert "has finished its 2 steps; there is nothing to resume" in capsys.readouterr().out
    # Fewer steps than it has, too. A setting without effect is named, one that is used at the end is applied.
    assert main([*words, "--resume"]) == 0
    assert "has finished its 2 steps" in capsys.readouterr().out
    assert main([*words[:-1], "2", "--resume", "--run.save_rollouts", "false"]) == 0
    assert "nothing to resume (run.save_rollouts would change nothing)" in capsys.readouterr().out
    assert main([*words[:-1], "2", "--resume", "--run.export_dtype", "bfloat16"]) == 0
    assert "nothing to resume" not in capsys.readouterr().out


def test_a_run_is_not_overwritten_unless_asked(here, complaint, capsys):
    words = ["train", "r.toml", "--run.folder", "run", "--train.steps", "1"]
    assert main(words) == 0
    capsys.readouterr()
    message = complaint(*words)
    assert all(option in message for option in ("run already", "--resume", "--overwrite"))
    assert complaint(*words, "--overwrite", "--data.train", "gone.jsonl").startswith("there is no file or folder 'gone")
    assert complaint(*words, "--overwrite", "--data.prompt", "question").startswith("no row of rows.jsonl has a column")
    assert (here / "run" / "model").exists()  # errors are found before anything is deleted
    assert main([*words, "--overwrite", "--train.seed", "3"]) == 0
    assert load_recipe(here / "run" / "recipe.json").train.seed == 3


def test_recipe_json_can_be_used_as_a_recipe(here, capsys):
    assert main(["train", "r.toml", "--run.folder", "run", "--train.steps", "1", "--sampling.temperature", "0.7"]) == 0
    resolved = load_recipe(here / "run" / "recipe.json")
    assert resolved == load_recipe("r.toml", {"run.folder": "run", "train.steps": 1, "sampling.temperature": 0.7})
    capsys.readouterr()
    words = ["eval", "run/recipe.json", "--model.source", "run/model", "--data.held_out", "rows.jsonl"]
    assert main(words) == 0
    assert "by run/model: " in capsys.readouterr().out


def test_files_in_the_recipes_folder(here, monkeypatch, capsys):
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert main(["check", "../r.toml", "--quick"]) == 0
    assert main(["train", "../r.toml", "--train.steps", "1", "--run.name", "mine"]) == 0
    (run,) = (here / "elsewhere" / "runs").iterdir()
    assert run.name.endswith("-mine")
    capsys.readouterr()
    assert main(["train", "../r.toml", "--train.steps", "2", "--run.name", "mine", "--resume"]) == 0
    assert "after step 1, from checkpoint-1" in capsys.readouterr().out
    assert list((here / "elsewhere" / "runs").iterdir()) == [run]


# --- eval ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def maths(here):
    (here / "maths.jsonl").write_text(jsonl(*GSM8K))
    (here / "m.toml").write_text(
        'task = "gsm8k"\n[data]\ntrain = "maths.jsonl"\nheld_out = "maths.jsonl"\n[sampling]\nmax_new_tokens = 4\n'
    )


def test_eval_prints_a_table_and_writes_answers(here, maths, capsys):
    assert main(["eval", "m.toml", "--answers", "deep/answers.jsonl"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "metric"
    assert lines[0].rstrip().endswith("without an answer")
    rows = {line.split("  ")[0]: line.split() for line in lines[1:3]}
    assert rows["accuracy *"] == ["accuracy", "*", "0.0000", "0.0000", "–", "0.4899", "100.0%"]  # 0 of 4
    assert rows["accuracy_lenient"][:1] == ["accuracy_lenient"]
    assert re.match(r"4 \w+ by tiny: [\d.]+ tokens on average, [\d.]+% ", lines[4])
    answers = [json.loads(line) for line in (here / "deep" / "answers.jsonl").read_text().splitlines()]
    assert [answer["row"] for answer in answers] == [0, 1, 2, 3]
    facts = {"row", "where", "prompt", "sample", "answer", "tokens", "stop_reason"}
    assert set(answers[0]) == {*facts, "accuracy", "accuracy_lenient"}
    assert answers[0]["accuracy"] is None
    assert not (here / "runs").exists()


def test_eval_is_greedy_by_default(here, maths, capsys):
    def answers(*words):
        assert main(["eval", "m.toml", "--answers", "a.jsonl", *words]) == 0
        return (here / "a.jsonl").read_text()

    assert answers() == answers()
    sampled = answers("--evaluate.temperature", "1.0", "--evaluate.samples", "3")
    assert sampled.count("\n") == 12
    assert answers("--evaluate.temperature", "1.0", "--evaluate.samples", "3") == sampled
    capsys.readouterr()


def test_eval_by_a_reward_that_reads_the_trainer_state(capsys):
    words = ["--rewards", '[{function = "scores.py:counts_steps"}]', "--data.held_out", "rows.jsonl"]
    assert main(["eval", "r.toml", *words]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1] == "0.5000"  # as before the first step
    assert main(["train", "r.toml", *words, "--train.steps", "1", "--run.folder", "run"]) == 0


def test_eval_by_rewards(capsys):
    assert main(["eval", "r.toml", "--data.held_out", "rows.jsonl", "--evaluate.max_new_tokens", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].rstrip().endswith("not scored")
    assert lines[1].startswith("reward")
    assert lines[1].endswith("0.0%")
    assert re.match(r"4 \w+ by tiny: 3.0 tokens on average, 100.0% ", lines[2])


def test_eval_needs_no_rows_to_train_on(complaint, capsys):
    words = ["r.toml", "--data.train", "none", "--data.held_out", "rows.jsonl", "--evaluate.max_new_tokens", "3"]
    assert main(["eval", *words]) == 0
    assert re.search(r"4 \w+ by tiny", capsys.readouterr().out)
    assert "data.train" in complaint("train", *words)


def test_wrong_names_are_found_before_torch_is_loaded(here):
    """One process for all of them: it ends at the first one that takes seconds."""
    (here / "used").mkdir()
    (here / "used" / "notes.txt").write_text("mine")
    commands = [
        ("train", "--data.train", "row.jsonl"),
        ("train", "--data.held_out", "row.jsonl"),
        ("train", "--rewards.0.function", "scores.py:vowls"),
        ("train", "--rewards.0.function", "nofile.py:f"),
        ("train", "--rewards.0.function", "scores.py"),
        ("train", "--advantages.function", "scores.py:mine"),
        ("train", "--task", "quizz"),
        ("train", "--task", "scores.py:quiz"),
        ("train", "--model.source", "smollm2-135"),
        ("train", "--model.source", "./nowhere"),
        ("train", "--run.folder", "used"),
        ("train", "--run.folder", "rows.jsonl"),
        ("train", "--resume"),
        ("train", "--resume", "--run.folder", "used"),
        ("check", "--data.train", "row.jsonl"),
        ("eval", "--data.held_out", "row.jsonl"),
        ("eval", "--model.source", "nowhere"),
    ]
    code = (
        "import sys\nfrom groupwise.cli import main\n"
        f"for command, *words in {commands!r}:\n"
        "    assert main([command, 'r.toml', *words]) == 2, words\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), words\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(commands)
    assert not run_folders(here)
