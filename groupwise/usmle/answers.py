r"""Read the answer to a multiple-choice question from a model's text.

The strict reader requires the requested form: a line ``Answer: C``, a ``\boxed{C}``, or the letter, with or without its
option's text, as the first or the last line. The lenient one reads as a careful person would: it follows corrections,
knows that "A is unlikely" rules A out and that "A 45-year-old man" and "vitamin D" name no option, accepts an option's
text instead of its letter, and does not choose if two options are named. Every result has the rule by which it was
found, or the reason why there is none.

The running time is linear: sentences are read one by one, patterns match a bounded length, and of a very long text only
the beginning and the end are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from groupwise.errors import InputError
from groupwise.usmle.answer_text import (
    AnswerOptions,
    Sentence,
    normalise,
    options_of,
    parts_of,
    sentences,
    shortened,
    without_lists,
)

NOTHING, SEVERAL, DECLINED, BEYOND = "nothing", "several", "declined", "beyond the options"
NO_ANSWER = {
    NOTHING: "it chooses no option",
    SEVERAL: "it names several options",
    DECLINED: "it declines to choose",
    BEYOND: "it names a letter beyond the options",
}
"""The rules without a letter, and what they say about the text."""
# The rules with a letter.
BOXED, STATED, ALONE, CONCLUDED = "boxed", "stated", "alone", "concluded"
ONLY, ELIMINATED, BY_TEXT = "the only one named", "the only one left", "option text"
DISAGREES = ", text disagrees"  # added to a rule if the letter stands beside another option's text


@dataclass(frozen=True)
class Choice:
    """The letter that a text gives as its answer, or None, and the rule by which it was read."""

    letter: str | None
    rule: str


NO_CHOICE = Choice(None, NOTHING)
FOUR_LETTERS = "ABCD"


def extract_answer(
    text: str, options: Mapping[str, str] | Sequence[str] | None = None, *, strict: bool = False
) -> Choice:
    """The answer in a model's text, by the lenient reader or the strict one.

    options: letters with their texts, or letters alone; None is A to D. Without texts an answer must have its letter.
    A letter of the strict reader is also the letter of the lenient one.
    """
    options = FOUR_LETTERS if options is None else options
    lenient, exact = _readings(shortened(text), _checked(options))
    return exact if strict else lenient


@lru_cache(maxsize=2048)  # rewards and grades read the same texts
def _readings(text: str, options: AnswerOptions) -> tuple[Choice, Choice]:
    """The lenient and the strict reading of a text."""
    for number, part in enumerate(parts_of(normalise(text))):
        if number and not options.are_listed_in(part):
            break  # another question, made up by the model
        statements = without_lists(part, options)
        lenient = _lenient(statements, options)
        if lenient.rule != NOTHING:
            exact = _strict(statements, options)
            return lenient, exact if exact.letter in (None, lenient.letter) else NO_CHOICE
    return NO_CHOICE, NO_CHOICE


def _checked(options: Mapping[str, str] | Sequence[str]) -> AnswerOptions:
    pairs = options.items() if isinstance(options, Mapping) else [(letter, "") for letter in options]
    texts = tuple((str(letter).upper(), str(text or "")) for letter, text in pairs)
    if not texts or any(len(letter) != 1 or not "A" <= letter <= "Z" for letter, _ in texts):
        raise InputError(f"options must be letters from A to Z, with their texts or without, got {options!r}")
    return options_of(texts)


_ANSWER_LINE = re.compile(
    r"\W{0,4}(?:the )?(?:final |correct )?answer(?: is ?:?| ?:) ?(?P<rest>\W{0,3}[a-z](?!\w).{0,400})", re.IGNORECASE
)
_LETTER_FIRST = re.compile(r"[(\[]{0,2}(?P<letter>[A-Za-z])(?!\w)[)\]]{0,2}(?P<rest>.{0,400})", re.DOTALL)
_BOX = re.compile(r"⟦([^⟧\n]{0,200})⟧")


def _strict(text: str, options: AnswerOptions) -> Choice:
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    last: Choice | None = None
    for line in lines:
        if boxes := _BOX.findall(line):
            last = _letter_and_text(boxes[-1], options, BOXED)
        elif (stated := _ANSWER_LINE.fullmatch(line)) is not None:
            last = _letter_and_text(stated["rest"], options, STATED)
    if last is not None:
        return last
    for line in (*lines[-1:], *lines[:1]):
        if line.strip("([")[:1].isupper() and (alone := _letter_and_text(line, options, ALONE)).letter is not None:
            return alone
    return NO_CHOICE


def _letter_and_text(text: str, options: AnswerOptions, rule: str) -> Choice:
    """A letter followed only by punctuation and its option's text."""
    match = _LETTER_FIRST.fullmatch(text.strip(" .:)\"'"))
    if match is None:
        return NO_CHOICE
    letter, rest = match["letter"].upper(), match["rest"].strip(" .):-–—,\"'")
    if letter not in options.texts:
        return Choice(None, BEYOND)
    return Choice(letter, rule) if not rest or options.is_text(letter, rest) else NO_CHOICE


# Patterns of the lenient reader: "@B" is an option by its letter, "#B" by its text, "~B" one that was ruled out.


def _any(phrases: str) -> str:
    """A regular expression of the alternatives in "so | thus | hence"."""
    return f"(?:{'|'.join(phrases.split(' | '))})"


_ONE = r"[@#][A-Z]"
_AND = r" (?:, )?(?:and|or|/|&|,|as well as) (?:maybe |possibly |perhaps |also |else |even )?(?:the )?"
_LIST = rf"{_ONE}(?:{_AND}{_ONE}){{0,9}}"
_ANYTHING = rf"(?: (?!because|since|but|{_ONE})[^ ]{{1,24}})"
_ANYTHING_BUT_A_COMMA = rf"(?: (?!because|since|but|,|{_ONE})[^ ]{{1,24}})"

_WRONG = _any(
    "not | never | no | neither | incorrect | wrong | untrue | false | unlikely | less | least | too | out | "
    "ruled | excluded | eliminated | avoided | inappropriate | contraindicated | implausible | inconsistent | "
    "insufficient | irrelevant | unrelated | distractors? | tempting"
)
_RULES_OUT = _any(
    "not | isn't | never | neither | nor | rule out | rules out | ruled out | ruling out | "
    "eliminat(?:e|es|ed|ing) | exclud(?:e|es|ed|ing) | discard(?:ed)? | reject(?:s|ed)? | dismiss(?:ed)? | "
    "rather than | instead of | unlike | than | versus | vs | over | except | against | incorrect | wrong"
)
_MAY_BE = _any(
    "is | are | was | were | would be | would | can be | could be | does | do | seems? | appears? | looks? | "
    "may be | might be | should be"
)
_IS_NOT = _any(
    "cannot | can't | isn't | aren't | wouldn't | doesn't | don't | can not | does not | do not | would not | "
    "lacks? | fails?"
)
_ADVERB = _any(
    "therefore | also | both | all | clearly | probably | likely | simply | just | thus | actually | very | more | "
    "each | definitely | certainly"
)
_DENIED = tuple(
    re.compile(pattern)
    for pattern in (
        rf"\b{_RULES_OUT}(?: (?:likely|the|be|is|it|just|simply|in|for|:)){{0,2}} ({_LIST})",
        rf"({_LIST}){_ANYTHING_BUT_A_COMMA}{{0,6}} {_MAY_BE}(?: {_ADVERB}){{0,2}} (?:a |an )?{_WRONG}\b",
        rf"({_LIST}){_ANYTHING_BUT_A_COMMA}{{0,5}} {_IS_NOT}\b",
        rf"({_LIST}) (?:[:\-–—(] )?(?:incorrect|wrong|no|unlikely|false|ruled out|less likely|excluded)\b",
        rf"\b(?:cannot|can't|can not|could not|couldn't|won't|will not) be(?: the)? ({_LIST})",
        rf"\b(?:wrong|incorrect|tempting|worst|least likely) (?:answer|option|choice|one)s?(?: is| are| :)? ({_LIST})",
        rf"\bwould be ({_LIST}) if (?!i |we |you |one )",
        rf"\b(?:thought(?: of| was| it was)?|suspected|considered|assumed|said) ({_LIST})",
    )
)
_MNEMONIC = re.compile(r"[@#]([A-Z]) (?=(?:is|stands) for\b)")
_WEIGHED = re.compile(rf"\bbetween {_ONE} and {_ONE} ,")

_NOUN = r"(?:answer|ans|option|choice|letter|response|selection|respuesta|réponse|antwort|risposta|resposta)s?"
_IS = _any(
    "is | are | was | would be | should be | must be | will be | has to be | seems to be | appears to be | be | "
    "es | est | ist | è | é | = | : | - | – | — | →"
)
_FILLER = _any(
    "therefore | thus | hence | so | then | indeed | really | actually | simply | still | now | again | here | "
    "overall | most | likely | probably | clearly | definitely | obviously | correct | right | best | "
    "appropriate | final | single | one | option | choice | letter | answer | question | case | scenario | "
    "patient | given | above | the | a | this | it | my | of | in | for | to | is | would | be | , | : | \\( | - | "
    "– | —"
)
_FILL = rf"(?: {_FILLER}){{0,8}}"
_BOXES = re.compile(rf"\bboxed ({_LIST})")
_BY_ITSELF = re.compile(rf"[(:,\-–—) ]{{0,4}}{_LIST}[):,\-–—. ]{{0,4}}")
_STATES = re.compile(rf"\b{_NOUN}{_FILL} {_IS}{_FILL} ({_LIST})")
_STATES_NEXT = re.compile(
    rf"^(?:the |my |final |correct |best ){{0,4}}{_NOUN} ({_LIST})|\b(?:答案|正解|正确)\w{{0,4}} (?:: )?({_LIST})"
)
_STATES_NONE = re.compile(rf"\b{_NOUN}{_FILL} {_IS} (?:none|neither(?! ~)|not (?:listed|given|among|here))\b")
_CHOICE_MADE = _any(
    "choose | chose | choosing | select | selected | selecting | pick | picked | picking | go with | going with | "
    "opt for | answer with | answer | settle on | lean towards? | leaning towards? | vote for | say | guess | "
    "conclude | mark"
)
_CHOOSES = re.compile(rf"\b{_CHOICE_MADE}(?: (?:on|for|the|that|it|is|be|:|,)){{0,3}} ({_LIST})")
_MUST_BE = _any(
    "is | are | was | would be | must be | should be | has to be | seems? | appears? | looks | remains? | as"
)
_THE_VERY = _any(
    "to | be | the | a | our | my | therefore | thus | clearly | indeed | still | then | probably | definitely | "
    "actually | also | most | more | much | far | better | likely | single | only"
)
_RIGHT = _any(
    "correct | right | best | better | answer | likely | appropriate | probable | diagnosis | choice | accurate | "
    "fitting"
)
_IS_RIGHT = re.compile(
    rf"({_LIST}){_ANYTHING}{{0,8}} {_MUST_BE}(?: {_THE_VERY}){{0,4}} {_RIGHT}\b"
    rf"|({_LIST}) (?:as )?the (?:best|correct|right|most likely) (?:answer|option|choice|diagnosis)\b"
    rf"|\bmak(?:es?|ing) ({_LIST})(?: {_THE_VERY}){{1,4}} {_RIGHT}\b"
)
_SUPPOSES = re.compile(r"\bif\b.{0,200}\b(?:answer|option|choice|it) would (?:then )?be\b")
_IMAGINES = re.compile(r"\bif\b.{0,200}\bwould\b")

_RETRACTS = re.compile(
    r"\b(?:wait|that is wrong|that's wrong|that was wrong|scratch that|i was wrong|not right|reconsider)\b"
)
_CORRECTION = _any(
    "wait | actually | correction | sorry | reflection | reconsider(?:ing)? | meant | mean | mistake | "
    "second thoughts? | instead | change | scratch | hmm | rather"
)
_CORRECTS = re.compile(rf"\b{_CORRECTION}\b|^no\b")
_WITHDRAWS = re.compile(
    r"(?:~([A-Z]) (?:is|was) (?:not (?:the )?(?:correct|right|best|answer)|incorrect|wrong)|\bnot ~([A-Z]))\b"
)

_CONCLUSION = _any(
    "so | thus | therefore | hence | conclusion | conclude | overall | ultimately | finally | based on | given | "
    "likely | best | most | correct | must | preferred | suggests? | suggesting | consistent | points? | "
    "indicates? | indicating | explains? | explained | confirms? | fits? | makes? | leaves? | leaving | "
    "characteristic | classic | typical | diagnosis | treatment | management | mechanism | cause | step | due to | "
    "caused by | which is | it is | it's"
)
_CONCLUDES = re.compile(rf"\b{_CONCLUSION}\b")
_ASIDE = re.compile(r" (?:, (?:which|who|whose|although|though|as)|because|since)\b")
_HEDGE = _any(
    "could | may | might | possible | possibly | consider(?:ed|ing)? | if | differential | include[sd]? | "
    "including | such as | e g | between | whether | unsure | options? | let's | also | at first | "
    "first (?:glance|sight|look|impression|thought)"
)
_HEDGES = re.compile(rf"{_ONE} would\b|\b{_HEDGE}\b|^first\b(?! -)|\?")
_DECLINES = re.compile(
    r"\b(?:none of (?:the|these|those|them)|no (?:correct|right) (?:answer|option)|unable to|don't know|do not know|"
    r"not sure|(?:cannot|can't) (?:be )?(?:answer|determine)|not (?:able|possible) to (?:answer|determine)|"
    r"(?:insufficient|not enough) information)"
)


class _StatedAnswer(NamedTuple):
    letters: list[str]
    rule: str
    disagrees: bool


def _lenient(text: str, options: AnswerOptions) -> Choice:
    denied = [_with_denials(sentence) for sentence in sentences(text, options)]
    stated = _last_stated(denied) or _conclusion(denied, options)
    if stated is not None:
        letters = list(dict.fromkeys(stated.letters))
        if len(letters) != 1:
            return Choice(None, SEVERAL if letters else DECLINED)
        if letters[0] not in options.texts:
            return Choice(None, BEYOND)
        return Choice(letters[0], stated.rule + (DISAGREES if stated.disagrees else ""))
    if any(_DECLINES.search(sentence.words) for sentence in denied):
        return Choice(None, DECLINED)
    return _only_option(denied, options)


def _with_denials(sentence: Sentence) -> Sentence:
    words = _WEIGHED.sub("", _MNEMONIC.sub(r"\1 ", sentence.words))
    for pattern in _DENIED:
        words = pattern.sub(lambda match: re.sub(r"[@#](?=[A-Z]\b)", "~", match[0]), words)
    return Sentence(words, sentence.disagrees)


def _last_stated(parsed: Sequence[Sentence]) -> _StatedAnswer | None:
    """The last answer that is stated; without letters if it was withdrawn and not replaced."""
    last: _StatedAnswer | None = None
    withdrawn = False
    for number, sentence in enumerate(parsed):
        words = sentence.words
        # A bare letter after a stated answer is the start of a sentence that was cut off: "Answer: C\n\nA".
        answered = last is not None and last.rule in (STATED, BOXED)
        stated = _stated(sentence, at_the_edge=number == 0 or (number == len(parsed) - 1 and not answered))
        corrects = _CORRECTS.search(words) is not None and not _IMAGINES.search(words)
        if stated is None and last is not None and (withdrawn or corrects):
            if named := _marks(words):
                stated = _StatedAnswer(named[-1:], STATED, sentence.disagrees)
            elif last.letters and set(last.letters) <= set(chain(*_WITHDRAWS.findall(words))):
                last = _StatedAnswer([], DECLINED, False)
        retracted = withdrawn or _RETRACTS.search(words) is not None
        withdrawn = stated is None and last is not None and (retracted or not last.letters)
        last = stated or last
    return last


def _stated(sentence: Sentence, *, at_the_edge: bool) -> _StatedAnswer | None:
    """The answer that a sentence states. A bare letter is one in the first and in the last sentence."""
    words = sentence.words
    for pattern in () if _SUPPOSES.search(words) else (_BOXES, _STATES, _STATES_NEXT, _CHOOSES, _IS_RIGHT):
        matches = list(pattern.finditer(words))
        if matches:
            named = next(group for group in matches[-1].groups() if group)
            return _StatedAnswer(_marks(named), BOXED if pattern is _BOXES else STATED, sentence.disagrees)
    if _STATES_NONE.search(words):
        return _StatedAnswer([], DECLINED, False)
    if at_the_edge and _BY_ITSELF.fullmatch(words):
        return _StatedAnswer(_marks(words), ALONE, sentence.disagrees)
    return None


def _conclusion(parsed: Sequence[Sentence], options: AnswerOptions) -> _StatedAnswer | None:
    """The option in the last sentence that draws a conclusion and names one option."""
    for sentence in reversed(parsed):
        words = sentence.words
        # The claim ends where a reason, or a relative clause, follows its first option.
        first = re.search(_ONE, words)
        aside = _ASIDE.search(words, first.end()) if first else None
        claim = words[: aside.start()] if aside else words
        named = [letter for letter in dict.fromkeys(_marks(claim)) if letter in options.texts]
        if len(named) == 1 and _CONCLUDES.search(words) and not _HEDGES.search(claim):
            return _StatedAnswer(named, CONCLUDED if f"@{named[0]}" in words else BY_TEXT, sentence.disagrees)
    return None


def _only_option(parsed: Sequence[Sentence], options: AnswerOptions) -> Choice:
    """The only option that is named, by its letter or by its text, or the only one that is not ruled out."""
    firm = [sentence for sentence in parsed if not _HEDGES.search(sentence.words)]
    ruled_out = _marked_by("~", parsed)
    left = options.texts.keys() - ruled_out
    if len(left) == 1:
        return Choice(left.pop(), ELIMINATED)
    by_letter = _marked_by("@", parsed) & options.texts.keys()
    by_letter_left, by_text_left = by_letter - ruled_out, _marked_by("#", firm) - ruled_out
    if len(by_letter_left) > 1:
        return Choice(None, SEVERAL)
    if by_letter_left:
        return Choice(by_letter_left.pop(), ONLY)
    return Choice(by_text_left.pop(), BY_TEXT) if len(by_text_left) == 1 and not by_letter else NO_CHOICE


def _marked_by(mark: str, parsed: Sequence[Sentence]) -> set[str]:
    return {letter for sentence in parsed for letter in re.findall(rf"{mark}([A-Z])\b", sentence.words)}


def _marks(words: str) -> list[str]:
    return re.findall(r"[@#]([A-Z])\b", words)
