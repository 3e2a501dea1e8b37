"""Length, repetition and key words: values counted by hand, and properties of any text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import ConfigError, InputError
from groupwise.rewards import Scorer, distinct_n, keywords, length_band, repetition, words_of
from groupwise.rewards.writing import stem

WORDS = st.lists(st.sampled_from(["sun", "moon", "rain", "wind", "sea"]), max_size=30)


def one(reward, completion, prompt="p", **columns):
    return reward([prompt], [completion], **{name: [value] for name, value in columns.items()})[0]


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" -- '' … ", []),
        ("The cat, the DOG.", ["the", "cat", "the", "dog"]),
        ("don't 'quote' O’Neil's", ["don't", "quote", "o'neil's"]),
        ("well-known snake_case 3.14", ["well", "known", "snake", "case", "3", "14"]),
        ("ÉCOLE e\u0301cole Straße", ["école", "école", "strasse"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("Привет, мир!", ["привет", "мир"]),
        ("مرحبا بالعالم", ["مرحبا", "بالعالم"]),
        ("می\u200cخواهم", ["میخواهم"]),
        ("日本語です。한국어 좋다", ["日", "本", "語", "で", "す", "한국어", "좋다"]),
        ("ﬁne ＡＢＣ", ["fine", "abc"]),
        ("a😀b", ["a", "b"]),
    ],
)
def test_words_of_any_script(text, words):
    assert words_of(text) == words


@given(st.text())
def test_words_have_letters_or_digits_and_stay_what_they_are(text):
    words = words_of(text)
    assert all(word and not set(word) & set(" \n\t.,;-_") for word in words)
    assert words_of(" ".join(words)) == words


# --- length -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "reward"),
    [(0, 0.0), (2, 0.0), (3, 0.25), (5, 0.75), (6, 1.0), (8, 1.0), (10, 1.0), (11, 0.75), (13, 0.25), (14, 0.0)],
)
def test_a_band_with_slopes(number, reward):
    """From 6 to 10 words it is 1; the band is 4 wide, and so is each slope."""
    assert one(length_band(low=6, high=10), "word " * number) == reward


def test_slopes_of_another_width():
    assert one(length_band(low=6, high=10, soft=10), "word " * 3) == 0.7
    assert one(length_band(low=6, high=10, soft=0), "word " * 5) == 0.0
    assert one(length_band(low=6, high=6), "word " * 6) == 1.0
    assert one(length_band(low=6, high=6), "word " * 7) == 0.0


def test_characters_and_thinking():
    assert one(length_band(low=4, high=6, unit="characters"), "<think>long long</think>\nabcde\n") == 1.0
    assert one(length_band(low=4, high=6, unit="characters"), "abcdefg") == 0.5
    assert one(length_band(low=1, high=1, after=""), "long</think> one") == 0.0


@given(st.integers(0, 40), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_the_reward_falls_with_the_distance_from_the_band(number, low, width, soft):
    reward = length_band(low=low, high=low + width, soft=soft)
    shorter, longer = one(reward, "w " * number), one(reward, "w " * (number + 1))
    assert 0 <= shorter <= 1
    assert (shorter == 1) == (low <= number <= low + width)
    assert longer >= shorter if number < low else longer <= shorter


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": -1, "high": 2}, "low must be an integer of at least 0, got -1"),
        ({"low": 1, "high": 2.5}, "high must be an integer"),
        ({"low": 1, "high": True}, "high must be an integer"),
        ({"low": 3, "high": 2}, "high is 2, which is less than low, 3"),
        ({"low": 1, "high": 2, "soft": -1}, "soft must be an integer of at least 0"),
        ({"low": 1, "high": 2, "unit": "tokens"}, "unknown unit 'tokens' .allowed: 'words', 'characters'."),
        ({"low": 1, "high": 2, "after": 5}, "after must be the text that an answer follows"),
    ],
)
def test_invalid_bands(options, message):
    with pytest.raises(ConfigError, match=message):
        length_band(**options)


# --- repetition -------------------------------------------------------------------------------------------------------


def test_repetition_by_hand():
    """Six words have four triples; the last is the first again, in capitals."""
    assert one(repetition(), "the old cat, The Old Cat") == 0.75
    assert one(repetition(most=0.5), "the old cat the old cat") == 0.5
    assert one(repetition(most=0.25), "the old cat the old cat") == 0.0
    assert one(repetition(most=0.1), "the old cat the old cat") == 0.0
    assert one(repetition(n=1), "a b a c") == 0.75
    assert one(repetition(), "no no no no") == 0.5
    assert one(repetition(), "two words") == one(repetition(), "") == 1.0
    assert one(repetition(), "a b c a b c</think>a b c d") == 1.0


def slow_distinct(texts, n):
    seen, number = [], 0
    for text in texts:
        words = text.lower().split()
        for start in range(len(words) - n + 1):
            number += 1
            if words[start : start + n] not in seen:
                seen.append(words[start : start + n])
    return len(seen) / number if number else 1.0


@given(st.lists(WORDS, max_size=4), st.integers(1, 4))
def test_distinct_n_equals_counting(texts, n):
    joined = [" ".join(words) for words in texts]
    assert distinct_n(joined, n) == slow_distinct(joined, n)


def test_distinct_n_by_hand():
    assert distinct_n(["a b c", "a b d"], 2) == 0.75
    assert distinct_n(["a b", "a b"], 2) == 0.5  # no bigram runs from one text into the next
    assert distinct_n(["a", ""], 2) == distinct_n([], 1) == 1.0
    with pytest.raises(InputError, match="n must be an integer of at least 1, got 0"):
        distinct_n(["a"], 0)


@given(WORDS, st.integers(1, 4), st.sampled_from([0.25, 0.5, 1.0]))
def test_more_repetition_never_gives_a_higher_reward(words, n, most):
    reward = repetition(n=n, most=most)
    scores = [one(reward, " ".join(words * times)) for times in (1, 2, 3)]
    assert all(0 <= score <= 1 for score in scores)
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be an integer of at least 1, got 0"),
        ({"most": 0}, "most must be a share above 0 and up to 1, got 0"),
        ({"most": 1.5}, "most must be a share"),
        ({"most": "1"}, "most must be a share"),
        ({"most": float("nan")}, "most must be a share"),
    ],
)
def test_invalid_repetition_options(options, message):
    with pytest.raises(ConfigError, match=message):
        repetition(**options)


# --- key words --------------------------------------------------------------------------------------------------------

FORMS = [
    ("dragon", "dragons"), ("story", "stories"), ("make", "making"), ("make", "makes"), ("run", "running"),
    ("walk", "walked"), ("love", "loved"), ("box", "boxes"), ("house", "houses"), ("glass", "glasses"),
    ("fly", "flies"), ("fly", "flying"), ("try", "tried"), ("quick", "quickly"), ("family", "families"),
    ("fall", "falling"), ("virus", "virus's"), ("pass", "passing"),
]  # fmt: skip


def test_forms_of_a_word_have_one_stem():
    assert not [(word, form) for word, form in FORMS if stem(word) != stem(form)]


@pytest.mark.parametrize(
    ("one_word", "other"), [("ring", "rung"), ("string", "strong"), ("seed", "see"), ("bed", "bid")]
)
def test_other_words_have_other_stems(one_word, other):
    assert stem(one_word) != stem(other)


def test_key_words_of_the_prompt():
    """They are lighthouse, keeper and storms; the other words are short or stop words."""
    prompt = "Please write about a lighthouse keeper who likes the storms, and make it end well!"
    keeper = keywords()
    assert one(keeper, "The keeper kept still.", prompt) == 1 / 3
    assert one(keeper, "A lighthouse in a STORM: its keeper slept.", prompt) == 1.0
    assert one(keeper, "Nothing of it.", prompt) == 0.0
    chat = [{"role": "system", "content": "Use emeralds."}, {"role": "user", "content": "Describe dragons."}]
    assert one(keeper, "One dragon.", chat) == 1.0
    assert one(keeper, "anything", "Write it.") is None
    turns = [{"role": "user", "content": "Dragons."}, {"role": "user", "content": "Castles."}]
    assert one(keeper, "A castle.", turns) == 0.5


def test_repeating_the_prompt_does_not_count():
    prompt = "Tell of a lighthouse keeper in a winter storm."
    assert one(keywords(), f"{prompt} {prompt}", prompt) == 0.0
    assert one(keywords(copied=None), prompt, prompt) == 1.0
    assert one(keywords(), "A lighthouse keeper in Spain", prompt) == 0.0
    assert one(keywords(copied=5), "A lighthouse keeper in Spain", prompt) == 0.5
    assert one(keywords(), "The lighthouse keeper slept; a winter storm came. Storm!", prompt) == 0.75
    assert one(keywords(words=["winter storm"]), "in a winter storm", prompt) == 0.0
    assert one(keywords(words=["winter storm"]), "one winter storm", prompt) == 1.0
    system = [{"role": "system", "content": "Always say the dragon slept."}, {"role": "user", "content": "Dragons."}]
    assert one(keywords(), "The dragon slept.", system) == 0.0


def test_key_words_of_a_list():
    listed = keywords(words=["sun", "New York", "cats"])
    assert one(listed, "The sun over New   York.") == 2 / 3
    assert one(listed, "York is new, the cat too.") == 1 / 3
    assert one(listed, "sun sun sun sun") == 1 / 3
    assert one(listed, "<think>sun, New York, cats</think>cats") == 1 / 3
    assert one(keywords(words=["sun", "New York", "cats"], least=0.5), "a cat in the sun") == 1.0
    assert one(keywords(words=["sun", "New York", "cats"], least=0.5), "a cat") == pytest.approx(2 / 3)
    assert one(keywords(words="the brave little tailor"), "a tailor") == 1 / 3


def test_key_words_of_a_column():
    scorer = Scorer([keywords(column="theme")])
    themes = [["sea", "ships"], "the stormy ocean", None, [], ["ship"]]
    scores = scorer.score(["p"] * 5, ["a ship", "an ocean", "x", "x", "shipping"], {"theme": themes, "other": range(5)})
    assert scores.rewards[[0, 1, 4], 0].tolist() == [0.5, 0.5, 1.0]
    assert scores.rewards[[2, 3], 0].isnan().all()


def test_a_column_whose_name_is_not_an_identifier():
    for column in ("key words", "class"):
        assert one(keywords(column=column), "a cat", **{column: ["cat"]}) == 1.0
        with pytest.raises(InputError, match=f"the data has no column '{column}' .there are: 'other'."):
            one(keywords(column=column), "a cat", other="cat")


@pytest.mark.parametrize("value", [5, ["cat", 5], {"cat": 1}])
def test_invalid_key_words(value):
    with pytest.raises(InputError, match="the column 'theme' must be a text or a list of texts, got"):
        one(keywords(column="theme"), "a cat", theme=value)


@given(WORDS, WORDS, st.sampled_from([0.5, 1.0]))
def test_key_words_count_once_and_more_words_never_cost(first, second, least):
    reward = keywords(words=["sun", "moon", "rain"], least=least)
    score = one(reward, " ".join(first))
    assert 0 <= score <= 1
    assert score == min(1.0, len({"sun", "moon", "rain"} & set(first)) / 3 / least)
    assert one(reward, " ".join(first * 3)) == score
    assert one(reward, " ".join(first + second)) >= score


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "a", "words": ["b"]}, "give one of them, not both"),
        ({"column": ""}, "column must be a text, got ''"),
        ({"words": []}, r"words has no key words: \[\]"),
        ({"words": "a to z"}, "words has no key words: 'a to z'; a text needs words of at least 4 letters"),
        ({"least": 0}, "least must be a share above 0 and up to 1, got 0"),
    ],
)
def test_invalid_key_word_options(options, message):
    with pytest.raises(ConfigError, match=message):
        keywords(**options)
