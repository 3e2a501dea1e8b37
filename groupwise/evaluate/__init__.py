"""How good a model is on held-out rows.

`answers` asks and grades for any task. For multiple choice there is more to see: `choice` analyses the answers,
`compare` sets two models against each other question by question, `report` writes what was found, for readers and for
programs.
"""

from groupwise.evaluate.answers import CHUNK, REWARD, Evaluation, evaluate

__all__ = ["CHUNK", "REWARD", "Evaluation", "evaluate"]
