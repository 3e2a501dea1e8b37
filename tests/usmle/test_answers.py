"""Reading the answer from a text: two labelled corpora, the rules by name, and properties of any text."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import InputError
from groupwise.usmle.answer_text import LONGEST_HEAD, LONGEST_TAIL, normalise
from groupwise.usmle.answers import DISAGREES, NO_ANSWER, Choice, extract_answer


def corpus(name):
    """The cases of a file, one per line. Texts contain other line separators than the newline."""
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


CASES = corpus("choice_corpus.jsonl")
BLIND = corpus("choice_corpus_blind.jsonl")  # labelled before its author had seen the rules
LIVER = {
    "A": "Hepatitis B",
    "B": "Hepatitis C",
    "C": "Hemochromatosis",
    "D": "Alcoholic hepatitis",
    "E": "Wilson disease",
}
DRUGS = {"A": "Doxycycline", "B": "Ceftriaxone", "C": "Vancomycin", "D": "Amoxicillin"}
FOUND = ("boxed", "stated", "alone", "concluded", "the only one named", "the only one left", "option text")
RULES = {*NO_ANSWER, *FOUND, *(rule + DISAGREES for rule in FOUND)}


@pytest.mark.parametrize("reader", ["lenient", "strict"])
def test_both_readers_agree_with_the_labels_of_the_corpora(reader):
    failures = {
        case["id"]: f"read {letter}, labelled {case[reader]}: {case['why']}"
        for case in CASES + BLIND
        if (letter := extract_answer(case["text"], case["options"], strict=reader == "strict").letter) != case[reader]
    }
    assert failures == {}


def is_well_formed(case):
    options = case["options"]
    return (
        list(case) == ["id", "text", "options", "lenient", "strict", "why"]
        and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", case["id"]) is not None
        and all(isinstance(case[key], str) for key in ("text", "why"))
        and case["why"] != ""
        and 2 <= len(options) <= 10
        and "".join(options) == "ABCDEFGHIJ"[: len(options)]
        and len(set(options.values())) == len(options)
        and (case["lenient"] is None or case["lenient"] in options)
        and case["strict"] in (None, case["lenient"])
    )


def test_the_corpora_are_well_formed():
    cases = CASES + BLIND
    assert [case["id"] for case in cases if not is_well_formed(case)] == []
    for key in (lambda case: case["id"], lambda case: (case["text"], json.dumps(case["options"], sort_keys=True))):
        assert [value for value, count in Counter(map(key, cases)).items() if count > 1] == []


def test_the_corpora_are_large_and_balanced():
    assert len(CASES) >= 150
    assert len(BLIND) >= 160
    kinds = Counter((case["lenient"] is not None, case["strict"] is not None) for case in CASES)
    assert set(kinds) == {(False, False), (True, False), (True, True)}
    assert min(kinds.values()) >= 50
    letters = Counter(case["lenient"] for case in CASES)
    assert all(letters[letter] >= 20 for letter in "ABCD")


@pytest.mark.parametrize(
    ("text", "letter", "rule"),
    [
        ("The ferritin is high, hence \\boxed{C}.", "C", "boxed"),
        ("Answer: C", "C", "stated"),
        ("Answer: C. However, if the ceruloplasmin were low, E would be chosen instead.", "C", "stated"),
        ("The answer is c because the ferritin is high.", "C", "stated"),
        ("Between C and E, C is better.", "C", "stated"),
        ("Answer: C. Wilson disease", "C", "stated, text disagrees"),
        ("C. Hemochromatosis\n\nThis is not a viral disease.", "C", "alone"),
        ("C. Wilson disease", "C", "alone, text disagrees"),
        ("The correct answer is neither A nor B, but C.", "C", "concluded"),
        ("A. Hepatitis B ❌\nB. Hepatitis C ❌\nC. Hemochromatosis ✅", "C", "concluded"),
        ("A. Hepatitis B\nThis is incorrect.\nC. Hemochromatosis\nThis is correct.", "C", "stated"),
        ("So, C.", "C", "concluded"),
        ("C - the skin is bronze.", "C", "the only one named"),
        ("A, B, D and E do not raise the ferritin this much.", "C", "the only one left"),
        ("The cause is hemochromatosis, which may also damage the heart.", "C", "option text"),
        ("This suggests hemochromatosis, although Wilson disease could be tested for.", "C", "option text"),
        ("The answer is C or E.", None, "several"),
        ("Answer: C\n\nActually, C is wrong.", None, "declined"),
        ("None of these.", None, "declined"),
        ("The answer is F.", None, "beyond the options"),
        ("The hepatitis serology is pending, and vitamin D is low.", None, "nothing"),
        ("", None, "nothing"),
    ],
)
def test_lenient_rules(text, letter, rule):
    assert extract_answer(text, LIVER) == Choice(letter, rule)


@pytest.mark.parametrize(
    ("text", "rule"),
    [("Answer: C", "stated"), ("\\boxed{C}", "boxed"), ("The skin is bronze.\n\nC. Hemochromatosis", "alone")],
)
def test_strict_rules(text, rule):
    assert extract_answer(text, LIVER, strict=True) == Choice("C", rule)


def test_the_strict_reader_requires_the_word_answer():
    assert extract_answer("The correct option is C.", LIVER).letter == "C"
    assert extract_answer("The correct option is C.", LIVER, strict=True).letter is None


def test_a_repeated_question_is_read_only_if_it_lists_the_same_options():
    question = "Question: Which drug?\nA. Doxycycline\nB. Ceftriaxone\nC. Vancomycin\nD. Amoxicillin\n\nAnswer: B"
    assert extract_answer(f"Here is the question again.\n\n{question}", DRUGS, strict=True).letter == "B"
    assert extract_answer(f"Here is the question again.\n\n{question}", LIVER).letter is None


@pytest.mark.parametrize(
    ("text", "lenient", "strict"),
    [
        # The prompt itself writes 'Answer:' in quotation marks.
        ("'Answer: C'", "C", "C"),
        ("'Answer:' C", "C", "C"),
        ("‘Answer: C’", "C", "C"),
        # An article after "Answer:" is not a letter.
        ("Answer: A 45-year-old man with abnormal enzymes", None, None),
        ("Answer: a hemochromatosis", "C", None),
        ("Answer: A because the antigen is there", "A", None),
        ("Option A involves the liver alone, and I choose option A here.", "A", None),
        ("This fits best with option A among all that are listed.", "A", None),
        # A second answer that is cut off does not replace the first.
        ("Answer: C\n\nA", "C", "C"),
        ("C\n\nOn second thoughts, the other one.\n\nE", "E", "E"),
        ("The answer would be E if the ceruloplasmin were low, but it is not, so C.", "C", None),
        ("The answer would be C if I had to choose.", "C", None),
        ("It could be C or E, but the ferritin makes C more likely.", "C", None),
        ("A more likely diagnosis is hemochromatosis.", "C", None),
        # Questions and answers in the form of an interview.
        ("Q: What is the diagnosis?\nA: Hemochromatosis", "C", None),
        ("C\n\nQ: What is the treatment?\nA: Chelation", "C", "C"),
    ],
)
def test_outputs_of_small_models(text, lenient, strict):
    assert extract_answer(text, LIVER).letter == lenient
    assert extract_answer(text, LIVER, strict=True).letter == strict


@pytest.mark.parametrize(
    ("text", "letter"),
    [("5", "A"), ("Answer: 5.", "A"), ("5-10", None), ("0.5", None), ("-5", None), ("1,5", None), ("50", "D")],
)
def test_a_number_is_an_option_only_if_it_is_the_complete_number(text, letter):
    assert extract_answer(text, {"A": "5", "B": "10", "C": "15", "D": "50"}).letter == letter


def test_an_option_whose_text_is_the_letter_of_another():
    options = {"A": "B", "B": "C", "C": "D", "D": "A"}
    for text in ("Answer: A", "Answer: A. B", "Answer: A) B"):
        assert extract_answer(text, options, strict=True).letter == "A"


@pytest.mark.parametrize("options", ["ABCD", "abcd", ["A", "B", "C", "D"], {"a": "", "b": "", "c": "", "d": ""}])
def test_options_may_be_letters_without_texts_in_either_case(options):
    assert extract_answer("A is unlikely, so the answer is C.", options) == Choice("C", "stated")
    assert extract_answer("Answer: C", options, strict=True) == Choice("C", "stated")
    assert extract_answer("Answer: E", options) == Choice(None, "beyond the options")


def test_options_with_lower_case_letters_are_found_by_their_texts():
    options = {letter.lower(): text for letter, text in DRUGS.items()}
    assert extract_answer("The best drug for him is vancomycin.", options) == Choice("C", "option text")


@pytest.mark.parametrize(
    "options", ["", {}, [], ["AB", "C"], {"AB": "Aspirin"}, "12", {"1": "Aspirin"}, {"": "Aspirin"}]
)
def test_options_must_be_letters(options):
    with pytest.raises(InputError, match="options must be letters from A to Z"):
        extract_answer("Answer: A", options)


# --- properties of any text -------------------------------------------------------------------------------------------

WORDS = """Answer: The answer is final boxed \\boxed{ } A B C D E (B) **C** a i . , : ; ? ! not or and but wait actually
    if would be correct incorrect unlikely option Option Question: none of these hemochromatosis Wilson disease vitamin
    hepatitis <answer> </answer> "answer": ✅ ❌ 答案是 Ｂ 1. - > # * ' ’ $ ﷺ ⟦ ⟧ @A #B ~C"""
BREAKS = ["\n", "\n\n", "\r\n", "\t", "Question:\n", "A. Hepatitis B\n", "\x00", "\u200b"]
PIECES = st.sampled_from([*WORDS.split(), *BREAKS])
TEXTS = st.one_of(st.text(max_size=300), st.lists(PIECES, max_size=40).map(" ".join))


@given(TEXTS, st.booleans())
def test_any_text_gives_an_option_or_none_and_a_known_rule(text, strict):
    choice = extract_answer(text, LIVER, strict=strict)
    assert choice.letter is None or choice.letter in LIVER
    assert choice.rule in RULES
    assert (choice.letter is None) == (choice.rule in NO_ANSWER)


@given(TEXTS)
def test_a_strict_answer_is_also_the_lenient_one(text):
    strict = extract_answer(text, LIVER, strict=True).letter
    assert strict in (None, extract_answer(text, LIVER).letter)


@given(
    st.permutations(list(LIVER.values())),
    st.sampled_from(list(LIVER.values())),
    st.sampled_from(
        [
            "{}",
            "Answer: {}",
            "The most likely diagnosis is {}.",
            "The findings suggest {}, because the enzymes are high.",
            "This is most consistent with **{}**, which runs in families.",
            "He drinks little. I believe that the cause is {}.",
        ]
    ),
)
def test_an_answer_by_text_gives_the_letter_of_that_text(texts, chosen, sentence):
    options = dict(zip("ABCDE", texts, strict=True))
    choice = extract_answer(sentence.format(chosen), options)
    assert choice.letter is not None
    assert options[choice.letter] == chosen


HOSTILE = ["A\n", "(((", "if the answer ", "ﷺ"]
MORE_HOSTILE = [
    "A ", "A. a ", ". ", " ", "\n", "**A** ", "\\boxed{", '"answer": "', "not A and B or C, ",
    "A would really be some word ", "between A and B , ", "Wait, A is wrong. ", "A. Hepatitis B\nThis is incorrect.\n",
    "✅ A\n", "'", "A, B, ", "the answer is ", "Hepatitis B or ",
]  # fmt: skip


@pytest.mark.parametrize(
    "pattern", [*HOSTILE, *(pytest.param(pattern, marks=pytest.mark.slow) for pattern in MORE_HOSTILE)]
)
def test_an_answer_after_a_megabyte_of_repetition_is_read(pattern):
    text = pattern * (1_000_000 // len(pattern))
    for strict in (False, True):
        assert extract_answer(text, LIVER, strict=strict).rule in RULES
        assert extract_answer(f"{text}\n\nAnswer: D", LIVER, strict=strict) == Choice("D", "stated")


def test_the_beginning_and_the_end_of_a_long_text_are_read():
    filler = "The enzymes are high. " * 10_000
    assert extract_answer(f"Answer: C\n{filler}", LIVER).letter == "C"
    assert extract_answer(f"{filler}\nAnswer: C\n{filler}", LIVER).letter is None


def test_a_text_that_grows_when_normalised_is_shortened_again():
    assert len(normalise("ﷺ" * 100_000)) == LONGEST_HEAD + LONGEST_TAIL + 1
