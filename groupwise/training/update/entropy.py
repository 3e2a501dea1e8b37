"""A weight of the entropy bonus that adapts to a target entropy (Skywork-OR1, arXiv 2505.22312; as in TRL).

After an update whose mean entropy per token was at or below the target, the weight grows by a step, else it shrinks by
one, within bounds. It is applied in an update only if the entropy of the update before was at or below the target, so
the first update has no bonus. The entropy is the mean over all completion tokens of the mini-batch, on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from groupwise.config import Recipe


class EntropyController:
    """The weight of the entropy bonus, from update to update; without ``loss.entropy_target`` it changes nothing."""

    def __init__(self) -> None:
        self._coefficient: float | None = None  # None: the recipe's
        self._entropy = math.inf  # of the last update

    def coefficient(self, step_recipe: Recipe) -> float:
        """The current weight, whether or not the next update applies it."""
        return step_recipe.loss.entropy_coef if self._coefficient is None else self._coefficient

    def apply(self, step_recipe: Recipe) -> Recipe:
        """The recipe with the weight of the next update."""
        loss = step_recipe.loss
        if loss.entropy_target is None:
            return step_recipe
        weight = self.coefficient(step_recipe) if self._entropy <= loss.entropy_target else 0.0
        return step_recipe.model_copy(update={"loss": loss.model_copy(update={"entropy_coef": weight})})

    def observe(self, entropy: float, step_recipe: Recipe) -> None:
        """Take in the entropy of an update, NaN if nothing was computed."""
        loss = step_recipe.loss
        if loss.entropy_target is None or math.isnan(entropy):
            return
        weight = self.coefficient(step_recipe)
        if entropy <= loss.entropy_target:
            self._coefficient = min(weight + loss.entropy_step, loss.entropy_coef_max)
        else:
            self._coefficient = max(weight - loss.entropy_step, loss.entropy_coef_min)
        self._entropy = entropy

    def state(self) -> dict[str, float] | None:
        """None before the first update, and without a target."""
        return None if self._coefficient is None else {"coefficient": self._coefficient, "entropy": self._entropy}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        self._coefficient, self._entropy = (
            (None, math.inf) if state is None else (state["coefficient"], state["entropy"])
        )
