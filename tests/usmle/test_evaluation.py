"""The facts at the top of a report."""

from __future__ import annotations

import pytest

from groupwise.config import make_recipe, with_settings
from groupwise.usmle.evaluation import facts_of


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ({}, "the task's own rows"),
        ({"data.held_out": "data/medqa.jsonl"}, "medqa.jsonl"),
        ({"data.held_out": ["data/a.jsonl", "data/b.csv"], "data.train": "data/c.jsonl"}, "a.jsonl, b.csv"),
        ({"data.train": "data/c.jsonl", "data.held_out_from_train": 300}, "300 held out from c.jsonl"),
        ({"data.train": "GBaker/MedQA-USMLE-4-options", "data.held_out_split": "test"}, "MedQA-USMLE-4-options, test"),
    ],
)
def test_the_source_of_the_questions(settings, source):
    assert facts_of(with_settings(make_recipe({"task": "usmle"}), settings))["questions"] == source


def test_the_facts_of_a_report():
    facts = facts_of(make_recipe({"task": "usmle", "task_options": {"prompt": "direct"}, "evaluate": {"samples": 3}}))
    assert list(facts) == ["model", "questions", "prompt", "longest answer", "samples", "seed", "versions"]
    assert (facts["prompt"], facts["samples"]) == ("direct", "3, temperature 1")
    assert "samples" not in facts_of(make_recipe({"task": "usmle"}))
