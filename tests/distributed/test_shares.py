"""The divided parts of a step by themselves, in two and three processes: gradients, masters, generator and scores."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.filters import KeptSets
from groupwise.distributed.ranks import Ranks, connect
from groupwise.generate.engine import Engine
from groupwise.generate.sharded import ShardedGenerator, _joined, _message
from groupwise.generate.types import Rollout, Sampling
from groupwise.model.precision import MasterWeights, set_precision
from groupwise.model.sharded_masters import ShardedMasters
from groupwise.rewards.scorer import Scorer
from groupwise.rewards.sharded import ShardedScorer
from groupwise.training.errors import retry_with_less_memory
from groupwise.training.update.shares import share_of
from tests.distributed.forks import drive, fork_ranks, values
from tests.training.factories import make_batch, moved_minibatch, short_recipe, small_llama

HERE = "tests.distributed.test_shares"
CPU = torch.device("cpu")


def place(rank: int, size: int) -> Ranks:
    return Ranks(rank, size)


@given(st.lists(st.lists(st.integers(1, 40), min_size=2, max_size=2), min_size=1, max_size=9), st.integers(1, 5))
def test_shares_have_every_sample_once_and_are_even(lengths, size):
    from groupwise.training.rollout.advantages import compute_group_advantages
    from groupwise.training.update.minibatch import build_minibatch

    recipe, batch = short_recipe(), make_batch([[1.0, 0.0]] * len(lengths), lengths, kept=True)
    minibatch = build_minibatch(batch, compute_group_advantages(batch, recipe, [1.0]), range(len(lengths)), recipe)
    shares = [share_of(minibatch, place(rank, size)) for rank in range(size)]
    assert sorted(row for share in shares for row in share.rows.tolist()) == list(range(len(minibatch)))
    for share in shares:
        part, rows = share.minibatch, share.rows.tolist()
        assert part.samples == [minibatch.samples[row] for row in rows]
        assert part.totals == minibatch.totals
        flat = [ids for members in part.completions for ids in members]
        assert all(torch.equal(ids, batch.ids[sample]) for ids, sample in zip(flat, part.samples, strict=True))
        tokens = batch.token_indices(part.samples)
        assert torch.equal(part.kept.select(torch.arange(len(tokens))).ids, batch.kept.select(tokens).ids)
    costs = [
        len(prompt) + sum(map(len, members))
        for prompt, members in zip(minibatch.prompts, minibatch.completions, strict=True)
    ]
    loads = [sum(map(len, s.minibatch.prompts)) + int(s.minibatch.mask.sum()) for s in shares]
    assert max(loads) <= sum(costs) / size + max(costs)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=7), st.integers(1, 4), st.integers(0, 2**30))
def test_a_rollout_is_joined_from_any_shares(counts, size, seed):
    draw = random.Random(seed)
    total = sum(counts)
    lengths = [draw.randint(1, 5) for _ in range(total)]
    ids = torch.nn.utils.rnn.pad_sequence([torch.full((n,), i + 1) for i, n in enumerate(lengths)], batch_first=True)
    sets = KeptSets(torch.arange(sum(lengths), dtype=torch.int32), torch.arange(sum(lengths) + 1))
    groups = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    reasons = tuple(str(i) for i in range(total))
    whole = Rollout(ids, torch.tensor(lengths), ids.float(), -ids.float(), reasons, groups, ids.int(), sets, {"n": 1})
    shares: list[list[int]] = [[] for _ in range(size)]
    for prompt in range(len(counts)):
        shares[draw.randrange(size)].append(prompt)
    shares = [share for share in shares if share]
    parts = []
    ends = torch.tensor(lengths).cumsum(0)
    for share in shares:
        rows = [row for row in range(total) if int(groups[row]) in share]
        width = max(lengths[row] for row in rows)
        tokens = torch.cat([torch.arange(int(ends[row]) - lengths[row], int(ends[row])) for row in rows])
        cut = {name: getattr(whole, name)[rows][:, :width] for name in ("ids", "logps", "filtered_logps", "versions")}
        part = Rollout(
            **cut,
            lengths=whole.lengths[rows],
            stop_reasons=tuple(reasons[row] for row in rows),
            groups=groups[rows],
            kept=sets.select(tokens),
            stats={"n": 1},
        )
        parts.append(_message(part))
    joined = _joined(parts, shares, counts)
    for name in ("ids", "lengths", "logps", "filtered_logps", "versions", "groups"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    assert joined.stop_reasons == reasons
    assert torch.equal(joined.kept.ids, sets.ids)
    assert joined.stats == {"n": len(shares)}


SETTINGS = {
    "all terms": {"loss.kl_coef": 0.1, "loss.entropy_coef": 0.01, "masks.high_entropy": 0.5},
    "exact kl": {"loss.kl_coef": 0.1, "loss.kl": "full"},
    "prompt mean": {"loss.aggregation": "prompt_mean", "masks.divergence": "kl", "loss.kl_coef": 0.1},
    "sequences": {"loss.ratio": "sequence", "loss.denominator": "policy_mask", "masks.truncated": True},
}


def gradients() -> dict[str, Any]:
    """The gradient, values and norm of an update whose shares are unequal."""
    ranks, results = connect(CPU, 60), {}
    for name, settings in SETTINGS.items():
        recipe, _, _, updater, minibatch, _ = moved_minibatch(settings, naive=False)
        if ranks.size > 1:
            updater.ranks, updater.masters = ranks, ShardedMasters(updater.handle.model, ranks)
        masters = updater.masters
        result = updater._gradient(minibatch, recipe, True, False)
        norm = masters.clip_gradient(None)
        collected = masters.collect({name: master.grad for name, master in masters.named_parameters()})
        results[name] = {
            "values": result.values,
            "statistics": result.statistics,
            "mismatch": [result.mismatch.tokens, result.mismatch.total, result.mismatch.largest],
            "norm": norm,
            "gradient": {name: value.flatten().tolist() for name, value in collected.items()},
        }
    ranks.close()
    return results


def steps(dtype: str) -> dict[str, Any]:
    """AdamW steps of sharded masters, and what is collected to save."""
    ranks, model = connect(CPU, 60), small_llama(torch.float32)
    set_precision(model, getattr(torch, dtype))
    model.register_parameter("short", torch.nn.Parameter(torch.ones(2, dtype=getattr(torch, dtype))))
    masters = ShardedMasters(model, ranks) if ranks.size > 1 else MasterWeights(model)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    for step in range(3):
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if step == 0 and name == "short":
                continue  # a weight without a gradient is not stepped
            full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + number)).double()
            shares = torch.tensor([1.0 + rank for rank in range(ranks.size)]).double()
            (parameter * (full * shares[ranks.rank] / shares.sum()).to(parameter.dtype)).sum().backward()
        masters.reduce_gradients()
        masters.clip_gradient(1.0)
        optimizer.step()
        masters.check_finite("a step", "Stop")
        masters.sync_to_model()
        masters.zero_grad()
    state = masters.collect({name: optimizer.state[master]["exp_avg"] for name, master in masters.named_parameters()})
    saved = masters.state_dict()
    held = sum(tensor.numel() for tensor in masters.parameters())
    values = {name: value.double().flatten().tolist() for name, value in model.named_parameters()}
    with torch.no_grad():
        for master in masters.parameters():
            master.zero_()
    masters.load_state_dict({name: torch.tensor(values[name]).view(p.shape).to(p.dtype) for name, p in _like(masters)})
    again = {name: value.double().flatten().tolist() for name, value in model.named_parameters()}
    ranks.close()
    return {
        "model": values,
        "again": again == values,
        "masters": {name: value.double().flatten().tolist() for name, value in saved.items()},
        "exp_avg": {name: value.double().flatten().tolist() for name, value in state.items()},
        "held": held,
    }


def _like(masters: MasterWeights) -> list[tuple[str, torch.Tensor]]:
    kinds = {name: master.dtype for name, master in masters.named_parameters()}
    return [(name, p.detach().to(kinds[name])) for name, p in masters.model.named_parameters()]


class Remote(Engine):
    """A generator outside the ranks, which only rank 0 may call."""

    def __init__(self, model: Any, ranks: Ranks) -> None:
        super().__init__(model)
        self.remote, self.ranks = True, ranks

    def generate(self, *arguments: Any, **options: Any) -> Rollout:
        assert self.ranks.is_main
        return super().generate(*arguments, **options)


class OutOnce(Engine):
    """Memory runs out on rank 1 until fewer completions are sampled at once."""

    runs_out = True

    def generate(self, *arguments: Any, **options: Any) -> Rollout:
        if self.runs_out and self.max_num_seqs > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().generate(*arguments, **options)


def samples() -> dict[str, Any]:
    ranks, model = connect(CPU, 60), small_llama()
    prompts, sampling = [[1, 2, 3], [4] * 9], Sampling(max_new_tokens=6, top_k=9, keep_sets=True, seed=3)
    results = {}
    for name, make in (("local", Engine), ("remote", lambda model: Remote(model, ranks)), ("memory", OutOnce)):
        inner = make(model)
        inner.runs_out = ranks.rank == min(1, ranks.size - 1)
        generator: Any = ShardedGenerator(inner, ranks) if ranks.size > 1 else inner

        def shrink(generator: Any = generator) -> None:
            generator.max_num_seqs = 4

        rollout = retry_with_less_memory(
            lambda generator=generator: generator.generate(prompts, [3, 2], sampling, keys=[7, 5]),
            can_shrink=lambda generator=generator: generator.max_num_seqs > 4,
            shrink=shrink,
        )
        kept = [rollout.kept.ids.tolist(), rollout.kept.offsets.tolist()]
        results[name] = [
            rollout.ids.tolist(),
            rollout.stop_reasons,
            rollout.groups.tolist(),
            kept,
            generator.max_num_seqs,
        ]
    ranks.close()
    return results


def odd(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float | None]:
    log_extra("seen", [torch.tensor(len(text)) for text in completions])
    rewards: list[float | None] = []
    for text in completions:
        log_metric("length", float(len(text)))
        if text == "bad":
            raise ValueError("no")
        rewards.append(None if text == "none" else float(len(text)))
    return rewards


def scores() -> dict[str, Any]:
    ranks, results = connect(CPU, 60), {}
    scorer = ShardedScorer([odd], ranks, on_error="drop") if ranks.size > 1 else Scorer([odd], on_error="drop")
    prompts = ["p", "p", "q", "q", "q", "r", "s", "s"]
    texts = ["a", "bad", "ccc", "none", "dd", "eeee", "f", "gg"]
    score = scorer.score(prompts, texts, {"number": list(range(8))})
    results["rewards"] = [None if value != value else value for value in score.rewards.flatten().tolist()]
    results["dropped"] = score.dropped.tolist()
    results["failed rows"] = [failure.row for failure in score.failures]
    results["seen"] = [None if value is None else int(value) for value in score.extra["seen"]]
    results["counts"] = score.metric_counts
    for name in ("x", "y", "z"):
        try:
            scorer.score(["p", "q"], ["bad", "bad"], {})
        except Exception as error:
            results[name] = str(error)
    ranks.close()
    return results


def everything() -> dict[str, list[Any]]:
    results = {}
    for size in (1, 2, 3):
        for name, work in {"gradients": gradients, "samples": samples, "scores": scores}.items():
            results[f"{name} {size}"] = values(fork_ranks(size, work))
        for dtype in ("float32", "bfloat16"):
            results[f"{dtype} {size}"] = values(fork_ranks(size, lambda dtype=dtype: steps(dtype)))
    return results


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    return drive(f"{HERE}:everything")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_of_unequal_shares_add_up(results, name, size):
    one, several = results["gradients 1"][0][name], [entry[name] for entry in results[f"gradients {size}"]]
    for key in ("values", "statistics"):
        assert all(entry[key] == pytest.approx(one[key], rel=1e-10, abs=1e-12) for entry in several)
    assert all(entry["norm"] == pytest.approx(one["norm"], rel=1e-10) for entry in several)
    assert several[0]["mismatch"] == pytest.approx(one["mismatch"], rel=1e-10)
    assert one["norm"] > 0
    for weight, gradient in one["gradient"].items():
        assert several[0]["gradient"][weight] == pytest.approx(gradient, rel=1e-10, abs=1e-10 * one["norm"]), weight


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharded_masters_step_like_complete_ones(results, dtype, size):
    one, several = results[f"{dtype} 1"][0], results[f"{dtype} {size}"]
    tolerance = 2e-5 if dtype == "float32" else 2e-2  # a rank's share of a gradient is rounded to the dtype
    for entry in several:
        assert entry["again"]
        assert entry["model"] == several[0]["model"]
        for name, weight in one["model"].items():
            assert entry["model"][name] == pytest.approx(weight, abs=tolerance), name
    assert several[0]["masters"].keys() == one["masters"].keys()
    assert several[0]["exp_avg"].keys() == one["exp_avg"].keys()
    assert not several[1]["masters"]
    total = sum(len(weight) for weight in one["model"].values())
    assert sum(entry["held"] for entry in several) == total  # each number is kept once
    assert max(entry["held"] for entry in several) < total / size + len(one["model"])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_samples_are_those_of_one_process(results, size):
    """With more ranks than prompts too, and if memory runs out on one rank, which lowers the limit of all."""
    one = results["samples 1"][0]
    assert one["local"][0] == one["memory"][0]
    assert one["memory"][-1] == 4
    for entry in results[f"samples {size}"]:
        assert entry == one


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_scores_are_those_of_one_process(results, size):
    one = results["scores 1"][0]
    assert one["failed rows"] == [1]
    assert "z" in one
    assert "no row of the last 3 batches" in one["z"]
    for entry in results[f"scores {size}"]:
        assert {name: value for name, value in entry.items() if name != "z"} == {
            name: value for name, value in one.items() if name != "z"
        }
        assert "no row of the last 3 batches" in entry["z"]
