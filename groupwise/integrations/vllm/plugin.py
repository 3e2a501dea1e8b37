"""``sampling.generator = "vllm"``."""

from __future__ import annotations

from groupwise.config import Recipe
from groupwise.distributed.ranks import Ranks
from groupwise.generate.types import Generator
from groupwise.integrations.vllm.client import ServerClient, read_key
from groupwise.integrations.vllm.in_process import InProcessGenerator
from groupwise.integrations.vllm.remote import RemoteGenerator
from groupwise.integrations.vllm.server import Server
from groupwise.integrations.vllm.weights import make_transfer
from groupwise.model.handle import ModelHandle


def make_vllm(recipe: Recipe, handle: ModelHandle, ranks: Ranks) -> Generator:
    """Completions from the servers of [vllm], or without any from vLLM in this process."""
    settings = recipe.vllm
    if not settings.servers:
        return InProcessGenerator(handle, recipe, _needed_length(recipe, handle))
    needed = _needed_length(recipe, handle) or 1
    key, tied = read_key(settings.api_key_env, "vllm"), bool(handle.model.config.get_text_config().tie_word_embeddings)
    clients = [ServerClient(url, key, settings.timeout) for url in dict.fromkeys(settings.servers)]
    return RemoteGenerator(
        handle,
        [Server(client, needed, tied=tied) for client in clients],
        make_transfer(recipe) if ranks.is_main else None,
        ranks,
        wait=settings.wait,
        max_num_seqs=recipe.sampling.max_num_seqs,
    )


def _needed_length(recipe: Recipe, handle: ModelHandle) -> int | None:
    """The tokens of the longest prompt with its completion; None if prompts have no maximal length."""
    if recipe.data.max_prompt_length is None:
        return None
    new_tokens = max(recipe.sampling.max_new_tokens, recipe.evaluate.max_new_tokens or 0)
    length = recipe.data.max_prompt_length + new_tokens
    return length if handle.context_length is None else min(length, handle.context_length)
