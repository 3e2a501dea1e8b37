"""User functions from modules and files, and the message for each problem."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from groupwise.errors import ConfigError
from groupwise.rewards import Scorer
from groupwise.user_code import load_function, source_hashes


@pytest.fixture(autouse=True)
def _leave_no_modules(monkeypatch, tmp_path):
    for name in ("_helpers", "_loaded", "_hashes"):
        monkeypatch.setattr(f"groupwise.user_code.{name}", {})
    monkeypatch.chdir(tmp_path)
    modules, path = dict(sys.modules), list(sys.path)
    yield
    assert sys.path == path
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]
    sys.modules.update(modules)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


REWARD = "def score(prompts, completions, **_):\n    return [float(len(text)) for text in completions]\n"


def test_a_file(tmp_path):
    path = write(tmp_path / "some folder" / "my-rewards.py", REWARD)
    function = load_function(f"{path}:score")
    assert Scorer([function]).score([""], ["abc"], {}).rewards.item() == 3.0
    assert sys.modules[function.__module__].score is function
    assert load_function("some folder/my-rewards.py:score") is function


def test_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "mine.py", REWARD)
    assert load_function("~/mine.py:score").__name__ == "score"


def test_a_module_in_the_current_directory_or_on_the_path(tmp_path):
    write(tmp_path / "my_package" / "__init__.py", "")
    write(tmp_path / "my_package" / "rewards.py", REWARD)
    assert load_function("my_package.rewards:score").__module__ == "my_package.rewards"
    assert load_function("os.path:join") is os.path.join


def test_dotted_attributes(tmp_path):
    write(
        tmp_path / "a.py",
        "class Judge:\n    @staticmethod\n    def score(completions): return [1.0]\n\njudge = Judge()\n",
    )
    assert load_function("a.py:Judge.score")([]) == [1.0]
    assert load_function("a.py:judge.score")([]) == [1.0]


def test_a_changed_file_is_read_again(tmp_path):
    path = write(tmp_path / "a.py", "def score(): return 1\n")
    old = load_function("a.py:score")
    assert load_function("a.py:score") is old
    write(path, "def score(): return 12\n")
    assert load_function("a.py:score")() == 12
    assert old() == 1


def test_helpers_of_the_same_name_in_two_folders(tmp_path):
    for folder, value in (("one", 1), ("two", 2)):
        write(tmp_path / folder / "helpers.py", f"VALUE = {value}\n")
        write(tmp_path / folder / "kit" / "__init__.py", "")
        write(tmp_path / folder / "kit" / "parts.py", f"VALUE = {value * 10}\n")
        write(
            tmp_path / folder / "reward.py",
            "import helpers, kit.parts\ndef score(): return helpers.VALUE + kit.parts.VALUE\n",
        )
        write(tmp_path / folder / "other.py", "import helpers\ndef score(): return helpers\n")
    one, two = load_function("one/reward.py:score"), load_function("two/reward.py:score")
    assert (one(), two()) == (11, 22)
    assert load_function("one/other.py:score")().VALUE == 1
    assert load_function("two/other.py:score")().VALUE == 2
    assert load_function("one/other.py:score")() is sys.modules["helpers"]  # the first one keeps the plain name
    assert str(tmp_path / "one") not in sys.path


def test_a_helper_of_another_folder_stays_imported(tmp_path):
    write(tmp_path / "one" / "helpers.py", "VALUE = 1\n")
    write(tmp_path / "one" / "reward.py", "import helpers\ndef score(): return helpers\n")
    first = load_function("one/reward.py:score")()
    write(tmp_path / "two" / "reward.py", "import helpers\ndef score(): return helpers\n")
    assert load_function("two/reward.py:score")() is first  # it has no helpers.py, so nothing is hidden


@pytest.mark.parametrize(
    "spec", ["rewards.py", "score", "", ":score", "a.py:", "a.py:1score", "a.py:f()", "a.py:x..y", None, 3]
)
def test_invalid_specs(spec):
    with pytest.raises(ConfigError, match=r"a grader is given as module:function or path/file.py:function, got"):
        load_function(spec, what="grader")


def test_missing_files_modules_and_functions(tmp_path):
    write(
        tmp_path / "a.py",
        REWARD + "value = 3\nscorers = [score]\nfrom math import *\nfrom pathlib import Path\nfrom typing import *\n"
        "from operator import itemgetter\nclass Grader: pass\nfirst = itemgetter(0)\n",
    )
    with pytest.raises(ConfigError, match=r"reward 'b\.py:score': there is no file .*b\.py$"):
        load_function("b.py:score")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.py is a folder, not a file"):
        load_function("folder.py:score")
    write(tmp_path / "x" / "text.txt", REWARD)
    with pytest.raises(ConfigError, match=r"text\.txt is not a Python file; its name has to end in \.py"):
        load_function("x/text.txt:score")
    with pytest.raises(
        ConfigError, match=r"there is no module 'nowhere_such' in .* or on Python's path; a file is given as"
    ):
        load_function("nowhere_such.rewards:score")
    with pytest.raises(ConfigError, match=r"there is no module 'os\.nothing'"):
        load_function("os.nothing:score")
    with pytest.raises(
        ConfigError, match=r"there is no 'scor' in a\.py; did you mean 'score'\? \(functions there: first, score\)"
    ):
        load_function("a.py:scor")
    with pytest.raises(ConfigError, match=r"there is no 'hom' in Path; did you mean 'home'\?"):
        load_function("a.py:Path.hom")
    with pytest.raises(ConfigError, match=r"value is not a function but 3 \(int\)"):
        load_function("a.py:value")
    write(tmp_path / "empty.py", "")
    with pytest.raises(ConfigError, match=r"there is no 'score' in empty\.py \(functions there: none\)"):
        load_function("empty.py:score")


def test_a_file_without_a_function(tmp_path):
    """The functions that it defines are listed, without running it."""
    write(
        tmp_path / "one.py",
        "raise SystemExit\nfrom math import sqrt\nclass A: 0\ndef _own(): 0\ndef score(): 0\n",
    )
    for spec in ("one.py", "one"):
        with pytest.raises(ConfigError, match=f"got '{spec}'; did you mean 'one.py:score'"):
            load_function(spec)
    write(tmp_path / "two.py", "def a(): 0\nasync def b(): 0\nclass C: pass\n")
    with pytest.raises(ConfigError, match=r"got 'two.py'; write two.py:function \(functions there: a, b\)$"):
        load_function("two.py")
    write(tmp_path / "bad.py", "def (")
    with pytest.raises(ConfigError, match=r"got 'bad.py'; write bad.py:function$"):
        load_function("bad.py")
    with pytest.raises(ConfigError, match=r"got 'onee.py'; there is no file onee.py; did you mean one.py\?$"):
        load_function("onee.py")


def test_errors_during_an_import(tmp_path):
    write(tmp_path / "syntax.py", "x = 1\ndef score(:\n    pass\n")
    with pytest.raises(ConfigError, match=r"reward 'syntax.py:score': .*syntax\.py, line 2: invalid syntax"):
        load_function("syntax.py:score")
    with pytest.raises(ConfigError, match=r"syntax\.py, line 2: invalid syntax"):
        load_function("syntax:score")
    write(tmp_path / "raises.py", "def f():\n    raise ValueError('no key')\n\nf()\n")
    for spec in ("raises.py:f", "raises:f"):
        with pytest.raises(ConfigError, match=r"its import raised ValueError: no key \(raises\.py, line 2\)"):
            load_function(spec)
    write(tmp_path / "needs.py", "import not_there_at_all\n")
    for spec in ("needs.py:f", "needs:f"):
        with pytest.raises(
            ConfigError, match=r"its import raised ModuleNotFoundError: No module named 'not_there_at_all' \(needs"
        ):
            load_function(spec)
    write(tmp_path / "exits.py", "import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match="its import raised SystemExit: 3"):
        load_function("exits.py:f")
    write(tmp_path / "bytes.py", "").write_bytes(b"x = '\xff'\n")
    with pytest.raises(ConfigError, match=r"bytes\.py.*decode"):
        load_function("bytes.py:f")
    assert not [name for name in sys.modules if name.startswith(("_groupwise_raises", "_groupwise_syntax"))]


def test_an_interrupt_gets_through(tmp_path):
    write(tmp_path / "a.py", "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_function("a.py:f")


def hashes(spec):
    load_function(spec)
    return {os.path.basename(path): value for path, value in source_hashes(spec).items()}


def test_hashes_of_a_file_and_what_it_imports(tmp_path):
    """Modules of its folder, whatever the form of the import and wherever it stands; nothing else."""
    write(tmp_path / "a" / "one.py", "X = 1\n")
    write(tmp_path / "a" / "two.py", "from one import X\n")
    write(tmp_path / "a" / "pack" / "__init__.py", "")
    write(tmp_path / "a" / "pack" / "three.py", "Y = 1\n")
    write(tmp_path / "a" / "unused.py", "Z = 1\n")
    imports = "import math, torch\nimport two as other\nfrom pack import three\n"
    write(tmp_path / "a" / "mine.py", f"{imports}def score(**_):\n    from one import X\n    return X\n")
    found = hashes("a/mine.py:score")
    assert set(found) == {"mine.py", "one.py", "two.py", "__init__.py", "three.py"}
    assert len(found["mine.py"]) == 16
    # The same files elsewhere, with other line endings, are the same.
    for path in (tmp_path / "a").rglob("*.py"):
        other = tmp_path / "b" / path.relative_to(tmp_path / "a")
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert hashes("b/mine.py:score") == found
    write(tmp_path / "c" / "mine.py", "def score(**_):\n    return 2\n")
    assert hashes("c/mine.py:score")["mine.py"] != found["mine.py"]


def test_hashes_are_those_of_the_time_of_loading(tmp_path):
    path = write(tmp_path / "mine.py", REWARD)
    before = hashes("mine.py:score")
    path.write_text(REWARD + "# edited while the run goes on\n")
    assert {os.path.basename(name): value for name, value in source_hashes("mine.py:score").items()} == before
    assert hashes("mine.py:score") != before  # loaded again


def test_hashes_of_a_package_and_of_functions(tmp_path):
    write(tmp_path / "my_package" / "__init__.py", "")
    write(tmp_path / "my_package" / "tools.py", "X = 1\n")
    write(tmp_path / "my_package" / "more.py", "from . import tools\nfrom my_package import tools\n" + REWARD)
    function = load_function("my_package.more:score")
    found = source_hashes("my_package.more:score")
    assert {os.path.basename(name) for name in found} == {"more.py", "tools.py"}

    class Judge:
        def __call__(self, completions):
            return []

        def score(self, completions):
            return []

    assert source_hashes(function) == source_hashes(functools.partial(function, x=1)) == found
    mine = {__file__}
    assert mine <= set(source_hashes(Judge())) == set(source_hashes(Judge().score)) == set(source_hashes(lambda: 1))


def test_what_has_no_hash(tmp_path):
    """groupwise's own functions, builtins, and what was typed in; an installed package has its version."""
    from groupwise.rewards import length_band

    for function in (length_band(low=1, high=2), len, eval("lambda: 1", {"__name__": "nowhere"}), "not:loaded"):
        assert source_hashes(function) == {}
    assert source_hashes(pytest.raises) == {"_pytest": pytest.__version__}
    assert list(source_hashes(os.path.join)) == ["posixpath"]
    script = write(
        tmp_path / "script.py",
        "from groupwise.user_code import source_hashes\ndef score(x):\n    return x\nprint(source_hashes(score))\n",
    )

    def run():
        return subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout

    first = run()
    assert "'score': '" in first
    script.write_text(script.read_text() + "# resume=True\n")
    assert run() == first
    script.write_text(script.read_text().replace("return x", "return -x"))
    assert run() != first
