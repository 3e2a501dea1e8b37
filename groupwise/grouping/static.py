"""Static embeddings: the vector of a text is the mean of its tokens' rows in a table.

The vectors equal those of WordLlama's ``embed``: no special tokens, no truncation, padding ignored, sums in float32,
and the zero vector for a text without tokens. Only the tokenizers and safetensors packages are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from groupwise.errors import CheckpointError
from groupwise.model.source import first_line

TABLE = "l2_supercat_256.safetensors"
TENSOR = "embedding.weight"
TOKENIZER = "tokenizer.json"


def is_static(folder: Path) -> bool:
    """Whether a folder holds such a table, as `groupwise models fetch wordllama` makes it."""
    return (folder / TABLE).is_file()


class StaticTable:
    """A table of token vectors and its tokenizer, from the folder of ``wordllama``, on the CPU."""

    def __init__(self, folder: Path, batch_size: int = 64) -> None:
        self.batch_size = batch_size
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        rows = _load(folder / TABLE, load_file).get(TENSOR)
        if rows is None or rows.dim() != 2 or not rows.is_floating_point():
            raise CheckpointError(f"{folder / TABLE} holds no table of numbers called {TENSOR}; get it again")
        self.rows: Tensor = rows.float()  # stored in float16; sums are in float32
        self.width = self.rows.shape[1]
        self._tokenizer = _load(folder / TOKENIZER, Tokenizer.from_file)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        tokens = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        if tokens > len(self.rows):
            raise CheckpointError(
                f"{folder} is inconsistent: its tokenizer has {tokens:,} tokens, but its table has "
                f"{len(self.rows):,} rows; get it again"
            )

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """The vectors ``(N, D)`` of N texts, float32 on the CPU."""
        starts = range(0, len(texts), self.batch_size)
        parts = [self._mean_rows(texts[start : start + self.batch_size]) for start in starts]
        return torch.cat(parts) if parts else torch.zeros(0, self.width)

    def _mean_rows(self, texts: Sequence[str]) -> Tensor:
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        *offsets, _ = accumulate(map(len, ids), initial=0)
        flat = torch.tensor([token for row in ids for token in row], dtype=torch.long)
        return functional.embedding_bag(flat, self.rows, torch.tensor(offsets), mode="mean")


def _load(path: Path, load: Callable[[str], Any]) -> Any:
    try:
        return load(str(path))
    except Exception as error:  # the tokenizers package raises nothing more specific
        raise CheckpointError(f"{path} could not be loaded: {first_line(error)}; get it again") from error
