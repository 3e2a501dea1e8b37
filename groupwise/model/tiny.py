"""A tiny built-in language model for tests and first experiments.

A Llama (grouped-query attention, tied embeddings) of 279,552 parameters with a byte tokenizer: token i is byte i below
256, followed by three special tokens, and any text round-trips unchanged. The weights are drawn from a seed, with the
same bits on every machine, independent of transformers' initialisation, which changes between versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from groupwise.errors import check_integer

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, START, END = "<|pad|>", "<|start|>", "<|end|>"
SPECIAL_TOKENS = (PAD, START, END)  # the tokens 256, 257 and 258
VOCABULARY = 256 + len(SPECIAL_TOKENS)
POSITIONS = 4096
INITIAL_STD = 0.02  # of the weights; every token starts out about equally likely

# One token opens a turn and one closes it. The closing one is also EOS, so an answer ends the same way with and without
# the template.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant\\n' -}}{%- endif -%}"
)


def tiny_config() -> LlamaConfig:
    """Two layers of width 128; four heads of dimension 32 that share two KV heads."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=256,
        bos_token_id=257,
        eos_token_id=258,
    )


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """The tiny model in float32 on the CPU, with the weights of ``seed``. The global random state is not changed."""
    from transformers import LlamaForCausalLM

    check_integer("the seed of the tiny model", seed, 0)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Creating a model draws from the global generator, in the default dtype.
        model: Any = LlamaForCausalLM(tiny_config())  # type: ignore[no-untyped-call]
        model.to(torch.float32)
    # Uniform numbers are scaled integers; normal ones go through logarithms and cosines, whose last bits differ between
    # processors.
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() == 1:
                weight.fill_(1.0)  # the scales of the norms
            else:
                bound = INITIAL_STD * 3**0.5  # half-width of the uniform distribution
                draws = torch.rand(weight.shape, generator=generator, dtype=torch.float32, device="cpu")
                weight.copy_(draws.mul_(2 * bound).sub_(bound))
    model.name_or_path = f"tiny:{seed}"
    return model.eval()  # type: ignore[no-any-return]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The byte tokenizer of the tiny model, with a chat template. It adds no special tokens by itself."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,  # some versions would decode " ." as "."
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.name_or_path = "tiny"
    return fast


def _byte_vocabulary() -> dict[str, int]:
    """The character of each byte in a byte-level tokenizer, with the byte as its id.

    As in GPT-2: a printable Latin-1 byte is its own character, the others are shifted behind them.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
