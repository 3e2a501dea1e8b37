"""A tiny language model that is part of the package: for tests, for trying things out, and for learning on a laptop.

Its architecture is Llama's (grouped-query attention, a head tied to the embedding), with 279,552 parameters, and its
tokenizer reads bytes: token i is byte i for i below 256, followed by three special tokens. Any text goes through it and
back unchanged. The weights are not stored; they are drawn from a seed, and the same seed gives the same bits on every
machine; transformers' own initialisation, which changes between versions, has no part in them.

Saved with ``save_pretrained`` it is a folder like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from groupwise.errors import InputError

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, START, END = "<|pad|>", "<|start|>", "<|end|>"
SPECIAL_TOKENS = (PAD, START, END)  # the tokens 256, 257 and 258
VOCABULARY = 256 + len(SPECIAL_TOKENS)
POSITIONS = 4096
INITIAL_RANGE = 0.02  # the standard deviation of the first weights: every token starts out about equally likely

# One token opens a turn and one closes it; the closing one is also the end of a text, so an answer ends the same way
# with and without the template.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant\\n' -}}{%- endif -%}"
)


def tiny_config() -> LlamaConfig:
    """The shape of the tiny model: two layers of width 128, four heads of 32 that share two keys and values."""
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
    """The tiny model in float32 on the CPU, with the weights of ``seed``. The global random state is left alone."""
    from transformers import LlamaForCausalLM

    # A bool is an int to Python, but a seed of True is a slip.
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise InputError(f"the seed of the tiny model must be a whole number from 0, not {seed!r}")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Building a model draws from the global generator, and in the default dtype, which somebody may have changed.
        model: Any = LlamaForCausalLM(tiny_config())  # type: ignore[no-untyped-call]
        model.to(torch.float32)
    # Uniform numbers are the generator's own integers, scaled; normal ones go through logarithms and cosines, whose
    # last bits differ between processors.
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() == 1:
                weight.fill_(1.0)  # the scales of the norms
            else:
                bound = INITIAL_RANGE * 3**0.5  # the half-width of a uniform distribution with that deviation
                draws = torch.rand(weight.shape, generator=generator, dtype=torch.float32, device="cpu")
                weight.copy_(draws.mul_(2 * bound).sub_(bound))
    model.name_or_path = f"tiny:{seed}"
    return model.eval()  # type: ignore[no-any-return]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The byte tokenizer of the tiny model, with a chat template. It adds no special tokens of its own accord."""
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
        clean_up_tokenization_spaces=False,  # some versions would give " ." back as "."
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.name_or_path = "tiny"
    return fast


def _byte_vocabulary() -> dict[str, int]:
    """The character that stands for each byte in a byte-level tokenizer, and the byte as its number.

    GPT-2's way: a byte that is a printable Latin-1 character stands for itself, the others are shifted behind them.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: 256 + place for place, byte in enumerate(others)}
    return {chr(shifted.get(byte, byte)): byte for byte in range(256)}
