"""Properties of the scheduler."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from groupwise.generate.scheduler import PageEstimate, RangeAllocator, Scheduler

requests = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=12)


@given(
    requests,
    st.integers(1, 10),
    st.integers(0, 40),
    st.integers(1, 60),
    st.none() | st.integers(5, 30),
    st.none() | st.integers(1, 4),
    st.integers(0, 10_000),
)
def test_every_sample_runs_once_and_no_two_share_a_place(prompts, slots, spare, prefill, pages, expected, seed):
    """With some pages, samples grow to at most four, and are preempted at random and if there are no pages."""
    lengths, counts = [length for length, _ in prompts], [count for _, count in prompts]
    pool = max(lengths) + spare
    estimate = None if expected is None or pages is None else PageEstimate(expected, 4)
    scheduler = Scheduler(lengths, counts, pool, slots, pages, estimate)
    rng = random.Random(seed)
    prefilled: list[int] = []
    admitted: list[int] = []
    steps = 0

    def preempt(sample: int) -> None:
        scheduler.preempt(sample, rng.randint(0, len(scheduler.pages_of[sample])))

    while not scheduler.done:
        steps += 1
        assert steps < 1000
        new_prompts, new_samples = scheduler.admit(prefill)
        prefilled += [prompt for prompt, _ in new_prompts]
        admitted += [sample for sample, _ in new_samples if sample not in admitted]
        if len(new_prompts) > 1:
            assert sum(lengths[prompt] for prompt, _ in new_prompts) <= prefill
        busy = list(scheduler.slot_of.values())
        assert len(set(busy)) == len(busy) <= slots
        assert all(0 <= slot < slots for slot in busy)
        taken = [page for own in scheduler.pages_of.values() for page in own]
        assert scheduler.pages_of.keys() == scheduler.slot_of.keys()
        assert sorted([*taken, *scheduler.free_pages]) == list(range(slots if pages is None else pages))
        if pages is None:
            assert {sample: [slot] for sample, slot in scheduler.slot_of.items()} == scheduler.pages_of
        places: set[int] = set()
        for number, members in scheduler.groups().items():
            prompt = scheduler.prompts[number]
            assert prompt.start is not None
            prompt_places = set(range(prompt.start, prompt.start + prompt.length))
            assert not places & prompt_places
            assert max(prompt_places) < pool
            places |= prompt_places
            assert all(scheduler.prompt_of[sample] == number for sample in members)
        assert scheduler.slot_of  # no deadlock
        for sample in list(scheduler.slot_of) if pages else ():
            grows = len(scheduler.pages_of.get(sample, range(4))) < 4 and rng.random() < 0.7
            while grows and sample in scheduler.slot_of and scheduler.grow(sample) is None:
                preempt(next(reversed(scheduler.slot_of)))
            if rng.random() < 0.1 and sample in scheduler.slot_of:
                preempt(sample)
        for sample in [*scheduler.slot_of, *scheduler.preempted]:
            if rng.random() < 0.4:
                scheduler.finish(sample)
    assert prefilled == sorted(set(prefilled)) == list(range(len(prompts)))  # each prompt once, in order
    assert admitted == list(range(sum(counts)))
    assert scheduler.pool.free_ranges == [(0, pool)]
    assert sorted(scheduler.free_slots) == list(range(slots))


def test_a_new_prompt_waits_for_free_slots():
    scheduler = Scheduler([5, 5], [4, 4], 100, 4)
    assert [sample for sample, _ in scheduler.admit(100)[1]] == [0, 1, 2, 3]
    assert scheduler.partly_waiting() == []
    scheduler = Scheduler([5, 5], [12, 12], 100, 16)
    prompts, samples = scheduler.admit(100)
    assert [prompt for prompt, _ in prompts] == [0, 1]  # four free slots are more than an eighth of all
    assert len(samples) == 16
    assert scheduler.partly_waiting() == [1]
    scheduler.finish(3)
    assert scheduler.admit(100) == ([], [(16, 3)])  # its prompt is in the pool


def test_only_tokens_to_compute_count_for_a_prefill():
    def admitted(to_compute: list[int] | None) -> list[int]:
        scheduler = Scheduler([50, 50, 50, 50], [1, 1, 1, 1], 200, 4, to_compute=to_compute)
        return [prompt for prompt, _ in scheduler.admit(60)[0]]

    assert admitted(None) == [0]
    assert admitted([30, 1, 29, 1]) == [0, 1, 2]
    assert admitted([70, 1, 1, 1]) == [0]


def test_the_mean_number_of_pages_counts_those_that_still_run():
    estimate = PageEstimate(prior=10, most=40)
    assert estimate.mean(0) == 10
    assert estimate.mean(25) == 35  # none has ended, so that all are long
    assert estimate.mean(100) == 40
    estimate.ended, estimate.ended_pages = 4, 6
    assert estimate.mean(4) == 4  # (10 + 6 + 4) / (1 + 4)


def test_room_for_what_running_samples_are_expected_to_need():
    def admitted(estimate: PageEstimate | None) -> int:
        return len(Scheduler([1], [20], 1, 20, 24, estimate).admit(1)[1])

    assert admitted(None) == 12  # a page for each, and one in reserve but for the last
    assert admitted(PageEstimate(prior=6, most=12)) == 4
    assert admitted(PageEstimate(prior=100, most=100)) == 1  # alone, a sample always runs
    scheduler = Scheduler([1], [20], 1, 20, 24, PageEstimate(prior=6, most=12))
    for sample, _ in scheduler.admit(1)[1]:
        scheduler.finish(sample)
    assert scheduler.estimate == PageEstimate(6, 12, ended=4, ended_pages=4)
    assert len(scheduler.admit(1)[1]) == 12  # (6 + 4) / (1 + 4) pages each


def test_a_sample_that_is_preempted_again_and_again_needs_no_more_pages():
    scheduler = Scheduler([1], [1], 1, 1, 3)
    scheduler.admit(1)
    scheduler.grow(0)
    for _ in range(5):
        scheduler.preempt(0, 1)
        assert scheduler.admit(1) == ([], [(0, 0)])
        assert len(scheduler.pages_of[0]) == 2


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_ranges(actions):
    pool = RangeAllocator(50)
    taken: dict[int, int] = {}
    for release, number in actions:
        if release and taken:
            start = sorted(taken)[number % len(taken)]
            pool.release(start, taken.pop(start))
        else:
            start = pool.allocate(number)
            if start is None:
                gaps = free_gaps(taken)
                assert max(gaps, default=0) < number
            else:
                taken[start] = number
        places = [place for start, length in taken.items() for place in range(start, start + length)]
        assert len(set(places)) == len(places)
        assert sum(length for _, length in pool.free_ranges) == 50 - len(places)
    for start, length in list(taken.items()):
        pool.release(start, length)
    assert pool.free_ranges == [(0, 50)]


def free_gaps(taken: dict[int, int]) -> list[int]:
    gaps, at = [], 0
    for start in sorted(taken):
        gaps.append(start - at)
        at = start + taken[start]
    return [*gaps, 50 - at]
