"""The tokens of some completions, ``tokens/step-000011.parquet``, and what evaluations sampled, ``evaluations/``."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from groupwise.rundir import write_bytes
from groupwise.training.store.rollout_files import file_name

TOKENS, EVALUATIONS = "tokens", "evaluations"


class TokenRow(NamedTuple):
    """A completion with its tokens; the lists have an entry per sampled token, except the last two."""

    step: int
    prompt_number: int
    row: int
    sample: int
    completion: str
    """its text; of a conversation the text of its sampled tokens"""
    ids: list[int]
    ends: list[int]
    """where each token's text ends in ``completion``, in characters; a special token has no text"""
    sampler_logps: list[float | None]
    """as the sampler computed them; None where it gave none"""
    policy_logps: list[float]
    """of the policy before the step's update, at the temperature of sampling"""
    entropy: list[float]
    """of the policy's distribution at each token, in nats"""
    ref_logps: list[float] | None = None
    """of the reference; None without one"""
    all_ids: list[int] | None = None
    """of a conversation: all tokens after the prompt, those of tools and the environment included"""
    sampled: list[bool] | None = None
    """which of these the model sampled"""

    @property
    def texts(self) -> list[str]:
        """The text of each token."""
        return [self.completion[start:end] for start, end in zip([0, *self.ends], self.ends, strict=False)]


def write_tokens(folder: Path, step: int, rows: Sequence[TokenRow]) -> None:
    """Write the tokens of a step into ``folder``, atomically."""
    import pyarrow
    import pyarrow.parquet

    kinds = {
        **dict.fromkeys(("step", "prompt_number", "row", "sample"), pyarrow.int64()),
        "completion": pyarrow.string(),
        **dict.fromkeys(("ids", "ends", "all_ids"), pyarrow.list_(pyarrow.int32())),
        "sampled": pyarrow.list_(pyarrow.bool_()),
        **dict.fromkeys(("sampler_logps", "policy_logps", "entropy", "ref_logps"), pyarrow.list_(pyarrow.float32())),
    }
    columns = {name: pyarrow.array([getattr(row, name) for row in rows], kinds[name]) for name in TokenRow._fields}
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer, compression="zstd")
    write_bytes(folder / file_name(step), buffer.getvalue())
