"""`groupwise from-trl` on scripts of many styles: what it can know of each, and that it says what it cannot."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import pytest

from groupwise.cli import main

HEAD = "from trl import GRPOConfig, GRPOTrainer\nopen('was-run', 'w').close()\ndef f(completions, **_): return []\n"
UNKNOWN = "not known"

# Each: the script below its imports, what fields it has (a value, or not known), and words of the notes.
STYLES: dict[str, tuple[str, dict[str, Any], str]] = {
    "keywords": (
        "trainer = GRPOTrainer(model='m', reward_funcs=f, args=GRPOConfig('out', beta=0.1))",
        {"output_dir": "out", "beta": 0.1},
        "",
    ),
    "args by position": (
        "args = GRPOConfig('out', 4, num_generations=4)\nGRPOTrainer('m', f, args)",
        {"output_dir": "out", "per_device_train_batch_size": 4, "num_generations": 4},
        "",
    ),
    "attributes set later": (
        "training_args = GRPOConfig('out')\ntraining_args.max_steps = 5\ntraining_args.beta: float = 0.2\n"
        "setattr(training_args, 'seed', 7)\nGRPOTrainer('m', f, training_args)",
        {"output_dir": "out", "max_steps": 5, "beta": 0.2, "seed": 7},
        "",
    ),
    "attributes that depend": (
        "import os\nargs = GRPOConfig('out', max_steps=3)\nif os.environ.get('DEBUG'):\n    args.max_steps = 1\n"
        "args.top_k += 1\nargs.seed = int(os.environ['SEED'])\nGRPOTrainer('m', f, args)",
        {"output_dir": "out", "max_steps": UNKNOWN, "top_k": UNKNOWN, "seed": UNKNOWN},
        "",
    ),
    "a dict unpacked": (
        "cfg = {'output_dir': 'out', 'beta': 0.1, 'seed': 3}\nGRPOTrainer('m', f, GRPOConfig(**cfg))",
        {"output_dir": "out", "beta": 0.1, "seed": 3},
        "",
    ),
    "dicts of dicts": (
        "common = dict(beta=0.1, seed=3)\nfast = {**common, 'max_steps': 5} | {'seed': 4}\n"
        "GRPOTrainer('m', f, GRPOConfig('out', **fast))",
        {"output_dir": "out", "beta": 0.1, "seed": 4, "max_steps": 5},
        "",
    ),
    "a dict with a value that is not known": (
        "import torch\ncfg = {'beta': 0.1, 'fp16': not torch.cuda.is_available()}\n"
        "GRPOTrainer('m', f, GRPOConfig('out', **cfg))",
        {"output_dir": "out", "beta": 0.1, "fp16": UNKNOWN},
        "",
    ),
    "a dict that is changed": (
        "cfg = {'beta': 0.1}\ncfg['seed'] = 5\ncfg.update(max_steps=4, beta=0.3)\ncfg.update({'top_k': 7})\n"
        "args = GRPOConfig('out', **cfg)\ncfg['beta'] = 9.0\nGRPOTrainer('m', f, args)",
        {"output_dir": "out", "beta": 0.3, "seed": 5, "max_steps": 4, "top_k": 7},
        "",
    ),
    "a dict of a file": (
        "import json\ncfg = json.load(open('c.json'))\nGRPOTrainer('m', f, GRPOConfig('out', **cfg))",
        {"output_dir": "out"},
        "arguments in cfg cannot be read",
    ),
    "a dict with keys that are not known": (
        "import sys\ncfg = {'beta': 0.1}\ncfg[sys.argv[1]] = 5\nGRPOTrainer('m', f, GRPOConfig('out', **cfg))",
        {"output_dir": "out"},
        "arguments in cfg cannot be read",
    ),
    "dataclasses.replace": (
        "import dataclasses\nbase = GRPOConfig('out', beta=0.1, seed=3)\nbase.max_steps = 9\n"
        "args = dataclasses.replace(base, beta=0.2)\nargs.seed = 4\nGRPOTrainer('m', f, args)",
        {"output_dir": "out", "beta": 0.2, "seed": 4, "max_steps": 9},
        "",
    ),
    "replace and deepcopy": (
        "from copy import deepcopy\nfrom dataclasses import replace\nbase = GRPOConfig('out', beta=0.1)\n"
        "args = replace(deepcopy(base), max_steps=2)\nGRPOTrainer('m', f, args=args)",
        {"output_dir": "out", "beta": 0.1, "max_steps": 2},
        "",
    ),
    "a function that makes the config": (
        "def make_config(seed):\n    return GRPOConfig('out', seed=seed, beta=0.1)\n"
        "GRPOTrainer('m', f, make_config(3))",
        {"output_dir": "out", "seed": UNKNOWN, "beta": 0.1},
        "",
    ),
    "a function with several configs": (
        "def make_config(fast):\n    if fast:\n        return GRPOConfig('a')\n    return GRPOConfig('b')\n"
        "GRPOTrainer('m', f, make_config(True))",
        {},
        "made in a way that cannot be read",
    ),
    "a class": (
        "class Run:\n    def __init__(self):\n        self.args = GRPOConfig('out', beta=0.1)\n"
        "        self.args.seed = 5\n    def train(self):\n        return GRPOTrainer('m', f, self.args).train()\n"
        "Run().train()",
        {"output_dir": "out", "beta": 0.1, "seed": 5},
        "",
    ),
    "a main function with constants": (
        "LR = 1e-5\nSTEPS: int = 2 * 50\ndef main():\n    args = GRPOConfig('out', learning_rate=LR, max_steps=STEPS)\n"
        "    GRPOTrainer('m', f, args).train()\nif __name__ == '__main__':\n    main()",
        {"output_dir": "out", "learning_rate": 1e-5, "max_steps": 100},
        "",
    ),
    "a parameter of a function": (
        "def main(args):\n    GRPOTrainer('m', f, args).train()\nmain(GRPOConfig('out'))",
        {},
        "made in a way that cannot be read",
    ),
    "arguments of the trainer unpacked": (
        "args = GRPOConfig('out', beta=0.1)\nparts = {'model': 'm', 'args': args, 'reward_funcs': [f]}\n"
        "GRPOTrainer(**parts)",
        {"output_dir": "out", "beta": 0.1},
        "",
    ),
    "arguments of the trainer that are not known": (
        "import helpers\nGRPOTrainer(**helpers.parts())",
        {},
        "the config may be among the arguments",
    ),
    "argparse": (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--beta', type=float, default=0.1)\n"
        "opts = p.parse_args()\nGRPOTrainer('m', f, GRPOConfig('out', beta=opts.beta, seed=opts.seed or 1))",
        {"output_dir": "out", "beta": UNKNOWN, "seed": UNKNOWN},
        "",
    ),
    "HfArgumentParser": (
        "from transformers import HfArgumentParser\nparser = HfArgumentParser(GRPOConfig)\n"
        "(args,) = parser.parse_args_into_dataclasses()\n"
        "GRPOTrainer('m', f, args)",
        {},
        "the config comes from HfArgumentParser",
    ),
    "TrlParser": (
        "from trl import ModelConfig, TrlParser\nparser = TrlParser((GRPOConfig, ModelConfig))\n"
        "args, model_args = parser.parse_args_and_config()\nGRPOTrainer(model_args.model_name_or_path, f, args)",
        {},
        "give the file as --config",
    ),
    "a name that is assigned again": (
        "steps = 5\nargs = GRPOConfig('old', max_steps=steps)\nsteps = 10\nargs = GRPOConfig('out', max_steps=steps)\n"
        "GRPOTrainer('m', f, args)\nsteps = 20",
        {"output_dir": "out", "max_steps": 10},
        "",
    ),
    "a loop": (
        "for beta in (0.0, 0.1):\n    args = GRPOConfig('out', beta=beta, seed=3)\n    args.max_steps = 4\n"
        "    GRPOTrainer('m', f, args).train()",
        {"output_dir": "out", "beta": UNKNOWN, "seed": 3, "max_steps": 4},
        "",
    ),
    "branches": (
        "import sys\nif len(sys.argv) > 1:\n    args = GRPOConfig('a')\nelse:\n    args = GRPOConfig('b')\n"
        "try:\n    beta = 0.1\nexcept ImportError:\n    beta = 0.2\nGRPOTrainer('m', f, args)",
        {},
        "made in a way that cannot be read",
    ),
    "in a try": (
        "try:\n    beta = 0.1\n    GRPOTrainer('m', f, GRPOConfig('out', beta=beta))\nexcept KeyError:\n    pass",
        {"output_dir": "out", "beta": 0.1},
        "",
    ),
    "a config in the call in a loop": (
        "for beta in (0.0, 0.1):\n    GRPOTrainer('m', f, GRPOConfig('out', beta=beta, seed=3)).train()",
        {"output_dir": "out", "beta": UNKNOWN, "seed": 3},
        "",
    ),
    "a notebook as a script": (
        "!pip install -q trl\n%load_ext autoreload\nfiles = !ls\n# %%\nargs = GRPOConfig('out', beta=0.1)\nargs?\n"
        "trainer = GRPOTrainer('m', f, args)\nawait trainer.train()",
        {"output_dir": "out", "beta": 0.1},
        "",
    ),
    "no args": ("GRPOTrainer('m', f)", {}, "every field has TRL's default"),
    "modules": (
        "import trl as t\nfrom pathlib import Path\nROOT = Path('runs')\n"
        "t.GRPOTrainer('m', f, t.GRPOConfig(output_dir=f'{\"a\"}-b', run_name='x' or None, "
        "beta=-(-0.5), seed=True and 2))",
        {"output_dir": "a-b", "run_name": "x", "beta": 0.5, "seed": 2},
        "",
    ),
    "a class of the script with fields": (
        "from dataclasses import dataclass\n@dataclass\nclass Config(GRPOConfig):\n    note: str = 'x'\n"
        "GRPOTrainer('m', f, Config('out', note='y', beta=0.1))",
        {"output_dir": "out", "note": "y", "beta": 0.1},
        "",
    ),
}


@pytest.fixture
def answer_of(folder: Any, capsys: Any) -> Any:
    def answer(text: str, *words: str, name: str = "train.py") -> Any:
        (folder / name).write_text(text)
        capsys.readouterr()
        status = main(["from-trl", name, "--json", *words])
        assert not (folder / "was-run").exists()
        captured = capsys.readouterr()
        assert status in (0, 1), captured.err
        return json.loads(captured.out)

    return answer


def fields_of(answer: Any) -> dict[str, Any]:
    """Each field with its value, which is printed as Python writes it, or that it is not known."""
    return {
        entry["name"]: UNKNOWN
        if entry["status"] == "not known"
        else eval(entry["value"])
        if entry["text"] != "for the script: a field of its own class"
        else entry["value"].strip("'\"")
        for entry in answer["fields"]
    }


@pytest.mark.parametrize("name", STYLES)
def test_a_style(answer_of: Any, name: str) -> None:
    script, fields, note = STYLES[name]
    answer = answer_of(HEAD + script)
    assert fields_of(answer) == fields
    assert note in " ".join(answer["notes"])
    assert bool(note) == bool(answer["notes"])
    assert answer["runs"]


@pytest.mark.parametrize(
    "name", ["a parameter of a function", "TrlParser", "arguments of the trainer that are not known"]
)
def test_a_config_that_is_not_known_is_said_at_the_end(folder: Any, output_of: Any, name: str) -> None:
    (folder / "train.py").write_text(HEAD + STYLES[name][0])
    assert "as far as it can be read (the config not known)" in output_of("from-trl", "train.py")


SEVERAL = """
small = GRPOConfig("small", beta=0.1)
GRPOTrainer("m", f, small).train()
large = GRPOConfig("large", optim="lion_8bit")
GRPOTrainer("m", f, large).train()
"""


def test_several_trainers(answer_of: Any, output_of: Any, error_of: Any, folder: Any, capsys: Any) -> None:
    first, second = answer_of(HEAD + SEVERAL)
    assert fields_of(first) == {"output_dir": "small", "beta": 0.1}
    assert [entry["status"] for entry in second["fields"]] == ["translated", "refused"]
    assert (first["runs"], second["runs"]) == (True, False)
    assert main(["from-trl", "train.py"]) == 1
    text = capsys.readouterr().out
    assert "GRPOTrainer at line 6" in text
    assert "GRPOTrainer at line 8" in text
    assert fields_of(answer_of(HEAD + SEVERAL, "--line", "6")) == {"output_dir": "small", "beta": 0.1}
    assert "no GRPOTrainer (there is one in: 6, 8)" in error_of("from-trl", "train.py", "--line", "7")
    assert "choose by --line 6, 8" in error_of("from-trl", "train.py", "--write", "a.toml")
    assert "wrote a.toml" in output_of("from-trl", "train.py", "--line", "6", "--write", "a.toml")


def test_a_notebook(answer_of: Any, error_of: Any, folder: Any) -> None:
    script = textwrap.dedent(SEVERAL).split("large")[0]
    cells = [
        {"cell_type": "markdown", "source": ["# A title"]},
        {"cell_type": "code", "source": ["!pip install trl\n", HEAD]},
        {"cell_type": "code", "source": script},
    ]
    answer = answer_of(json.dumps({"cells": cells}), name="train.ipynb")
    assert fields_of(answer) == {"output_dir": "small", "beta": 0.1}
    for text in ("{}", "[1]", "not json"):
        (folder / "bad.ipynb").write_text(text)
        assert "is not a notebook" in error_of("from-trl", "bad.ipynb")


@pytest.mark.parametrize(
    ("text", "line"), [("def f(:\n", 1), ("x = 1\nif x\n    y = 2\n", 2), ("!pip install trl\nif x\n    pass\n", 2)]
)
def test_a_syntax_error_names_its_line(folder: Any, error_of: Any, text: str, line: int) -> None:
    (folder / "train.py").write_text(text)
    assert f"train.py, line {line}: not valid Python" in error_of("from-trl", "train.py")
