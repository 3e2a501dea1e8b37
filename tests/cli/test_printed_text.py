"""Texts of models, rows, rewards and file names reach the terminal escaped, in every command and encoding."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from groupwise.cli import main

EVIL = "\x1b[31mX\x1b]0;t\x07\u202e\u200b[bold]"
SHOWN = r"\x1b[31mX\x1b]0;t\x07\u202e\u200b[bold]"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff]")
RECIPE = """
[model]
gradient_checkpointing = false
[data]
train = "rows.jsonl"
held_out = "rows.jsonl"
chat = false
[sampling]
max_new_tokens = 24
samples_per_prompt = 2
[train]
steps = 1
batch_size = 1
accumulation = 1
[[rewards]]
function = "scores.py:logs"
"""
SCORES = f"""
def logs(completions, log_metric, **_):
    log_metric({EVIL + "$x_$"!r}, 1.0)
    return [float(place) for place in range(len(completions))]

logs.__name__ = {EVIL!r}

def fails(completions, **_):
    raise ValueError({EVIL!r})
"""


@pytest.fixture
def printed(folder, monkeypatch):
    """Run a command with real streams of an encoding: its status and what it printed."""
    (folder / "r.toml").write_text(RECIPE)
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": EVIL}) + "\n")
    (folder / "scores.py").write_text(SCORES)

    def run(*words: str, encoding: str = "utf-8") -> tuple[int, str]:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        status = main(list(words))
        output = "".join(stream.buffer.getvalue().decode(encoding) for stream in streams)
        assert OBEYED.findall(output) == []
        return status, output

    return run


COMMANDS = [
    (
        ["sample", "tiny", EVIL, "-n", "3", "--max-new-tokens", "60"],
        0,
    ),  # random bytes: control characters are among them
    (["usmle", "ask", "tiny", EVIL, "--option", EVIL, "--option", "b", "--max-new-tokens", "60"], 0),
    (["train", "r.toml", "--run.folder", f"run {EVIL}"], 0),
    (["train", "r.toml", "--rewards.0.function", "scores.py:fails"], 2),
    (["eval", "r.toml", "--rewards.0.function", "scores.py:fails"], 2),
    (["eval", "r.toml", "--answers", f"{EVIL}.jsonl"], 0),
    (["check", "r.toml"], 0),
    (["train", EVIL], 2),
    (["train", "r.toml", "--model.source", EVIL], 2),
    (["train", "r.toml", "--task", EVIL], 2),
    (["train", "r.toml", f"--{EVIL}", "1"], 2),
    (["init", f"new {EVIL}"], 0),
    (["recipes", "copy", "quiz", f"copy {EVIL}"], 0),
    (["recipes", "show", EVIL], 2),
    (["models", "list", "--cache", EVIL], 0),
    (["models", "path", EVIL], 2),
    (["control", "train", "--env", EVIL], 2),
    (["control", "play", EVIL], 2),
    ([EVIL], 2),
]


@pytest.mark.parametrize(("words", "status"), COMMANDS, ids=[" ".join(words[:2])[:20] for words, _ in COMMANDS])
def test_nothing_that_a_terminal_obeys_is_printed(printed, words, status):
    result, output = printed(*words)
    assert result == status
    assert SHOWN in output or SHOWN[:20] in output or words[0] in ("usmle", "check")


@pytest.mark.parametrize("words", [COMMANDS[0][0], COMMANDS[2][0], COMMANDS[6][0], COMMANDS[7][0], ["models", "list"]])
def test_a_terminal_without_unicode(printed, words):
    status, output = printed(*words, encoding="ascii")
    assert status in (0, 2)
    assert output.isascii()


def test_a_metric_with_escapes_is_drawn_and_recorded(printed, folder):
    assert printed("train", "r.toml", "--run.folder", "run", "--evaluate.metric", "reward")[0] == 0
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(EVIL + "$x_$" in row for row in rows)
    assert (folder / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    card = (folder / "run" / "model" / "README.md").read_text()
    assert OBEYED.findall(card) == []
