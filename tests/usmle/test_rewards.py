"""The enhanced reward: both forms against tables computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.usmle.medical_words import medical_terms
from groupwise.usmle.rewards import EnhancedReward, enhanced_reward

WITH_TERMS = "The murmur suggests aortic stenosis, so the answer must be D."
WITHOUT_TERMS = "Of the four options the last one fits best, so it must be D."
SHORT_WITH_TERMS = "Aortic stenosis: D"
SHORT_WITHOUT_TERMS = "D"
VOCABULARY = frozenset({"ulcer"})


def test_the_texts_of_the_tables_have_their_properties():
    assert list(medical_terms(WITH_TERMS)) == ["murmur", "aortic", "stenosis"]
    assert list(medical_terms(SHORT_WITH_TERMS)) == ["aortic", "stenosis"]
    assert list(medical_terms(WITHOUT_TERMS)) == list(medical_terms(SHORT_WITHOUT_TERMS)) == []
    assert min(len(WITH_TERMS), len(WITHOUT_TERMS)) >= 50
    assert max(len(SHORT_WITH_TERMS), len(SHORT_WITHOUT_TERMS)) < 50


def check(reward: EnhancedReward, total, correctness, bonus, penalty, clamped):
    assert reward.total == pytest.approx(total)
    assert reward.correctness == correctness
    assert reward.term_bonus == pytest.approx(bonus)
    assert reward.short_penalty == pytest.approx(penalty)
    assert reward.clamped == pytest.approx(clamped)


@pytest.mark.parametrize(
    ("correct", "text", "total", "bonus", "penalty", "clamped"),
    [
        (True, WITH_TERMS, 1.0, 0.05, 0.0, -0.05),
        (True, SHORT_WITH_TERMS, 0.95, 0.05, -0.1, 0.0),
        (True, WITHOUT_TERMS, 1.0, 0.0, 0.0, 0.0),
        (True, SHORT_WITHOUT_TERMS, 0.9, 0.0, -0.1, 0.0),
        (False, WITH_TERMS, 0.05, 0.05, 0.0, 0.0),
        (False, SHORT_WITH_TERMS, 0.0, 0.05, -0.1, 0.05),
        (False, WITHOUT_TERMS, 0.0, 0.0, 0.0, 0.0),
        (False, SHORT_WITHOUT_TERMS, 0.0, 0.0, -0.1, 0.1),
    ],
)
def test_bonus_for_all_answers(correct, text, total, bonus, penalty, clamped):
    check(enhanced_reward(correct, text), total, float(correct), bonus, penalty, clamped)


@pytest.mark.parametrize(
    ("correct", "text", "total", "bonus", "penalty", "clamped"),
    [
        (True, WITH_TERMS, 1.05, 0.05, 0.0, 0.0),
        (True, SHORT_WITH_TERMS, 0.95, 0.05, -0.1, 0.0),
        (True, WITHOUT_TERMS, 1.0, 0.0, 0.0, 0.0),
        (True, SHORT_WITHOUT_TERMS, 0.9, 0.0, -0.1, 0.0),
        (False, WITH_TERMS, 0.0, 0.0, 0.0, 0.0),
        (False, SHORT_WITH_TERMS, 0.0, 0.0, -0.1, 0.1),
        (False, WITHOUT_TERMS, 0.0, 0.0, 0.0, 0.0),
        (False, SHORT_WITHOUT_TERMS, 0.0, 0.0, -0.1, 0.1),
    ],
)
def test_bonus_for_right_answers(correct, text, total, bonus, penalty, clamped):
    check(enhanced_reward(correct, text, bonus_when="right"), total, float(correct), bonus, penalty, clamped)


def test_a_text_is_short_below_the_length():
    assert enhanced_reward(True, "x" * 49).total == 0.9
    assert enhanced_reward(True, "x" * 50).total == 1.0
    assert enhanced_reward(True, "é" * 49 + " ").total == 1.0
    assert enhanced_reward(True, "", short_length=0).total == 1.0


def test_custom_weights_and_vocabulary():
    words = frozenset({"duck"})
    reward = enhanced_reward(
        True, "A duck.", term_bonus=0.5, short_penalty=0.25, short_length=8, bonus_when="right", vocabulary=words
    )
    assert reward == EnhancedReward(1.25, 1.0, 0.5, -0.25, 0.0)
    assert enhanced_reward(False, WITH_TERMS, vocabulary=words).total == 0.0
    assert enhanced_reward(True, "x", short_penalty=3).total == 0.0
    assert str(enhanced_reward(True, "x", short_penalty=0).short_penalty) == "0.0"


@given(st.booleans(), st.text(), st.floats(0, 10), st.floats(0, 10), st.sampled_from(["always", "right"]))
def test_the_parts_sum_to_the_total_within_the_limits(correct, text, bonus, penalty, when):
    reward = enhanced_reward(
        correct, text + " ulcer", term_bonus=bonus, short_penalty=penalty, bonus_when=when, vocabulary=VOCABULARY
    )
    parts = reward.correctness + reward.term_bonus + reward.short_penalty + reward.clamped
    assert reward.total == pytest.approx(parts)
    assert 0 <= reward.total <= (1 if when == "always" else 1 + bonus)
