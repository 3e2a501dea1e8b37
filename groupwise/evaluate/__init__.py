"""Grade a model on held-out rows, with confidence intervals."""

from groupwise.evaluate.answers import CHUNK, REWARD, Evaluation, evaluate

__all__ = ["CHUNK", "REWARD", "Evaluation", "evaluate"]
