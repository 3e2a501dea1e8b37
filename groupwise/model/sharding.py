"""Divide a prepared model's weights among the ranks (`groupwise.distributed.fsdp`)."""

from __future__ import annotations

from dataclasses import replace

import torch

from groupwise.distributed.fsdp import ShardedWeights
from groupwise.distributed.ranks import Ranks
from groupwise.errors import InputError
from groupwise.model.handle import ModelHandle, decoder_layers


def shard_weights(handle: ModelHandle, ranks: Ranks, device: torch.device) -> ModelHandle:
    """The handle of the same model with its weights divided among the ranks, each part on its rank's ``device``.

    Prepare the model on the CPU: it moves layer by layer, and no device holds more than a complete layer.
    """
    if handle.head is None:
        raise InputError(
            f"the weights of {type(handle.model).__name__} cannot be sharded, because it takes the plain path: "
            f"{handle.fallback_reason}. Use model.sharding = 'optimizer'"
        )
    layers = decoder_layers(handle.model)
    return replace(handle, sharded=ShardedWeights(handle.model, layers, ranks, ranks.mesh(device)))
