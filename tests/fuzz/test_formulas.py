"""The formulas over all floats: finite numbers in, finite numbers out, or an error that says so."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core import group_advantages, group_statistics, policy_loss
from groupwise.core.advantages import BASELINES, COMBINATIONS, SCALES
from groupwise.core.kl import kl_estimate
from groupwise.core.losses import LOSSES
from tests.fuzz import accepted, many, tried

FINITE = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([1.7976931348623157e308, -1.7976931348623157e308, 5e-324, -5e-324, 2.2250738585072014e-308, 0.0]),
    st.floats(-10, 10),
)
GROUPS = st.integers(1, 4).flatmap(lambda n: st.lists(FINITE, min_size=2 * n, max_size=2 * n))


def exact_advantages(rewards: list[float], eps: float) -> list[float]:
    """(r − mean) / (std + eps) in rational numbers; only the square root and the result are rounded."""
    values = [Fraction(reward) for reward in rewards]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    scale = max((abs(value) for value in values), default=Fraction(0)) or Fraction(1)
    std = Fraction(math.sqrt(variance / scale**2)) * scale + Fraction(eps)
    return [float((value - mean) / std) for value in values]


@many(10)
@given(st.lists(FINITE, min_size=2, max_size=6), st.sampled_from([0.0, 1e-8, 1e-4]))
def test_advantages_of_all_floats_are_those_of_exact_arithmetic(rewards, eps):
    tried("advantages")
    got = group_advantages(torch.tensor(rewards, dtype=torch.float64), len(rewards), eps=eps)
    assert got.isfinite().all()
    largest = max(map(abs, rewards))
    if max(rewards) / 2 - min(rewards) / 2 <= 2e-15 * largest:
        return  # equal up to round-off, by definition 0 or close to the limit
    torch.testing.assert_close(
        got, torch.tensor(exact_advantages(rewards, eps), dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


@many(10)
@given(
    GROUPS,
    st.sampled_from(SCALES),
    st.sampled_from(BASELINES),
    st.sampled_from(COMBINATIONS),
    st.lists(FINITE, min_size=2, max_size=2),
    st.floats(0, 1e300),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
)
def test_advantages_with_any_setting(rewards, scale, baseline, combine, weights, eps, dtype):
    table = torch.tensor(rewards, dtype=torch.float64).view(-1, 2)
    got = accepted(
        "advantages",
        lambda: group_advantages(
            table.to(dtype),
            [number // 2 for number in range(len(table))],
            scale=scale,
            baseline=baseline,
            combine=combine,
            weights=weights,
            eps=eps,
        ),
    )
    if got is not None:
        assert got.isfinite().all()


@many(4)
@given(st.lists(FINITE, min_size=2, max_size=6), st.integers(-900, 900))
def test_advantages_do_not_depend_on_the_scale_of_the_rewards(rewards, exponent):
    """Multiplied by a power of two, without an eps: the same bits, unless rounding loses digits."""
    tried("advantages")
    scaled = [math.ldexp(reward, exponent) if abs(reward) < 1e30 else math.inf for reward in rewards]
    if any(math.ldexp(s, -exponent) != r if math.isfinite(s) else True for s, r in zip(scaled, rewards, strict=True)):
        return
    one, other = (group_advantages(torch.tensor(x, dtype=torch.float64), len(x), eps=0.0) for x in (rewards, scaled))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@many(4)
@given(st.lists(FINITE, min_size=1, max_size=6))
def test_statistics_of_all_floats(rewards):
    tried("advantages")
    groups = group_statistics(torch.tensor(rewards, dtype=torch.float64), len(rewards), unbiased=False)
    mean = float(sum(map(Fraction, rewards)) / len(rewards))
    assert math.isclose(float(groups.mean), mean, rel_tol=1e-9, abs_tol=1e-9 * max(map(abs, rewards)))
    largest = max(map(abs, rewards))
    if largest > 1e-290 and not bool(groups.equal):  # a float below has too few digits for its standard deviation
        wanted = statistics.pstdev([reward / largest for reward in rewards])
        assert math.isclose(float(groups.std) / largest, wanted, rel_tol=1e-6, abs_tol=1e-9)


LOGPS = st.lists(st.floats(-(2.0**60), 0.0, width=32), min_size=6, max_size=6)
MASKS = st.lists(st.booleans(), min_size=6, max_size=6)


@many(10)
@given(
    LOGPS,
    LOGPS,
    st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=2, max_size=2),
    MASKS,
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from(["completion_mask", "policy_mask"]),
)
def test_losses_and_their_gradients(logps, old, advantages, mask, loss, denominator):
    """Log-probs as low as a model can give, any advantage and any mask; masked positions may hold anything."""
    tried("losses")
    keep = torch.tensor(mask).view(2, 3)
    values = torch.tensor(logps).view(2, 3)
    hidden = torch.where(keep, values, math.nan)
    results = []
    for given_logps in (values, hidden):
        x = given_logps.clone().requires_grad_()
        value, measured = policy_loss(
            x,
            torch.where(keep, torch.tensor(old).view(2, 3), math.inf),
            torch.tensor(advantages),
            keep,
            loss=loss,
            max_length=3,
            policy_mask=torch.tensor([True, False]) if denominator == "policy_mask" else None,
            denominator=denominator,
        )
        value.backward()
        assert value.isfinite()
        assert x.grad.isfinite().all()
        assert (x.grad[~keep] == 0).all()
        assert all(number.isfinite() for number in measured.values())
        results.append((value.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@many(4)
@given(LOGPS, LOGPS, MASKS, st.sampled_from(["k2", "k3", "unbiased"]))
def test_kl_estimates(logps, reference, mask, estimator):
    tried("losses")
    keep = torch.tensor(mask).view(2, 3)
    x = torch.tensor(logps).view(2, 3).clamp(min=-1e9).requires_grad_()
    kl = kl_estimate(x, torch.tensor(reference).view(2, 3).clamp(min=-1e9), estimator=estimator, mask=keep)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert x.grad.isfinite().all()
