"""Bytes, operations and seconds of the cost model against numbers computed by hand, and against real tensors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from groupwise.config import load_recipe, make_recipe
from groupwise.errors import ConfigError
from groupwise.model import MasterWeights, prepare
from groupwise.model.cache import bytes_per_token
from groupwise.model.packing import activation_bytes
from groupwise.model.tiny import tiny_config, tiny_model
from groupwise.packaged import packaged_recipes
from groupwise.planning import cost, memory
from groupwise.planning.cost import Device
from groupwise.planning.gpus import GPUS
from groupwise.planning.links import HOST_RATE, LINK_LATENCY, LINK_SHARE, NETWORK_LATENCY, SERVER_LATENCY, Links
from groupwise.planning.shapes import CATALOGUE_SHAPES, SHAPES, TINY, ModelShape, shape_of_config, shape_of_source
from groupwise.planning.work import StepWork, work_of
from groupwise.training.update.objective import samples_completions
from groupwise.training.update.optimizer import make_optimizer

UNIT = Device(1.0, 1.0)  # so that ideal times are operations and bytes

# Two layers, width 4, MLP 6, two heads of 2 and one KV head, vocabulary 10.
SMALL = ModelShape("small", layers=2, hidden=4, intermediate=6, heads=2, kv_heads=1, head_dim=2, vocabulary=10)
LAYER = 4 * 4 + 4 * 4 + 2 * 4 * 2 + 3 * 4 * 6  # query, output, key and value, MLP: 120 weights

PUBLISHED = {  # the numbers of parameters that the hub counts in their files
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
}


def test_parameters_of_the_named_shapes():
    assert {name: shape.parameters for name, shape in SHAPES.items()} == PUBLISHED


def test_parameters_of_the_catalogue():
    from groupwise.model.catalogue import CATALOGUE

    for name, shape in CATALOGUE_SHAPES.items():
        if name in CATALOGUE:
            assert shape.parameters == CATALOGUE[name].parameters, name


def test_counts_of_a_small_shape():
    assert SMALL.layer_matrices == LAYER == 120
    assert SMALL.parameters == 2 * (120 + 2 * 4) + 4 + 2 * 40
    assert SMALL.cache_bytes == 2 * 2 * 1 * 2 * 2  # keys and values, layers, KV heads, width, bytes
    assert SMALL.activation_bytes == 2 * (7 * 4 + 3 * 6) * 2
    # rank × (in + out) of q, o, k, v, gate, up, down
    assert SMALL.lora_weights(3) == 2 * 3 * (8 + 8 + 6 + 6 + 10 + 10 + 10)


def test_a_real_model_has_these_numbers():
    model = tiny_model()
    handle = prepare(model, compile=False)
    shape = shape_of_config(tiny_config().to_dict(), "tiny", "config")
    assert shape == TINY
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    assert shape.cache_bytes * 2 == bytes_per_token(handle.shapes, torch.float32)  # two bytes here, four there
    assert shape.activation_bytes * 2 == activation_bytes(handle)
    assert shape.checkpoint_bytes * 2 == activation_bytes(handle, checkpointing=True)


@pytest.mark.parametrize("tied", [True, False])
def test_memory_counts_the_bytes_of_real_masters_and_of_adamw(tied):
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    shape, work = shape_of_config(config.to_dict(), "m", "config"), StepWork(1, 1, 1, 1, 1)
    masters = MasterWeights(model)
    optimizer = make_optimizer(make_recipe({}), model, masters)
    for master in masters.parameters():
        master.grad = torch.zeros_like(master)
    optimizer.step()
    counted = memory.optimizer_sharded(shape, work, 1)
    assert counted["weights"] == sum(weight.nbytes for weight in model.parameters())
    assert counted["masters"] == sum(master.nbytes for master in masters.parameters())
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert counted["AdamW"] == sum(moment.nbytes for moment in moments)
    assert memory.gradient_bytes(shape, work, 1, "optimizer") == sum(m.grad.nbytes for m in masters.parameters())
    assert sum(counted.values()) == 14 * shape.parameters


def test_sharding_divides_what_it_says():
    shape, work = SHAPES["qwen2.5-7b"], StepWork(8, 100, 8, 100, 100)
    count = shape.parameters
    assert memory.optimizer_sharded(shape, work, 8) == {
        "weights": 2 * count, "masters": 4 * count / 8, "AdamW": 8 * count / 8, "reference": 0, "teacher": 0,
    }  # fmt: skip
    assert memory.weights_sharded(shape, work, 8) == {
        "weights": 4 * count / 8, "AdamW": 8 * count / 8, "reference": 0, "teacher": 0,
    }  # fmt: skip
    assert memory.gradient_bytes(shape, work, 8, "optimizer") == 4 * count
    assert memory.gradient_bytes(shape, work, 8, "weights") == 4 * count / 8


def test_the_cache_holds_each_prompt_once():
    work = StepWork(prompts=3, prompt_tokens=10, samples=4, answer_tokens=20, max_tokens=20)
    assert memory.cache_bytes(SMALL, work, 12) == 16 * (13 * 20 + 3 * 10)  # a spare one for padding
    assert memory.cache_bytes(SMALL, work, 4) == 16 * (5 * 20 + 2 * 10)  # others wait: room for a second prompt
    assert memory.cache_bytes(SMALL, replace(work, cache_share=0.5), 12) == 8 * (13 * 20 + 3 * 10)


def test_a_decode_step_by_hand():
    terms = cost.decode_step_terms(SMALL, rows=3, own_tokens=7, prompts=2, prompt_tokens=5, device=UNIT)
    weights = 2 * 120 + 40
    assert terms == {
        "launches": 2,
        "products": max(2 * weights, 2 * 3 * weights),
        "cache": (7 + 2 * 5) * 16,
        "logits": 3 * 10 * 4,
        "inner": 2 * (4 * 4 + 4 + 4 + 6),  # q, k, v, gate and up; output; down
        "prompts": 2 * 2 * 2 * 5,  # layers, heads per KV head, their width, tokens
    }
    fast = Device(flops=1e9, bandwidth=1.0)  # bound by reading the weights
    assert cost.decode_step_terms(SMALL, 3, 7, 2, 5, fast)["products"] == 2 * weights
    halves = cost.decode_step_terms(SMALL, 3, 7, 2, 5, UNIT, tensor_parallel=2)
    assert halves["products"] == terms["products"] / 2
    assert halves["cache"] == terms["cache"]  # the only KV head is on both GPUs


def test_decoding_adds_up_its_steps():
    """Against a loop over all steps, for completions that all have full length."""
    work = StepWork(prompts=2, prompt_tokens=5, samples=3, answer_tokens=49, max_tokens=49)
    terms, steps = cost.decode_terms(SMALL, work, UNIT)
    literal = {"cache": 0.0, "products": 0.0, "launches": 0.0}
    for step in range(48):
        one = cost.decode_step_terms(SMALL, 6, 6 * (step + 0.5), 2, 5, UNIT)
        literal = {name: literal[name] + one[name] for name in literal}
    assert steps == 48
    assert {name: terms[name] for name in literal} == pytest.approx(literal)


def test_decoding_with_few_slots_takes_turns():
    work = StepWork(prompts=4, prompt_tokens=5, samples=4, answer_tokens=101, max_tokens=101)
    all_at_once, steps = cost.decode_terms(SMALL, work, UNIT, slots=16)
    in_turn, more_steps = cost.decode_terms(SMALL, work, UNIT, slots=4)
    assert (steps, more_steps) == (100, 12 * 101 / 4 + 100)  # the first of each wait
    assert in_turn["cache"] == pytest.approx(all_at_once["cache"], rel=0.02)  # the same keys and values are read


def test_training_by_hand():
    work = StepWork(prompts=2, prompt_tokens=5, samples=3, answer_tokens=8, max_tokens=8)
    tokens, answers = 2 * 5 + 6 * 7, 48
    pairs = 2 * 25 / 2 + 48 * (5 + 4)
    terms = cost.training_terms(SMALL, work, UNIT, budget=30)  # a group of 26 in each pack
    assert terms == {
        "products": 6 * 2 * 120 * tokens + 8 * 40 * answers,
        "attention": 3.5 * 4 * 2 * 2 * 2 * pairs,
        "activations": 3 * SMALL.activation_bytes * tokens,
        "logits": 3 * answers * 10 * 4,
        "launches": 2 * 2.5,
    }
    forward = cost.training_terms(SMALL, work, UNIT, budget=1000, backward=False)
    assert forward["products"] == 2 * 2 * 120 * tokens + 2 * 40 * answers
    assert forward["launches"] == 1
    recomputed = StepWork(2, 5, 3, 8, 8, checkpointing=True)
    assert cost.training_terms(SMALL, recomputed, UNIT, 1000)["products"] == terms["products"] + 2 * 2 * 120 * tokens
    adapter = StepWork(2, 5, 3, 8, 8, lora_rank=2)
    assert cost.training_terms(SMALL, adapter, UNIT, 1000)["products"] == 4 * 2 * 120 * tokens + 6 * 40 * answers


def test_packed_tokens_are_those_of_a_pack():
    from groupwise.model.packing import plan_packs

    work = StepWork(prompts=5, prompt_tokens=7, samples=4, answer_tokens=9, max_tokens=9)
    for budget in (15, 24, 31, 39, 40, 77, 78, 200):
        packs = plan_packs([7] * 5, [4] * 5, [9] * 20, budget)
        tokens = [7 * len(pack.sizes) + 8 * len(pack.samples) for pack in packs]
        planned = work.packs(budget)
        assert planned.largest == max(tokens), budget
        # A divided group may leave room in a pack, which this does not follow.
        assert planned.number == len(packs) or (budget < 39 and abs(planned.number - len(packs)) <= 1), budget
        assert planned.tokens == pytest.approx(sum(tokens), rel=0.15)


def test_the_optimizer_moves_these_bytes():
    """Reads and writes per weight in float32: norm and clipping 1 + 2, AdamW 1 + 2 + 4, finite check 1."""
    assert cost.optimizer_terms(10, UNIT)["bytes"] == 10 * 4 * (3 + 7 + 1)
    assert cost.sync_terms(10, UNIT)["bytes"] == 10 * (4 + 2)


def test_rings_by_hand():
    gpu = GPUS["h100"]
    inside, across = Links(gpu, 8), Links(gpu, 16)
    part = inside.ring("x", 80e9)
    assert (part.link, part.bytes) == ("NVLink", 70e9)
    assert part.seconds == pytest.approx(70e9 / (LINK_SHARE * 450e9) + 7 * LINK_LATENCY)
    wide = across.ring("x", 80e9)
    assert (wide.link, wide.bytes) == ("network", 75e9 / 8)  # eight rings, one per port
    assert wide.seconds == pytest.approx(75e9 / (LINK_SHARE * 400e9) + NETWORK_LATENCY + 14 * LINK_LATENCY)
    summed = inside.sum_in_server("x", 80e9, times=3)
    assert summed.bytes == 3 * 140e9
    assert summed.seconds == pytest.approx(3 * (140e9 / (LINK_SHARE * 450e9) + SERVER_LATENCY))
    received = across.to_every_host("x", 16e9)
    assert (received.link, received.bytes, received.seconds) == ("host", 15e9, 15e9 / HOST_RATE)
    assert Links(gpu, 1).ring("x", 80e9).bytes == Links(gpu, 1).ring("x", 80e9).seconds == 0
    assert Links(gpu, 16, ideal=True).ring("x", 80e9).seconds == 0
    assert across.broadcast("x", 8e9).seconds == pytest.approx(8e9 / (LINK_SHARE * 50e9))


@pytest.mark.parametrize("mean", [20.0, 100.0, 190.0])
def test_lengths_have_the_given_mean_and_variance(mean):
    work = StepWork(1, 1, 1, mean, 200)
    draws = torch.rand(2_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lengths = (-(1 - draws).log() / work.decay).clamp(max=200)
    assert lengths.mean().item() == pytest.approx(mean, rel=0.005)
    assert lengths.var().item() == pytest.approx(work.variance, rel=0.01)
    ages = (lengths.square() / 2).mean() / lengths.mean()  # over all moments of all completions
    assert work.mean_age == pytest.approx(ages.item(), rel=0.01)


def test_the_longest_share_is_that_of_a_simulation():
    work = StepWork(prompts=64, prompt_tokens=10, samples=8, answer_tokens=100, max_tokens=400)
    draws = torch.rand(300, 16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sums = (-(1 - draws).log() / work.decay).clamp(max=400).sum(-1)  # 16 ranks with 32 completions
    simulated = (sums.amax(-1) / sums.mean(-1)).mean().item()
    assert cost.longest_share(work, 16) == pytest.approx(simulated, rel=0.08)
    assert cost.longest_share(work, 1) == 1


def test_shares_of_ranks():
    work = StepWork(prompts=10, prompt_tokens=1, samples=8, answer_tokens=1, max_tokens=1)
    assert {ranks: work.share(ranks).prompts for ranks in (1, 4, 10, 1000)} == {1: 10, 4: 3, 10: 1, 1000: 1}


def test_the_work_of_a_recipe():
    recipe = make_recipe(
        {
            "train": {"batch_size": 8, "accumulation": 2, "iterations": 2, "token_budget": 999},
            "sampling": {"samples_per_prompt": 6, "max_new_tokens": 300, "max_num_seqs": 64, "kv_cache_dtype": "fp8"},
            "data": {"max_prompt_length": 200},
            "loss": {"kl_coef": 0.1},
            "model": {"gradient_checkpointing": False},
        }
    )
    assert work_of(recipe, None, 120) == StepWork(
        prompts=16, prompt_tokens=100, samples=6, answer_tokens=120, max_tokens=300, max_num_seqs=64, passes=2,
        forwards=2, updates=2, reference=True, token_budget=999, cache_share=0.5,
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(packaged_recipes()))
def test_a_recipe_is_planned_if_it_samples(name):
    recipe = load_recipe(packaged_recipes()[name])
    if recipe.train.steps != 0 and samples_completions(recipe):
        assert work_of(recipe).completions == recipe.train.prompts_per_step * recipe.sampling.samples_per_prompt
    else:
        with pytest.raises(ConfigError, match="samples nothing"):
            work_of(recipe)


def test_shapes_from_sources(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().to_dict()))
    assert shape_of_source(str(tmp_path)).parameters == 279_552
    assert shape_of_source("Qwen/Qwen2.5-7B-Instruct") is SHAPES["qwen2.5-7b"]
    assert shape_of_source("meta-llama/Llama-3.1-8B-Instruct") is SHAPES["llama-3.1-8b"]
    assert shape_of_source("smollm2-135m") is SHAPES["smollm2-135m"]
    assert shape_of_source("tiny:3") is TINY


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[]", "holds no table"),
        ("{", "cannot be read"),
        ('{"hidden_size": 8}', "num_attention_heads"),
        ('{"num_local_experts": 8}', "mixture of experts"),
        ('{"hidden_size": -1, "num_attention_heads": 1}', "hidden_size must be a positive integer"),
    ],
)
def test_a_wrong_config_is_refused(tmp_path, config, words):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=words):
        shape_of_source(str(tmp_path))
