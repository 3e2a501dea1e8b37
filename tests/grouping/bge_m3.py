"""A tiny model in the format of BAAI/bge-m3: XLM-RoBERTa, CLS pooling, normalisation, 8,192 tokens, pickled weights."""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaModel

TOKENS = 8192  # that it reads; its table has two positions more, since XLM-RoBERTa starts after the padding index, 1
WIDTH = 16
MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}  # by folder


def save_tiny_bge_m3(folder: Path) -> Path:
    """Write the model with the file names of the one on the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=TOKENS + 2,
        type_vocab_size=1,
        initializer_range=0.5,  # so that texts differ
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    config.architectures = ["XLMRobertaModel"]
    config.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.save(XLMRobertaModel(config).state_dict(), folder / "pytorch_model.bin")
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(MODULES.items())
    ]
    for path in MODULES:
        (folder / path).mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": WIDTH, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    _write(folder / "modules.json", modules)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": TOKENS, "do_lower_case": False})
    _write(folder / "1_Pooling" / "config.json", pooling)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    """A unigram tokenizer with XLM-RoBERTa's special tokens, whose other tokens are letters."""
    special = ("<s>", "<pad>", "</s>", "<unk>")
    letters = "▁" + string.ascii_letters + string.digits + string.punctuation
    tokenizer = Tokenizer(models.Unigram([(token, 0.0) for token in (*special, *letters)], unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=None, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=TOKENS,
    )


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
