"""Small real runs whose samples the page shows: with grades, pairs and tokens; and with clusters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from groupwise.tasks import Task
from groupwise.viewer.api import Api
from groupwise.viewer.runs import ServedRuns
from tests.training.runs import small_trainer
from tests.training.test_similarity import SIMILAR
from tests.weights import wordllama

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
ROWS = [{"prompt": f"Say {name}: "} for name in (HOSTILE, "one", "two", "three", "four", "five")]
ANSWERS = {
    "train": {"steps": 6, "batch_size": 3, "accumulation": 1},
    "sampling": {"samples_per_prompt": 6, "max_new_tokens": 8},
    "loss": {"kl_coef": 0.05},
    "preference": {"weight": 0.5, "pairs_per_group": 2},
    "masks": {"validity": True, "min_length": 3},
    "evaluate": {"every": 3, "max_new_tokens": 4},
    "run": {"checkpoint_every": 0, "resumable": False, "save_tokens_every": 2, "save_tokens_prompts": 2},
}


def has_vowel(row: Mapping[str, Any], answer: str) -> bool | None:
    """No answer found without a letter."""
    letters = [letter for letter in answer.lower() if letter.isascii() and letter.isalpha()]
    return any(letter in "aeiou" for letter in letters) if letters else None


@pytest.fixture(scope="session")
def answers_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every row is visited three times; its tokens are recorded in steps 1, 3 and 5."""
    folder = tmp_path_factory.mktemp("answers") / "answers"
    task = Task("answers", ROWS, ROWS[:2], grades={"vowel": has_vowel}, metric="vowel")
    small_trainer(folder, ANSWERS, task=task).run()
    return folder


@pytest.fixture(scope="session")
def clusters_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wordllama()
    folder = tmp_path_factory.mktemp("clusters") / "clusters"
    small_trainer(folder, SIMILAR, {"train": {"steps": 2}}).run()
    return folder


def api_of(folder: Path) -> Api:
    return Api(ServedRuns([folder]))
