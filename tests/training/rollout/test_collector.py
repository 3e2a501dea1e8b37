"""The rollout of a step: data of a sample stays together, resampling, and seeds."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.filters import KeptSets
from groupwise.data import Order, Prompt
from groupwise.generate.local import LocalGenerator
from groupwise.generate.types import Rollout
from groupwise.rewards import Scorer, named
from groupwise.training.rollout.advantages import compute_group_advantages
from groupwise.training.rollout.batch import join
from groupwise.training.rollout.collector import RolloutCollector
from groupwise.training.seeds import derive_seed
from tests.training.factories import make_batch, make_trainer, short_recipe


class Echo(LocalGenerator):
    """A generator whose completions are the prompt's first id and then the sample's number, repeated.

    Every token's kept set is the token and the prompt's first id."""

    def __init__(self, fits=128):
        super().__init__(max_num_seqs=128)
        self.fits, self.released = fits, 0
        self.calls = []

    def release(self):
        self.released += 1

    def generate(self, prompts, samples, sampling, *, stop=None):
        self.calls.append((len(prompts), sampling))
        if self.max_num_seqs > self.fits:
            raise torch.OutOfMemoryError("out of memory")
        rows, sets = [], []
        for prompt in prompts:
            for sample in range(samples):
                ids = [prompt[0]] + [sample] * ((prompt[0] + sample) % 3)
                rows.append(torch.tensor(ids))
                sets += [[prompt[0], token] for token in ids]
        offsets = torch.arange(0, 2 * len(sets) + 1, 2)
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return Rollout(
            ids=padded,
            lengths=torch.tensor([len(row) for row in rows]),
            logps=-padded.float() - 1,
            filtered_logps=-padded.float() - 0.5,
            stop_reasons=tuple("length" if len(row) == 3 else "eos" for row in rows),
            groups=torch.arange(len(prompts)).repeat_interleave(samples),
            versions=torch.zeros_like(padded),
            kept=KeptSets(torch.tensor(sets, dtype=torch.int32).flatten(), offsets) if sampling.keep_sets else None,
        )


class Words:
    def batch_decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return [" ".join(map(str, row)) for row in ids]


def make_collector(no_signal, generator=None, rows=30, reward=None, said=None, advantage=None, **more):
    """Row n has the prompt id 100 + n; the completions of a row in ``no_signal`` get equal rewards."""

    def by_row(prompts, completions, number, **_):
        return [1.0 if n in no_signal else float(i % 4) for i, n in enumerate(number)]

    return RolloutCollector(
        generator or Echo(),
        Words(),
        [{"prompt": f"row {number}", "number": number} for number in range(rows)],
        [Prompt((100 + number, 7), f"row {number}") for number in range(rows)],
        Scorer([named(reward or by_row)], timeout=None),
        Order(rows, shuffle=False),
        lambda batch, recipe: compute_group_advantages(batch, recipe, [1.0], advantage=advantage),
        prompt_column="prompt",
        seed=5,
        say=(said if said is not None else []).append,
        **more,
    )


def timer(stage):
    return nullcontext()


def collect(collector, step=0, **changes):
    return collector.collect(step, short_recipe({"train.batch_size": 4, **changes}), None, timer)


def assert_aligned(batch):
    """Every field of every sample belongs to the same row."""
    places = 0
    assert len(batch) == len(batch.prompts) * batch.samples
    for number, ids in enumerate(batch.ids):
        prompt, sample = divmod(number, batch.samples)
        row = batch.row_numbers[prompt]
        assert batch.rows[prompt] == {"prompt": f"row {row}", "number": row}
        assert batch.prompts[prompt].ids == (100 + row, 7)
        assert ids.tolist() == [100 + row] + [sample] * ((100 + row + sample) % 3)
        assert batch.texts[number] == " ".join(map(str, ids.tolist()))
        assert batch.stop_reasons[number] == ("length" if len(ids) == 3 else "eos")
        assert batch.sampler_logps[number].tolist() == (-ids - (0.5 if batch.kept is not None else 1.0)).tolist()
        if batch.kept is not None:
            for token in ids.tolist():
                start, end = batch.kept.offsets[places : places + 2].tolist()
                assert batch.kept.ids[start:end].tolist() == [100 + row, token]
                places += 1
    if batch.kept is not None:
        assert len(batch.kept) == places == int(batch.lengths.sum())


# --- resampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("no_signal", "resample_rounds", "rows", "rounds", "replaced", "prompts"),
    [
        # Rows 0 to 3 are sampled first; those without a signal are replaced, from the front, by fresh rows with one.
        ({1, 3, 4}, 0, [0, 1, 2, 3], 0, 0, 4),
        ({1, 3, 4}, 1, [0, 2, 3, 5], 1, 1, 6),
        ({1, 3, 4}, 2, [0, 2, 5, 6], 2, 2, 7),
        ({1, 3, 4}, 9, [0, 2, 5, 6], 2, 2, 7),
        ({9}, 3, [0, 1, 2, 3], 0, 0, 4),
        ({0, 1, 2, 3}, 1, [4, 5, 6, 7], 1, 4, 8),
        (set(range(30)), 3, [0, 1, 2, 3], 3, 0, 16),
    ],
)
def test_groups_with_equal_rewards_are_replaced_by_fresh_prompts(
    no_signal, resample_rounds, rows, rounds, replaced, prompts, keep
):
    changes = {"masks.keep_sampling_mask": True, "sampling.top_k": 2} if keep else {}
    collector = make_collector(no_signal)
    result = collect(collector, **{"train.resample_rounds": resample_rounds}, **changes)
    assert result.batch.row_numbers == rows
    assert (result.rounds, result.replaced, result.prompts) == (rounds, replaced, prompts)
    assert result.tokens == sum(1 + (100 + row + g) % 3 for row in range(prompts) for g in range(4))
    assert_aligned(result.batch)
    assert result.batch.rewards[:, 0].tolist() == [
        1.0 if row in no_signal else float(g) for row in result.batch.row_numbers for g in range(4)
    ]
    assert collector.order.take(1) == [prompts]


def test_every_round_has_its_own_seed():
    generator = Echo()
    collect(make_collector(set(range(30)), generator), step=3, **{"train.resample_rounds": 2})
    seeds = [sampling.seed for _, sampling in generator.calls]
    assert seeds == [derive_seed("sampling", 5, 3, number) for number in range(3)]
    assert len(set(seeds)) == 3
    assert [number for number, _ in generator.calls] == [4, 4, 4]


def test_groups_without_a_score_are_replaced_too():
    def nothing(prompts, completions, number, **_):
        return [None if n == 2 else float(i % 4) for i, n in enumerate(number)]

    result = collect(make_collector(set(), reward=nothing), **{"train.resample_rounds": 1})
    assert result.batch.row_numbers == [0, 1, 3, 4]


def test_groups_with_equal_rewards_but_advantages_are_kept():
    """With baseline "none", or with a custom advantage function."""
    result = collect(make_collector({1}), **{"train.resample_rounds": 1, "advantages.baseline": "none"})
    assert result.batch.row_numbers == [0, 1, 2, 3]
    collector = make_collector({1}, advantage=lambda rewards, groups, weights: (groups != 2).float())
    assert collect(collector, **{"train.resample_rounds": 1}).batch.row_numbers == [0, 1, 3, 4]


def test_columns_logged_by_rewards_stay_with_their_sample():
    """Columns and metrics, also of later rounds."""

    def noting(prompts, completions, number, log_extra, log_metric, **_):
        log_extra("seen", [f"{n}" for n in number])
        log_metric("rounds_seen", float(min(number)))
        return [1.0 if n == 1 else float(i % 4) for i, n in enumerate(number)]

    result = collect(make_collector(set(), reward=noting), **{"train.resample_rounds": 1})
    assert result.batch.row_numbers == [0, 2, 3, 4]
    assert result.batch.extra["seen"] == [str(row) for row in result.batch.row_numbers for _ in range(4)]
    assert result.metrics == {
        "rounds_seen": pytest.approx((4 * 0.0 + 1 * 4.0) / 5)
    }  # weighted by the prompts of each round
    assert [batch.row_numbers for batch in result.left_out] == [[1]]


def test_fresh_prompts_without_a_signal_are_left_out_too():
    result = collect(make_collector({1, 2, 4}), **{"train.resample_rounds": 1})
    assert result.batch.row_numbers == [0, 2, 3, 5]
    assert [batch.row_numbers for batch in result.left_out] == [[1], [4]]
    assert collect(make_collector(set()), **{"train.resample_rounds": 1}).left_out == []


def test_the_filtered_probability_stays_with_its_sample():
    one, other = (
        replace(make_batch(seed=seed), filtered_probability=torch.arange(16.0) + 100 * seed) for seed in (0, 1)
    )
    both = join([one.take([2]), other.take([0, 3])])
    assert both.filtered_probability.tolist() == [8, 9, 10, 11, *range(100, 104), *range(112, 116)]
    assert join([make_batch(), make_batch()]).filtered_probability is None


def test_the_settings_of_a_step_are_passed_to_the_generator():
    generator = Echo()
    changes = {
        "train.accumulation": 3,
        "sampling.samples_per_prompt": 2,
        "sampling.temperature": 0.5,
        "sampling.top_k": 0,
        "sampling.top_p": 0.9,
        "sampling.min_p": 0.0,
        "sampling.min_new_tokens": 1,
    }
    result = collect(make_collector(set(), generator), **changes)
    ((number, sampling),) = generator.calls
    assert number == 12
    assert len(result.batch) == 24
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, None, 0.9, None)
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.keep_sets) == (8, 1, False)


def test_out_of_memory_while_sampling():
    said = []
    generator = Echo(fits=40)
    result = collect(make_collector(set(), generator, said=said))
    assert_aligned(result.batch)
    assert generator.max_num_seqs == 32
    assert generator.released == 2
    assert said == [
        "memory ran out while sampling: repeated with 64 completions at once",
        "memory ran out while sampling: repeated with 32 completions at once",
    ]
    with pytest.raises(torch.OutOfMemoryError):
        collect(make_collector(set(), Echo(fits=1)))


def test_resampling_in_a_run(tmp_path):
    """No group has equal rewards, and the cost is counted."""

    def reward(prompts, completions, number, **_):
        return [1.0 if n % 2 else float(i % 4) for i, n in enumerate(number)]

    settings = {"train.steps": 2, "train.resample_rounds": 4, "data.shuffle": False}
    with make_trainer(tmp_path, settings, reward=reward) as trainer:
        reports = list(trainer.steps())
    assert [report.batch.row_numbers for report in reports] == [[0, 2], [4, 6]]
    for report in reports:
        assert report.metrics["frac_reward_zero_std"] == 0.0
        assert report.metrics["resample/replaced"] == 1
        assert report.metrics["resample/extra_tokens"] > 0
    assert [report.metrics["resample/rounds"] for report in reports] == [1, 2]  # rows 0 1 | 2, then 3 4 | 5 | 6
    assert reports[-1].metrics["epoch"] == pytest.approx(0.7)
    sampled = sum(int(report.batch.lengths.sum()) + report.metrics["resample/extra_tokens"] for report in reports)
    assert reports[-1].metrics["num_tokens"] == sampled


# --- seeds ------------------------------------------------------------------------------------------------------------


def ids_of(result):
    return [row.tolist() for row in result.batch.ids]


def test_samples_depend_on_seed_and_step_alone(tmp_path):
    """Not on the global random state, earlier samples, or the number of sequences at once."""
    results = {}
    for name, changes, step in (
        ("first", {}, 3),
        ("again", {}, 3),
        ("narrow", {"sampling.max_num_seqs": 3}, 3),
        ("later", {}, 4),
        ("other", {"train.seed": 1}, 3),
    ):
        with make_trainer(tmp_path / name, {"data.shuffle": False, **changes}) as trainer:
            recipe = trainer.step_recipe()
            if name == "again":
                torch.manual_seed(99)
                trainer.collector.collect(0, recipe, None, timer)
                trainer.order.load_state(Order(10, shuffle=False).state())
            results[name] = trainer.collector.collect(step, recipe, None, timer)
    assert results["again"].batch.row_numbers == results["first"].batch.row_numbers
    assert ids_of(results["again"]) == ids_of(results["first"]) == ids_of(results["narrow"])
    assert ids_of(results["later"]) != ids_of(results["first"])
    assert ids_of(results["other"]) != ids_of(results["first"])
    assert len({tuple(row) for row in ids_of(results["first"])}) == 8


def test_seeds_do_not_change():
    """A change would change every run that is resumed."""
    assert derive_seed("sampling", 0, 0) == 150842330696401
    assert derive_seed("sampling", 12, 3) != derive_seed("sampling", 1, 23)
    assert 0 <= derive_seed("sampling") < 2**48
    # Without a tag, sampling in step 4 and the mini-batches of another step had the same seed.
    purposes = ("sampling", "mini-batches", "dropout", "sft dropout", "sft order", "evaluation", "pairs")
    seeds = [derive_seed(purpose, 0, *rest) for purpose in purposes for rest in ((), (4,), (4, 1), (4, 1, 0))]
    assert len(set(seeds)) == len(seeds)


# --- parts of batches -------------------------------------------------------------------------------------------------


@st.composite
def batches(draw):
    prompts, samples = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    lengths = [[draw(st.integers(1, 4)) for _ in range(samples)] for _ in range(prompts)]
    rewards = [[float(10 * p + g) for g in range(samples)] for p in range(prompts)]
    batch = make_batch(rewards, lengths, seed=draw(st.integers(0, 99)), kept=draw(st.booleans()), dropped=[0])
    return replace(batch, extra={"who": [f"{p}-{g}" for p in range(prompts) for g in range(samples)]})


def described(batch):
    """One record per sample, of all its data."""
    places = 0
    result = []
    for number, ids in enumerate(batch.ids):
        prompt = number // batch.samples
        sets = []
        for _ in ids:
            if batch.kept is not None:
                start, end = batch.kept.offsets[places : places + 2].tolist()
                sets.append(batch.kept.ids[start:end].tolist())
            places += 1
        result.append(
            (
                batch.rows[prompt]["prompt"],
                batch.row_numbers[prompt],
                batch.prompts[prompt].ids,
                ids.tolist(),
                batch.texts[number],
                batch.stop_reasons[number],
                batch.sampler_logps[number].tolist(),
                sets,
                batch.rewards[number].tolist(),
                bool(batch.dropped[number]),
                batch.extra["who"][number],
            )
        )
    assert int(batch.prompt_of.numel()) == len(result)
    assert batch.kept is None or len(batch.kept) == places
    return result


@given(batches(), st.data())
def test_take_keeps_the_data_of_samples_together(batch, data):
    samples = described(batch)
    chosen = data.draw(st.lists(st.integers(0, len(batch.prompts) - 1), max_size=5))
    taken = batch.take(chosen)
    assert described(taken) == [samples[p * batch.samples + g] for p in chosen for g in range(batch.samples)]
    assert taken.samples == batch.samples
    assert taken.prompt_of.tolist() == [n for n in range(len(chosen)) for _ in range(batch.samples)]


@given(batches(), st.data())
def test_join_is_the_inverse_of_take(batch, data):
    order = data.draw(st.permutations(range(len(batch.prompts))))
    cut = data.draw(st.integers(0, len(order)))
    joined = join([batch.take(order[:cut]), batch.take(order[cut:])])
    assert described(joined) == described(batch.take(order))


@given(batches(), st.data())
def test_token_indices(batch, data):
    chosen = data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=5))
    flat = batch.ids.values
    wanted = [token for i in chosen for token in batch.ids[i].tolist()]
    assert flat[batch.token_indices(chosen)].tolist() == wanted


def test_a_column_of_only_one_batch_is_none_for_the_other():
    one = replace(make_batch([[1.0, 0.0]], [[1, 2]]), extra={"a": [1, 2]})
    other = replace(make_batch([[1.0, 0.0]], [[1, 2]]), extra={"b": [3, 4]})
    assert join([one, other]).extra == {"a": [1, 2, None, None], "b": [None, None, 3, 4]}
