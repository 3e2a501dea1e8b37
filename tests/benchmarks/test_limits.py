"""The limits of generation and training, computed by hand for a small shape."""

from __future__ import annotations

import pytest
import torch
from common import shape_config
from limits import (
    MeasuredProducts,
    ModelSize,
    decode_reads,
    forward_seconds,
    generation_limits,
    training_limit,
)
from transformers import LlamaConfig, LlamaForCausalLM

# Two layers of width 8: queries 8 × 8, keys and values 4 × 8 each, output 8 × 8, three products of the MLP with 12.
HAND = ModelSize(weights=1_000, layers={(8, 8): 4, (4, 8): 4, (12, 8): 4, (8, 12): 2}, head=(20, 8), cached=16)


def small(tied: bool) -> LlamaForCausalLM:
    config = LlamaConfig(vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied)  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [True, False])
def test_the_size_of_a_model(tied):
    size = ModelSize.of(small(tied))
    layer = 2 * 8 * 8 + 2 * 4 * 8 + 3 * 12 * 8 + 2 * 8  # four of attention, three of the MLP, two norms
    assert size.weights == 2 * layer + 8 + 20 * 8  # the head is read, an input embedding of its own is not
    assert size.layers == HAND.layers
    assert size.head == (20, 8)
    assert size.cached == 2 * 2 * 1 * 4  # keys and values, layers, heads, width


def test_the_shape_of_7b_has_the_numbers_of_the_real_one():
    with torch.device("meta"):
        model = LlamaForCausalLM(shape_config("qwen2.5-7b-shape"))
    assert sum(parameter.numel() for parameter in model.parameters()) == 7_615_487_488  # Qwen2.5-7B without biases
    assert ModelSize.of(model).weights == 7_615_487_488 - 152_064 * 3584
    assert ModelSize.of(model).cached == 2 * 28 * 4 * 128


def test_decode_steps_read_weights_prompts_and_completions():
    # Two prompts of 3 and 5 tokens, three samples each, four tokens: three steps after the prefill.
    by_hand = 0
    for step in range(1, 4):
        by_hand += 1_000 + (3 + 5) * 16  # the prompts once per group
        by_hand += 6 * step * 16  # what each sample has so far
    assert decode_reads(HAND, [3, 5], 3, 4) == by_hand == 3 * 1_128 + 6 * 6 * 16


def test_one_token_needs_no_decode_step():
    assert decode_reads(HAND, [3], 2, 1) == 0


def seconds(rows: int, weight: tuple[int, int]) -> float:
    """A device of 1,000 multiplications per second."""
    return rows * weight[0] * weight[1] / 1_000


def test_generation_by_hand():
    found = generation_limits(HAND, [3, 5], 3, 4, bytes_per_number=2, bytes_per_second=1e4, product=seconds)
    layers = 4 * 64 + 4 * 32 + 4 * 96 + 2 * 96
    prefill = 8 * layers + 2 * 160  # logits after each prompt only
    decode = 3 * (6 * layers + 6 * 160)
    assert found.bandwidth == pytest.approx(2 * (3 * 1_128 + 6 * 6 * 16) / 1e4)
    assert found.arithmetic == pytest.approx((prefill + decode) / 1_000)
    assert found.sum == found.bandwidth + found.arithmetic


def test_training_by_hand():
    layers = 4 * 64 + 4 * 32 + 4 * 96 + 2 * 96
    assert training_limit(HAND, 8, 24, seconds) == pytest.approx(3 * (32 * layers + 24 * 160) / 1_000)


def test_a_product_is_measured_once_and_many_rows_in_proportion(monkeypatch):
    measured: list[tuple[int, tuple[int, int]]] = []
    products = MeasuredProducts("cpu", torch.float32)
    monkeypatch.setattr(products, "_measure", lambda rows, weight: measured.append((rows, weight)) or rows * 0.5)
    assert [products(2, (8, 8)), products(2, (8, 8)), products(3, (8, 8))] == [1.0, 1.0, 1.5]
    assert products(4096, (8, 8)) == 2048
    assert measured == [(2, (8, 8)), (3, (8, 8)), (1024, (8, 8))]


def test_a_measured_product_takes_time():
    products = MeasuredProducts("cpu", torch.float32)
    assert 0 < products(2, (16, 8)) < 1
    assert forward_seconds(HAND, 2, 2, products) > 0
