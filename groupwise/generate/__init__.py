"""Generation: token ids in, token ids and log-probs out. A prompt is computed once for all of its samples."""

from groupwise.generate.engine import Engine
from groupwise.generate.plain import PlainGenerator
from groupwise.generate.stop import StopStrings
from groupwise.generate.types import STOP_REASONS, Generator, Rollout, Sampling, Stop

__all__ = ["STOP_REASONS", "Engine", "Generator", "PlainGenerator", "Rollout", "Sampling", "Stop", "StopStrings"]
