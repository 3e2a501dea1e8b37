"""GSM8K with a calculator on a CPU: the packaged word problems, and a tiny model that has learned to call the tool."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.config import load_recipe
from groupwise.data import read_rows
from groupwise.environments.arithmetic import calculate
from groupwise.packaged import recipes_folder
from groupwise.rewards.maths import gold_number
from groupwise.tasks import load_task
from groupwise.training.evaluation import evaluate_rows
from groupwise.training.store.rollout_files import read_rollouts
from groupwise.training.trainer import Trainer
from tests.training.runs import TOOL_TEMPLATE, RecordingDisplay, metrics_of

RECIPE = Path(__file__).parents[2] / "benchmarks" / "gsm8k-tool.toml"
ROWS = recipes_folder() / "data" / "word_problems.jsonl"
FUNCTION = {"name": "arithmetic", "arguments": {"expression": "6 * 7"}}


def test_the_calculator_agrees_with_every_step_of_the_packaged_problems():
    rows = read_rows(ROWS)
    assert len(rows) == 40
    for row in rows:
        steps = re.findall(r"<<([^=]+)=(\d+)>>", row["answer"])
        assert steps
        assert all(calculate(expression) == int(value) for expression, value in steps), row
        assert gold_number(row["answer"]) == int(steps[-1][1])
    assert len({row["question"] for row in rows}) == len(rows)


@pytest.mark.slow
def test_a_tiny_model_calls_the_calculator_and_answers(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TOOL_TEMPLATE)
    recipe = load_recipe(
        RECIPE,
        {
            "model": {"source": "tiny", "device": "cpu", "threads": 1},
            "data": {
                "train": str(ROWS),
                "held_out": str(ROWS),
                "held_out_rows": 4,
                "chat": True,
                "system_prompt": None,
            },
            "environment": {"chat_template": str(template), "call_format": "hermes"},
            "sft": {"steps": 110, "batch_size": 8, "learning_rate": 4e-3},
            "sampling": {"samples_per_prompt": 4, "max_new_tokens": 90, "temperature": 0.5},
            "train": {"steps": 2, "batch_size": 2},
            "evaluate": {"before_training": False, "every": 0, "max_new_tokens": 90},
            "run": {"tensorboard": False, "plot": False},
        },
    )
    task = load_task(recipe)
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": FUNCTION}]}
    told, said = {"role": "tool", "content": "42", "name": "arithmetic"}, {"role": "assistant", "content": "#### 42"}
    examples = [(row["prompt"], [call, told, said]) for row in task.train]
    task = replace(task, examples=examples)
    with Trainer(recipe, folder=tmp_path / "run", display=RecordingDisplay(), task=task) as trainer:
        trainer.run()
        held_out = evaluate_rows(trainer.components, trainer.generator)
    rows = metrics_of(tmp_path / "run")
    assert [row["environment/tool_errors"] for row in rows if "environment/tool_errors" in row] == [0, 0]
    expected = [call, {**told, "tool_call_id": "call00000"}, said]
    table = read_rollouts(tmp_path / "run")
    conversations = [json.loads(text) for text in table.column("conversation").to_pylist()]
    assert conversations.count(expected) > len(conversations) / 2
    pairs = zip(conversations, table.column("reward/format").to_pylist(), strict=True)
    assert {reward for conversation, reward in pairs if conversation == expected} == {1.0}
    assert held_out.metrics["accuracy_no_answer"] < 0.5
