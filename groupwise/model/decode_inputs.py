"""What the decode attention of a GPU is told about a step: which rows, which prompts, which pages."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

TILE_ROWS = 16  # samples of one prompt that are computed together


class DecodeInputs(NamedTuple):
    """The inputs of a decode step, int32 on the device; rows that are not in use have the spare slot."""

    slots: Tensor  # (rows,)
    lengths: Tensor  # (rows,) tokens of the completion before this one
    positions: Tensor  # (rows,) of this token, prompt included
    prompt_lengths: Tensor  # (rows,) 0 for a row that has no prompt
    tile_starts: Tensor  # (tiles,) of its prompt in the pool
    tile_lengths: Tensor  # (tiles,) 0 for a tile that is not in use
    tile_rows: Tensor  # (tiles, TILE_ROWS) −1 for an empty place
    pages: Tensor  # (rows,) where this token's key and value are stored
    order: Tensor  # (rows,) the rows, those with the longest completions first
