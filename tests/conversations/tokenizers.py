"""Small tokenizers in the manner of real ones: byte-level BPE, and BPE with SentencePiece's word boundaries."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the weather in Paris is sunny and the answer is forty two",
    "call the tool search with the query weather in Paris",
    '{"name": "search", "arguments": {"query": "the weather in Paris"}}',
    "user assistant system tool im_start im_end think tool_call tool_response INST start_of_turn end_of_turn",
    "You are a helpful assistant. Answer the question of the user.\n\nThink, then answer.\n",
]
MERGES = 300


def byte_level(special: Sequence[str], markers: Sequence[str] = (), **options: Any) -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3 and Qwen."""
    return _with_tokens(_byte_level(), special, markers, **options)


def sentencepiece(
    special: Sequence[str], markers: Sequence[str] = (), *, prepend: bool = False, **options: Any
) -> PreTrainedTokenizerFast:
    """As Gemma; with ``prepend`` as Llama 2, Mistral and Phi-3, where a text begins with a word boundary."""
    return _with_tokens(_sentencepiece(prepend), special, markers, **options)


@functools.cache
def _byte_level() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=256 + MERGES, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    text: str = tokenizer.to_str()
    return text


@functools.cache
def _sentencepiece(prepend: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁|\n"), "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=100 + MERGES, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    pieces = ["<unk>", "▁", "\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in learned["vocab"] if piece not in pieces]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [tuple(pair) for pair in learned["merges"] if "\n" not in "".join(pair)]
    result = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    result.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prepend else replace
    result.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    text: str = result.to_str()
    return text


def _with_tokens(
    backend: str, special: Sequence[str], markers: Sequence[str], *, rstrip: bool = False, **options: Any
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer.from_str(backend)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False, rstrip=rstrip) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in markers])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **options)
