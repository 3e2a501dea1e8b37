"""Six stories that are equally good, and a reward that is noisy: what becomes of variety?

The prompt asks for a story in a line. A line is one of six scenes, with two adjectives in it:

    fine ship, poor sea

The reward is the share of adjectives that are "fine", whatever the scene, plus noise that knows nothing of either; a
line of no scene gets nothing. Before GRPO starts, the model has seen all scenes and both adjectives equally often. What
is to be learned is "fine"; what is to be kept is all six scenes. Nothing in the reward prefers one, so a policy that
forgets scenes does so by chance: a scene that was lucky is told more often, and gets more chances to be lucky.

``groupwise train modes.toml`` runs it. With ``--task recipes/modes.py:task_with_worse`` one scene is worth half a point
less, and a policy should tell it less.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

from groupwise.config import Recipe
from groupwise.rewards import RewardFunction, text_of
from groupwise.tasks import Task

SCENES = {
    "sea": "{} ship, {} sea",
    "castle": "{} king, {} castle",
    "forest": "{} wolf, {} forest",
    "space": "{} rocket, {} moon",
    "city": "{} taxi, {} street",
    "garden": "{} bee, {} rose",
}
GOOD, POOR = "fine", "poor"
NOISE = 0.5  # the standard deviation; one good adjective more is worth as much
WORSE, LOSS = "castle", 0.5  # the scene that `task_with_worse` pays less for
TOPICS = ("hope", "home", "luck", "time", "love", "fear", "rain", "gold", "snow", "fire", "work", "play", "war", "joy",
          "sleep", "art")  # fmt: skip

FORMS = {scene: re.compile(re.escape(form).replace(r"\{\}", f"({GOOD}|{POOR})")) for scene, form in SCENES.items()}


def task(recipe: Recipe) -> Task:
    """All scenes are equally good."""
    return make_task(recipe, worse=None)


def task_with_worse(recipe: Recipe) -> Task:
    """One scene is worth less than the others: a difference that answers of the same scene cannot show."""
    return make_task(recipe, worse=WORSE)


def make_task(recipe: Recipe, worse: str | None) -> Task:
    chance = random.Random(f"modes {recipe.train.seed}")
    prompts = [f"On {topic}: " for topic in TOPICS]
    lines = [form.format(*words) for form in SCENES.values() for words in product((GOOD, POOR), repeat=2)]
    examples = [(chance.choice(prompts), line) for line in lines * 40]
    chance.shuffle(examples)
    return Task(
        name="modes",
        train=[{"prompt": prompt} for prompt in prompts],
        rewards=(RewardFunction("story", Story(recipe.train.seed, worse)),),
        examples=examples,
    )


def read_line(text: str) -> tuple[str | None, float]:
    """The scene of a line and the share of its adjectives that are good; no scene if it is none of the six."""
    for scene, form in FORMS.items():
        if found := form.fullmatch(text.strip()):
            return scene, sum(word == GOOD for word in found.groups()) / len(found.groups())
    return None, 0.0


class Story:
    """The reward; it also logs what the noise hides: how good the lines are, and how many scenes there are."""

    def __init__(self, seed: int, worse: str | None) -> None:
        self.seed, self.worse = seed, worse

    def __call__(
        self, completions: Sequence[Any], trainer_state: Any, log_metric: Any, log_extra: Any, **_: Any
    ) -> list[float]:
        chance = random.Random(f"noise {self.seed} {trainer_state.global_step}")
        read = [read_line(text_of(completion)) for completion in completions]
        worth = [quality - LOSS * (scene is not None and scene == self.worse) for scene, quality in read]
        told = Counter(scene for scene, _ in read if scene is not None)
        log_extra("scene", [scene for scene, _ in read])
        log_metric("modes/quality", sum(quality for _, quality in read) / len(read))
        log_metric("modes/worth", sum(worth) / len(worth))
        log_metric("modes/no_scene", sum(scene is None for scene, _ in read) / len(read))
        log_metric("modes/effective", effective_number(told))
        for scene in SCENES:
            log_metric(f"modes/share/{scene}", told[scene] / len(read))
        return [value + chance.gauss(0.0, NOISE) for value in worth]


def by_scene(batch: Any) -> list[str]:
    """Clusters as they should be, for ``--advantages.grouping recipes/modes.py:by_scene``. Broken lines are one too:
    they are compared only with broken lines, so that nothing says that they are broken."""
    return [f"{place // batch.samples}_{scene}" for place, scene in enumerate(batch.extra["scene"])]


def effective_number(counts: Counter[str]) -> float:
    """The exponential of the entropy: six scenes told equally often are six, one told always is one."""
    total = sum(counts.values())
    return math.exp(-sum(n / total * math.log(n / total) for n in counts.values())) if total else 0.0
