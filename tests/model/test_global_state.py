"""Importing groupwise, loading and preparing a model leave the process's settings alone."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import groupwise

SNAPSHOT = """
import logging, os, random, signal, sys, warnings
import numpy, rich.style, torch, torch._dynamo, transformers  # importing rich draws from random
from transformers.utils import logging as transformers_logging

def snapshot():
    root = logging.getLogger()
    return {
        "environment": dict(os.environ),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dynamo": (torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit),
        "matmul": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
        "backends": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.mkldnn.enabled),
        "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
        "transformers": (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()),
        "logging": (root.level, [str(handler) for handler in root.handlers], logging.root.manager.disable),
        "random": (hash(random.getstate()), str(numpy.random.get_state()), torch.get_rng_state().tolist()),
        "numpy": numpy.geterr(),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "hooks": (str(sys.excepthook), str(warnings.showwarning), sys.getrecursionlimit()),
        "paths": (list(sys.path), os.getcwd()),
    }
"""

IMPORT_ALL = """
import importlib, pkgutil

filters = []  # set by groupwise; scipy and transformers set others when they are imported
def record(function):
    def call(*args, **kwargs):
        if sys._getframe(1).f_globals["__name__"].startswith("groupwise"):
            filters.append(args)
        return function(*args, **kwargs)
    return call
warnings.filterwarnings, warnings.simplefilter = record(warnings.filterwarnings), record(warnings.simplefilter)
before = snapshot()
import groupwise
skipped = ("kernels", "graphs", "__main__", "groupwise.integrations", "groupwise.trl")
for module in pkgutil.walk_packages(groupwise.__path__, "groupwise."):
    if not module.name.endswith(skipped) and not module.name.startswith(skipped):
        importlib.import_module(module.name)
after = snapshot()
print(filters, {name: [before[name], after[name]] for name in before if before[name] != after[name]})
"""


def run_python(code: str, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "MIMALLOC_PURGE_DELAY"}
    done = subprocess.run([sys.executable, "-c", code], env={**env, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


CHANGES = re.compile(
    r"filterwarnings|simplefilter|os\.environ\b|_dynamo\.|backends\.|set_[a-z_]*threads\(|set_verbosity|manual_seed"
)


def test_no_module_changes_a_global_setting_at_its_top_level():
    changes = []
    for path in sorted(Path(groupwise.__file__).parent.rglob("*.py")):
        for statement in ast.parse(path.read_text()).body:
            if not isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)):
                code = ast.unparse(statement)
                changes += [f"{path.name}: {code}"] if CHANGES.search(code) else []
    assert changes == []


@pytest.mark.slow
def test_importing_every_module_changes_no_global_setting():
    assert run_python(SNAPSHOT + IMPORT_ALL) == "[] {}"


@pytest.fixture
def snapshot():
    names: dict[str, object] = {}
    exec(SNAPSHOT, names)
    return names["snapshot"]


def test_loading_preparing_and_exporting_a_model_change_no_global_setting(snapshot, tmp_path):
    from groupwise.model import export_model, load_model, load_model_and_tokenizer, prepare

    torch.set_num_threads(7)  # more than this machine may have: no reason to lower it behind the user's back
    before, filters = snapshot(), list(warnings.filters)
    model, tokenizer = load_model_and_tokenizer("tiny", device="cpu")
    handle = prepare(model, compile=True)
    export_model(model, tmp_path / "exported", tokenizer=tokenizer)
    load_model(tmp_path / "exported", device="cpu")
    assert handle.compiled is not None
    assert snapshot() == before
    assert warnings.filters == filters


def test_the_recompile_limit_is_raised_during_a_call_of_a_compiled_layer_only(monkeypatch):
    import groupwise.model.handle as handles
    from groupwise.model import completion_logps, load_model

    limits = []

    def compile(function, **options):
        def call(*args, **kwargs):
            limits.append(torch._dynamo.config.recompile_limit)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(torch, "compile", compile)
    before = torch._dynamo.config.recompile_limit
    handle = handles.prepare(load_model("tiny", device="cpu"), compile=True)
    completion_logps(handle, [[1, 2, 3]], [[[4, 5]]])
    assert set(limits) == {64}
    assert torch._dynamo.config.recompile_limit == before
    with torch._dynamo.config.patch(recompile_limit=200):  # a higher one of the user's stays
        completion_logps(handle, [[1, 2, 3]], [[[4, 5]]])
    assert limits[-1] == 200


def test_compiled_log_probs_add_no_warning_filter(monkeypatch):
    from groupwise.core import logps

    class OnGpu:
        device = torch.device("cuda")

        def __len__(self):
            return logps.COMPILE_FROM

    monkeypatch.setattr(logps, "_compiled", None)
    before = list(warnings.filters)
    functions = logps._chunk_functions(OnGpu(), OnGpu())
    assert functions is not logps._IN_STEPS
    assert warnings.filters == before


def test_the_command_line_sets_the_allocators_delay_before_torch_is_loaded():
    code = "import os, sys; from groupwise.cli import main; main(['models', 'list']); assert 'torch' not in sys.modules"
    code += "; print(os.environ.get('MIMALLOC_PURGE_DELAY'))"
    assert run_python(code).splitlines()[-1] == "10000"
    assert run_python(code, MIMALLOC_PURGE_DELAY="5").splitlines()[-1] == "5"


def test_a_training_run_uses_no_more_threads_than_it_may(tmp_path, monkeypatch):
    from groupwise.model import device
    from tests.training.factories import make_trainer

    monkeypatch.setattr(device, "usable_cpus", lambda: 2)
    torch.set_num_threads(7)
    with make_trainer(tmp_path):
        assert torch.get_num_threads() == 2
