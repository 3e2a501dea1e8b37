"""Where completions end, and which of their log-probs are known."""

from __future__ import annotations

import pytest
import torch

from groupwise.generate import Sampling
from groupwise.generate.request import Request
from groupwise.integrations.vllm.samples import SampleTable, derive_seed, sampling_fields
from groupwise.model.handle import prepare
from groupwise.model.load import load_model


@pytest.fixture(scope="module")
def handle():
    return prepare(load_model("tiny", dtype="float32", device="cpu"))


def table_of(handle, *, stop=None, samples=1, **sampling):
    return SampleTable(Request(handle, [[1, 2]], samples, Sampling(max_new_tokens=5, **sampling), None), stop)


@pytest.mark.parametrize(
    ("ids", "finish", "kept", "reason"),
    [
        ([7, 8, 9, 10, 11], "length", 5, "length"),
        ([7, 250, 9], "stop", 2, "eos"),
        ([7, 8, 250, 251], "length", 3, "eos"),
        ([7, 100, 8, 250], "stop", 2, "stop_string"),
        ([7, 8], "stop", 2, "stop_string"),  # vLLM saw a stop string that ours does not
        ([7, 8], "abort", 2, ""),
        ([], "abort", 0, ""),
    ],
)
def test_ends(handle, ids, finish, kept, reason):
    table = table_of(handle, stop=lambda ids: ids[-1] == 100, eos_ids=(250, 251))
    (sample,) = table.samples
    table.extend(sample, ids, [-1.0] * len(ids), finish, 3)
    assert (sample.ids, sample.logps, sample.versions) == (ids[:kept], [-1.0] * kept, [3] * kept)
    assert sample.reason == reason


def test_log_probs_after_filters_are_not_those_of_the_full_distribution(handle):
    for sampling, known in (({}, 5), ({"top_k": 3}, 0), ({"min_new_tokens": 2}, 3), ({"top_k": 3, "greedy": True}, 5)):
        table = table_of(handle, samples=2, **sampling)
        for sample in table.samples:
            table.extend(sample, [7, 8, 9, 10, 11], [-1.0, -2.0, -3.0, -4.0, -5.0], "length", 0)
        rollout = table.rollout({})
        assert (~rollout.logps.isnan()).sum(1).tolist() == [known, known]
        assert rollout.filtered_logps.tolist() == [[-1.0, -2.0, -3.0, -4.0, -5.0]] * 2
        assert not rollout.logps[:, 5 - known :].isnan().any()
    free = table_of(handle, min_new_tokens=2, eos_ids=())  # there was nothing to exclude
    free.extend(free.samples[0], [7] * 5, [-1.0] * 5, "length", 0)
    assert torch.equal(free.rollout({}).logps, torch.full((1, 5), -1.0))


def test_every_sampling_parameter_is_sent():
    """A server would take the others from the model's generation_config."""
    fields = sampling_fields(Sampling(max_new_tokens=9, min_new_tokens=4, top_k=5, min_p=0.1), [1, 2], 3, 9, 77)
    assert (fields["max_tokens"], fields["min_tokens"], fields["seed"]) == (6, 1, 77)
    assert (fields["top_k"], fields["top_p"], fields["min_p"], fields["temperature"]) == (5, 1.0, 0.1, 1.0)
    assert (fields["stop_token_ids"], fields["ignore_eos"]) == ([1, 2], True)
    greedy = sampling_fields(Sampling(greedy=True, top_k=5, temperature=0.3), [], 0, 9, 1)
    assert (greedy["temperature"], greedy["top_k"]) == (0.0, 0)


def test_seeds():
    seeds = {derive_seed(seed, key) for seed in range(50) for key in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert derive_seed(1, 2) == derive_seed(1, 2)
