"""The promises of SECURITY.md that concern the source as a whole, and that each promise names a test that exists."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tools.audit import summarise

ROOT = Path(__file__).parents[1]
SOURCES = [path for folder in ("groupwise", "recipes") for path in sorted((ROOT / folder).rglob("*.py"))]
MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "http.server",
    "socketserver",
    "xmlrpc",
}
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "numpy.load",
    "np.load", "torch.jit.load", "runpy.run_path", "runpy.run_module",
}  # fmt: skip

LISTENS = {"groupwise/viewer/server.py": ["listener.listen"]}  # `groupwise view`


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an expression, or "" if it is none."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def offences(source: str) -> list[str]:
    """What a source uses that can run data as code, or listens for connections."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if node.module in MODULES else []
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            options = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
            if name in CALLS or name.endswith(".listen") or options.get("shell") is True:
                found.append(name)
            if name == "torch.load" and options.get("weights_only") is not True:
                found.append("torch.load without weights_only")
            if options.get("trust_remote_code") is True:
                found.append(f"{name} with trust_remote_code")
    return found


def test_the_package_calls_nothing_that_runs_data():
    used = {str(path.relative_to(ROOT)): offences(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: found for path, found in used.items() if found} == LISTENS
    assert len(used) > 200


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from joblib import load", "eval(text)", "os.system(text)", "torch.load(path)",
        "torch.load(path, weights_only=False)", "subprocess.run(text, shell=True)", "server.listen(5)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_what_is_looked_for_is_found(source):
    assert offences(source)
    assert offences("model.eval(); re.compile(text); torch.load(path, weights_only=True)") == []


def test_code_of_a_model_is_off_by_default():
    from groupwise.cli import _parse
    from groupwise.config import Recipe

    assert Recipe().model.trust_remote_code is False
    assert _parse(["sample", "tiny", "hello"]).trust_remote_code is False


SAFE = {"name": "numpy", "version": "2.0", "vulns": []}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.11)"}
BAD = {"name": "pillow", "version": "1.0", "vulns": [{"id": "CVE-2026-1", "fix_versions": ["1.1"]}]}


@pytest.mark.parametrize(
    ("packages", "status", "words"),
    [
        ([SAFE], 0, "1 of 1 packages were looked up"),
        ([SAFE, BAD], 1, "pillow 1.0 has CVE-2026-1; fixed in 1.1"),
        ([SAFE, UNKNOWN], 3, "does not know torch"),
        ([UNKNOWN], 3, "not run"),
        ([UNKNOWN, BAD], 1, "does not know torch"),
    ],
)
def test_what_an_audit_says(packages, status, words):
    lines, result = summarise("constraints.txt", json.dumps({"dependencies": packages, "fixes": []}))
    assert result == status
    assert words in " ".join(lines)


@pytest.mark.parametrize("output", ["", "null", "{}", "Traceback …"])
def test_an_audit_that_was_not_run_is_no_pass(output):
    lines, status = summarise("constraints.txt", output, "ERROR:pip_audit:connection refused\n")
    assert status == 3
    assert "not run: the advisory service cannot be reached (ERROR:pip_audit:connection refused)" in lines[0]
