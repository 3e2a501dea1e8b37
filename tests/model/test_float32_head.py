"""`model.float32_head`: sampler and trainer, tied and untied heads, LoRA, the reference, and a run."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from groupwise.core import selective_logps
from groupwise.errors import ConfigError
from groupwise.generate.engine import Engine
from groupwise.generate.types import Sampling
from groupwise.model.handle import prepare
from groupwise.model.logprobs import completion_logps, iter_pack_states
from groupwise.model.tiny import tiny_config, tiny_tokenizer
from groupwise.training.components import load_components
from groupwise.training.inputs import load_inputs
from groupwise.training.preflight import training_memory
from tests.model.models import VOCABULARY, quick, tiny
from tests.training.runs import TASK, even, metrics_of, small_recipe, small_trainer

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
PROMPTS = [torch.arange(3 + 2 * number) % VOCABULARY for number in range(4)]
NAMES = ["llama", "llama_one_head", "gemma2"]  # untied, tied, with a softcap


@pytest.mark.parametrize("name", quick(NAMES, "llama"))
def test_the_sampler_uses_it(name):
    """The first token's log-prob is that of the float32 product of the same hidden state and the same weights."""
    handle = prepare(tiny(name, torch.bfloat16), float32_head=True)
    head = handle.head
    assert head.float32
    handle.model.requires_grad_(False)
    states = torch.randn(5, head.weight.shape[1]).bfloat16()
    exact = states.double() @ head.weight.double().T * head.scale
    exact = exact if head.softcap is None else torch.tanh(exact / head.softcap) * head.softcap
    assert head.logits(states).dtype == torch.float32
    torch.testing.assert_close(head.logits(states).double(), exact, rtol=1e-5, atol=1e-5)
    rough = head._replace(float32=False).logits(states)
    assert float((rough - exact).abs().max()) > 1e-3
    rollout = Engine(handle).generate(PROMPTS[:2], 3, Sampling(max_new_tokens=3))
    logps = completion_logps(handle, PROMPTS[:2], rollout.completions()).logps
    assert float((logps - rollout.logps).abs().max()) < 0.1


@pytest.mark.slow
def test_log_probs_of_nearly_equal_states_differ_less():
    """Kernels of sampler and trainer may differ in the last bits of a state, as is done here to one of ten numbers. The
    mean square of the difference in log-probs is smaller if the logits are not rounded too."""
    squares = {False: 0.0, True: 0.0}
    for seed in range(4):
        handle = prepare(tiny("qwen3", torch.bfloat16, seed=seed), float32_head=True)
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(VOCABULARY, (12, 12), generator=draw)
        with torch.no_grad():
            ((_, states),) = iter_pack_states(handle, [torch.arange(9)], [list(ids)])
            last_bit = torch.where(torch.rand(states.shape, generator=draw) < 0.1, 1 + 2**-7, 1.0).bfloat16()
            for float32 in squares:
                one, other = (
                    selective_logps(hidden, handle.head.weight, ids.view(-1), float32=float32)
                    for hidden in (states, states * last_bit)
                )
                squares[float32] += float((one - other).square().mean())
    assert 0 < squares[True] < 0.85 * squares[False]


def test_a_float32_model_keeps_its_bits():
    results = []
    for float32 in (False, True):
        handle = prepare(tiny("llama", torch.float32), float32_head=float32)
        rollout = Engine(handle).generate(PROMPTS, 3, Sampling(max_new_tokens=5))
        results.append((rollout.ids, rollout.logps, completion_logps(handle, PROMPTS, rollout.completions()).logps))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_model_on_the_plain_path_is_refused():
    """An adapter on the head is a layer of PEFT, which groupwise does not look into."""
    config = tiny_config()
    config.tie_word_embeddings = False
    recipe = small_recipe({"model": {"float32_head": True, "lora": {"rank": 2, "targets": ["lm_head"]}}})
    inputs = load_inputs(recipe, task=TASK, rewards=[even])
    with pytest.raises(ConfigError, match=r"model.float32_head needs .* plain path.* not a linear layer; leave it out"):
        load_components(recipe, inputs, model=LlamaForCausalLM(config), tokenizer=tiny_tokenizer())


RUN = {
    "model": {"dtype": "bfloat16", "float32_head": True},
    "train": {"steps": 2, "batch_size": 2},
    "sampling": {"samples_per_prompt": 3, "max_new_tokens": 3},
    "evaluate": {"every": 0, "before_training": False},
    "run": {"checkpoint_every": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize(("more", "kl"), [({}, "full"), ({"model": {"lora": {"rank": 2}}}, "k3")])
def test_a_run_with_a_reference(tmp_path, more, kl):
    """Policy and reference have the same head: before the first update their KL is 0, exact or estimated."""
    trainer = small_trainer(tmp_path / "run", RUN, more, {"loss": {"kl_coef": 0.1, "kl": kl}})
    assert trainer.components.handle.head.float32
    memory = training_memory(trainer.components)
    assert memory["float32 copy of the head"] == 4 * trainer.components.handle.head.weight.numel()
    trainer.run()
    rows = [row for row in metrics_of(tmp_path / "run") if "kl" in row]
    assert rows[0]["kl"] == 0.0
    assert rows[1]["kl"] > 0.0
    assert rows[0]["sampler/logp_difference_mean"] < 0.05
