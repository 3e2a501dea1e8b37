"""Secrets of a recipe on the command line: in no file, no message and no report of a run, and yet it can be resumed."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from groupwise.cli import main
from groupwise.rundir import read_json
from groupwise.training.store.rollout_files import read_rollouts

KEY, PASSWORD, TOKEN = "sk-0123456789-literal", "passw0rd-in-url", "tok-9876543210"
RECIPE = f"""
[model]
gradient_checkpointing = false
[data]
train = "rows.jsonl"
chat = false
[sampling]
max_new_tokens = 4
samples_per_prompt = 2
[train]
steps = 1
batch_size = 2
accumulation = 1
[run]
folder = "run"
plot = false
wandb = "project"
[[rewards]]
function = "scores.py:remote"
[rewards.options]
api_key = "{KEY}"
url = "https://me:{PASSWORD}@host.example/v1"
headers = {{ Authorization = "Bearer {TOKEN}", Accept = "text/plain" }}
"""
SCORES = """
def remote(api_key, url, headers):
    def score(completions, log_extra, log_metric, **_):
        log_extra("request", [f"{api_key} {url}"] * len(completions))
        log_metric(f"called/{api_key}", 1.0)
        if url == "fail":
            raise RuntimeError(f"401 \\x1b[31m for {api_key} with {headers}")
        return [float(place) for place in range(len(completions))]

    return score
"""
SECRETS = (KEY, PASSWORD, TOKEN)


@pytest.fixture
def run(folder, monkeypatch, capfd):
    """Run a command: its status and everything that it wrote to the terminal, without a secret."""
    (folder / "r.toml").write_text(RECIPE)
    (folder / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (folder / "scores.py").write_text(SCORES)
    sent: list[object] = []
    wandb = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    started = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    wandb.init = lambda **options: sent.append(options) or started
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    def run(*words: str) -> tuple[int, str]:
        status = main(list(words))
        output = "".join(capfd.readouterr())
        assert not any(secret in output + repr(sent) for secret in SECRETS)
        return status, output

    return run


def test_a_run_with_secrets_leaves_none_behind_and_is_resumed(run, folder, monkeypatch):
    status, output = run("train", "r.toml")
    assert status == 0
    assert (
        "rewards.0.options.api_key, rewards.0.options.url, rewards.0.options.headers.Authorization: the recipe "
        in output
    )
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        assert not any(secret.encode() in path.read_bytes() for secret in SECRETS), path
    assert read_rollouts(folder / "run").column("request").to_pylist() == ["*** ***"] * 4
    options = read_json(folder / "run" / "recipe.json")["rewards"][0]["options"]
    assert options["api_key"] == "***"
    assert options["url"] == "https://***@host.example/v1"
    assert options["headers"] == {"Authorization": "***", "Accept": "text/plain"}

    status, output = run("train", "run/recipe.json", "--resume", "--train.steps", "2")
    assert status == 2
    assert "the value of rewards.0.options.api_key is not here: a run's recipe.json does not keep secrets" in output
    status, output = run("train", "r.toml", "--resume", "--train.steps", "2")
    assert status == 0
    assert "resumed with another train.steps: 1 before, 2 now" in output
    assert "another rewards" not in output


def test_a_secret_from_the_environment_is_recorded_by_its_name(run, folder, monkeypatch):
    reference = f'{{ env = "{"MY_KEY"}" }}'
    (folder / "r.toml").write_text(
        RECIPE.replace(f'"{KEY}"', reference).replace(f"me:{PASSWORD}@", "").replace(f'"Bearer {TOKEN}"', reference)
    )
    monkeypatch.delenv("MY_KEY", raising=False)
    for command in ("train", "check", "eval"):
        status, output = run(command, "r.toml")
        assert status == 2
        assert "rewards.0.options.api_key: the environment variable MY_KEY is not set" in output
    assert not (folder / "run").exists()
    monkeypatch.setenv("MY_KEY", KEY)
    assert run("train", "r.toml")[0] == 0
    assert read_json(folder / "run" / "recipe.json")["rewards"][0]["options"]["api_key"] == {"env": "MY_KEY"}
    assert run("train", "run/recipe.json", "--resume", "--train.steps", "2")[0] == 0
    assert KEY not in json.dumps(read_json(folder / "run" / "resumed.json"))


@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_an_exception_of_a_reward_shows_neither_secrets_nor_escapes(run, command):
    more = ["--data.held_out", "rows.jsonl"] if command == "eval" else []
    status, output = run(command, "r.toml", "--rewards.0.options.url", "fail", *more)
    assert status == 2
    assert r"raised RuntimeError: 401 \x1b[31m for *** with {'Authorization': '***', 'Accept'" in output
    assert "\x1b" not in output


def test_check_shows_no_secret(run):
    status, output = run("check", "r.toml", "--quick")
    assert status == 0
    assert "'api_key': '***', 'url': 'https://***@host.example/v1'" in output


def test_an_option_of_an_environment_is_no_place_for_a_secret(run):
    status, output = run("control", "train", "--env-option", f"api_token={TOKEN}")
    assert status == 2
    assert "this one looks like a secret" in output
