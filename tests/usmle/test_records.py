"""The fingerprint of a set of questions."""

from __future__ import annotations

from dataclasses import replace

from groupwise.usmle.records import fingerprint
from tests.usmle.factories import question

ASKED = [question(1, "A"), question(2, "B")]


def test_the_fingerprint_depends_on_texts_options_and_right_letters():
    first = fingerprint(ASKED)
    assert fingerprint([replace(ASKED[0], category="heart", step="1"), ASKED[1]]) == first
    others = [
        replace(ASKED[0], question="Another?"),
        replace(ASKED[0], answer="B"),
        replace(ASKED[0], options={**ASKED[0].options, "C": "another"}),
        replace(ASKED[0], options=dict(reversed(ASKED[0].options.items()))),
    ]
    assert len({first, *(fingerprint([other, ASKED[1]]) for other in others)}) == 5
    assert fingerprint(ASKED[:1]) != first


def test_a_lone_surrogate_has_a_fingerprint():
    assert len(fingerprint([replace(ASKED[0], question="half a pair: \ud83d")])) == 64
