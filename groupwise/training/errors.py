"""What can go wrong in the middle of a step: memory runs out, or a number is none."""

from __future__ import annotations

import torch

from groupwise.errors import GroupwiseError

SMALLEST_BUDGET = 64  # tokens of a pack; with fewer no memory is won
# What a CPU says, and a GPU whose memory others have taken before its libraries could set up.
SAID_INSTEAD = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class NotFiniteError(GroupwiseError, ArithmeticError):
    """A loss or gradient is NaN or infinite; the weights have not moved."""


class OutOfMemoryError(GroupwiseError, RuntimeError):
    """Not even one sample fits, or what the optimizer remembers does not."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch's means that memory ran out."""
    if isinstance(error, GroupwiseError):
        return False
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in SAID_INSTEAD)
