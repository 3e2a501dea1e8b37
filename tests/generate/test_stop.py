"""Stop strings, with the built-in byte tokenizer and a real one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import InputError
from groupwise.generate import Engine, Sampling, StopStrings
from groupwise.model.handle import prepare
from groupwise.model.load import load_tokenizer
from groupwise.model.tiny import tiny_model, tiny_tokenizer
from tests.weights import smollm2

TOKENIZER = tiny_tokenizer()


def first_stop(stop: StopStrings, ids: list[int]) -> int | None:
    return next((at for at in range(1, len(ids) + 1) if stop(ids[:at])), None)


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3))
def test_it_stops_where_the_text_first_contains_a_string(text, strings):
    """Byte by byte: characters of several bytes, overlapping strings, strings that never occur."""
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    wanted = next(
        (at for at in range(1, len(ids) + 1) if any(string in TOKENIZER.decode(ids[:at]) for string in strings)), None
    )
    assert first_stop(StopStrings(TOKENIZER, strings), ids) == wanted


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_tokens_that_may_end_a_completion_are_asked_about(text, strings):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    stop = StopStrings(TOKENIZER, strings)
    may_end = stop.may_end(np.array(ids, np.int64)).tolist()
    assert len(may_end) == len(ids)
    assert all(may_end[at] for at in range(len(ids)) if stop(ids[: at + 1]))


def test_a_token_whose_text_depends_on_the_one_before():
    class WordPieces:
        """A token that continues a word loses its ``##``."""

        def decode(self, ids, **_):
            words = [("x", "##A")[token] for token in ids]
            return "".join(word if not at else word.removeprefix("##") for at, word in enumerate(words))

    assert [StopStrings(WordPieces(), "##A")(ids) for ids in ([1], [0, 1])] == [True, False]
    assert [StopStrings(WordPieces(), "A")(ids) for ids in ([1], [0, 1], [1, 0])] == [True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "string", "ends"),
    [
        ("The answer is B.\n\nBecause", "\n\n", "The answer is B.\n\n"),
        ("So: </answer> and more", "</answer>", "So: </answer>"),
        ("Ein Schluß, naïve café ☕ Ende", "☕", "Ein Schluß, naïve café ☕"),
        ("one two three", "zero", None),
    ],
)
def test_a_real_tokenizer(text, string, ends):
    tokenizer = load_tokenizer(smollm2())
    ids = tokenizer(text)["input_ids"]
    end = first_stop(StopStrings(tokenizer, string), ids)
    if ends is None:
        assert end is None
        return
    got = tokenizer.decode(ids[:end])
    assert string in got
    assert string not in tokenizer.decode(ids[: end - 1])
    assert ends in got


def test_in_generation():
    handle = prepare(tiny_model())
    prompts = [TOKENIZER("Hello")["input_ids"]]
    sampling = Sampling(max_new_tokens=80, eos_ids=())
    stop = StopStrings(TOKENIZER, ["e", "ab"])
    rollout = Engine(handle).generate(prompts, 20, sampling, stop=stop)
    reasons = set()
    for ids, length, reason in zip(rollout.ids, rollout.lengths.tolist(), rollout.stop_reasons, strict=True):
        text, before = TOKENIZER.decode(ids[:length]), TOKENIZER.decode(ids[: length - 1])
        assert ("e" in text or "ab" in text) == (reason == "stop_string")
        assert "e" not in before
        assert "ab" not in before
        reasons.add(reason)
    assert "stop_string" in reasons


@pytest.mark.parametrize("strings", [[], "", [""], [3], ["a", ""]])
def test_bad_strings(strings):
    with pytest.raises(InputError, match=r"stop strings must be .* non-empty"):
        StopStrings(TOKENIZER, strings)
