"""Six equally good stories and a noisy reward: does the policy keep all of them?

The prompt asks for a story in one line. A line is one of six scenes, with two adjectives:

    fine ship, poor sea

The reward is the share of "fine" among the adjectives, whatever the scene, plus noise; a line that is not a scene gets
0 plus noise. Before GRPO, supervised steps show all scenes and both adjectives equally often. The policy should learn
"fine" and keep all six scenes. The reward prefers no scene, so scenes are lost only by chance: a lucky scene is sampled
more often, and gets more chances to be lucky.

``groupwise train modes`` runs it. With ``--task modes.py:task_with_worse`` the reward of one scene is lower by 0.5, and
a policy should sample it less.
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
NOISE = 0.5  # standard deviation; one good adjective adds as much
WORSE, LOSS = "castle", 0.5  # the scene with the lower reward in `task_with_worse`
TOPICS = ("hope", "home", "luck", "time", "love", "fear", "rain", "gold", "snow", "fire", "work", "play", "war", "joy",
          "sleep", "art")  # fmt: skip

FORMS = {scene: re.compile(re.escape(form).replace(r"\{\}", f"({GOOD}|{POOR})")) for scene, form in SCENES.items()}


def task(recipe: Recipe) -> Task:
    """All scenes are equally good."""
    return make_task(recipe, worse=None)


def task_with_worse(recipe: Recipe) -> Task:
    """One scene has a lower reward, which a comparison within a scene cannot see."""
    return make_task(recipe, worse=WORSE)


def make_task(recipe: Recipe, worse: str | None) -> Task:
    rng = random.Random(f"modes {recipe.train.seed}")
    prompts = [f"On {topic}: " for topic in TOPICS]
    lines = [form.format(*words) for form in SCENES.values() for words in product((GOOD, POOR), repeat=2)]
    examples = [(rng.choice(prompts), line) for line in lines * 40]
    rng.shuffle(examples)
    return Task(
        name="modes",
        train=[{"prompt": prompt} for prompt in prompts],
        rewards=(RewardFunction("story", Story(recipe.train.seed, worse)),),
        examples=examples,
    )


def read_line(text: str) -> tuple[str | None, float]:
    """The scene of a line, or None, and the share of good adjectives."""
    for scene, form in FORMS.items():
        if match := form.fullmatch(text.strip()):
            return scene, sum(word == GOOD for word in match.groups()) / len(match.groups())
    return None, 0.0


class Story:
    """The reward. It also logs the quality without noise and the number of scenes."""

    def __init__(self, seed: int, worse: str | None) -> None:
        self.seed, self.worse = seed, worse

    def __call__(
        self, completions: Sequence[Any], trainer_state: Any, log_metric: Any, log_extra: Any, **_: Any
    ) -> list[float]:
        rng = random.Random(f"noise {self.seed} {trainer_state.global_step}")
        read = [read_line(text_of(completion)) for completion in completions]
        worth = [quality - LOSS * (scene is not None and scene == self.worse) for scene, quality in read]
        counts = Counter(scene for scene, _ in read if scene is not None)
        log_extra("scene", [scene for scene, _ in read])
        log_metric("modes/quality", sum(quality for _, quality in read) / len(read))
        log_metric("modes/worth", sum(worth) / len(worth))
        log_metric("modes/no_scene", sum(scene is None for scene, _ in read) / len(read))
        log_metric("modes/effective", effective_number(counts))
        for scene in SCENES:
            log_metric(f"modes/share/{scene}", counts[scene] / len(read))
        return [value + rng.gauss(0.0, NOISE) for value in worth]


def by_scene(batch: Any) -> list[str]:
    """The true clusters, for ``--advantages.grouping modes.py:by_scene``. Invalid lines form a cluster of their own, so
    nothing discourages them."""
    return [f"{place // batch.samples}_{scene}" for place, scene in enumerate(batch.extra["scene"])]


def effective_number(counts: Counter[str]) -> float:
    """The exponential of the entropy: 6 for six equally frequent scenes, 1 for a single one."""
    total = sum(counts.values())
    return math.exp(-sum(n / total * math.log(n / total) for n in counts.values())) if total else 0.0
