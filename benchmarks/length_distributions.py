"""How long completions are: those of GSM8K's worked answers, and a log-normal distribution with a heavy tail.

A distribution is taken at evenly spaced quantiles and shuffled by a seed, so that few samples already have its shape,
and they are the same on every machine.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

# Digits are tokens of their own, as in the tokenizers of SmolLM2 and Qwen2.5; so are words, signs and line breaks.
TOKEN = re.compile(r"\d|[^\W\d]+|[^\w\s]|\n")

# Of the 7,473 answers of GSM8K's training set, in tokens of `TOKEN`: the shortest, every twentieth, and the longest.
GSM8K_QUANTILES = (
    33, 59, 67, 74, 79, 85, 90, 96, 102, 107, 114, 120, 128, 136, 145, 153, 164, 178, 198, 232, 464,
)  # fmt: skip


def gsm8k_lengths(data: Path | None = None, tokenizer: Any = None) -> list[int]:
    """Sorted lengths of the answers in a JSON-lines file with the column ``answer``, or in a folder that has
    gsm8k_train.jsonl; without one, the quantiles above. They are counted with a tokenizer if there is one.
    """
    if data is None:
        return list(GSM8K_QUANTILES)
    path = data / "gsm8k_train.jsonl" if data.is_dir() else data
    try:
        answers = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"--data {path} must be JSON lines with the column answer: {error!r}") from None
    if not answers or not all(isinstance(answer, str) and answer for answer in answers):
        raise SystemExit(f"--data {path} must have at least one answer, and each must be a text")
    if tokenizer is None:
        return sorted(max(1, len(TOKEN.findall(answer))) for answer in answers)
    return sorted(len(ids) for ids in tokenizer(answers, add_special_tokens=False)["input_ids"])


def at_quantile(ordered: Sequence[int], share: float) -> float:
    """The value below which ``share`` of the sorted values lie, linear in between."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def log_normal(median: float, sigma: float) -> Callable[[float], float]:
    """The quantiles of a log-normal distribution."""
    return lambda share: median * math.exp(sigma * NormalDist().inv_cdf(share))


def spread(quantile: Callable[[float], float], count: int, limit: int, seed: int = 0) -> list[int]:
    """``count`` lengths between 1 and ``limit``, shuffled."""
    lengths = [min(limit, max(1, round(quantile((number + 0.5) / count)))) for number in range(count)]
    random.Random(seed).shuffle(lengths)
    return lengths


def even(lengths: Sequence[int]) -> list[int]:
    """As many tokens, in completions of equal length but for one token."""
    size, longer = divmod(sum(lengths), len(lengths))
    return [size + (number < longer) for number in range(len(lengths))]
