r"""A model's text as sentences in which the options are marked.

"Option A is unlikely, so I choose **D. Aortic dissection**" becomes "@A is unlikely , so i choose @D". Letters that
stand for no option (an article, "vitamin D", "E. coli") stay words; an option's text without its letter is marked
``#D``. The rules of `groupwise.usmle.answers` are patterns over these sentences.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

LONGEST_HEAD, LONGEST_TAIL = 4_000, 12_000  # characters of a longer text that are read
LONGEST_OPTION = 12  # words of an option's text that must match

_TAG = re.compile(r"<(?:final_)?(?:answer|choice)>\s{0,9}|</(?:final_)?(?:answer|choice)>", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s?\{\s?(?:\\(?:text|textbf|mathrm|mathbf)\s?\{)?([^{}\n]{0,200})\}{1,2}")
_JSON = re.compile(
    r"[\"'](?:final_?)?(?:answer|choice|option|letter|prediction)(?:_letter)?[\"']\s?:\s?[\"']([^\"'\n]{1,200})[\"']",
    re.IGNORECASE,
)
_BOLD_LETTER = re.compile(r"(?<![\w*])([*_]{1,3}|`)\s?[(\[]?([A-Za-z])[)\].:]{0,2}\s?([*_]{1,3}|`)(?![\w*])")
_QUOTES = re.compile(r"(?<!\w)['‘’]|['‘’](?!\w)")
_MARKUP = re.compile(r"\*{1,3}|__|`{1,3}|~~|[\"“”„«»]")
_QUESTION_AND_ANSWER = re.compile(r"^([ \t]{0,8}Q: .{0,2000}\n+[ \t]{0,8})A: ", re.MULTILINE)
_LINE_MARK = re.compile(r"^[ \t]{0,8}(?:#{1,6}[ \t]|>[ \t]?|[-*•·][ \t]|\d{1,2}[.)][ \t])", re.MULTILINE)
_NEW_QUESTION = re.compile(
    r"^[ \t]{0,8}(?:q:|(?:next |new |another |medical |sample |patient )?"
    r"(?:question|case)(?: \d{1,3})?[ \t]?(?:[:.]|$))",
    re.IGNORECASE | re.MULTILINE,
)
_LISTED_LETTERS = re.compile(r"\(?(?<!\w)[A-J](?:(?:\s?[,/]\s?|\s)(?:or |and )?[A-J](?!\w)){1,99}\)?")
_JUDGES = re.compile(
    r"(?:this|it)(?: \w{1,12}){0,2} (?:is|was|would be) (?:not )?(?:the )?(?:(?:in)?correct|right|wrong|unlikely)\b"
    r"|(?:(?:in)?correct|right|wrong)\s?(?:[:.,!\-–—]|$)",
    re.IGNORECASE,
)
_TICKS = str.maketrans(dict.fromkeys("✅✓✔", " correct ") | dict.fromkeys("❌✗✘", " incorrect "))
# A line with a tick judges the option, so it is not a plain list entry.
_OPTION_LINE = re.compile(r"\s{0,8}\(?([A-J])[).:\-]\s{0,8}([^✅✓✔❌✗✘\n]{1,400})")
_SENTENCE_END = re.compile(r"(?<=[.!?;…])\s+|\n+")


def _set_of(words: str) -> frozenset[str]:
    return frozenset(words.split())


# A letter after one of these words is a name: vitamin D, hepatitis B, group A.
_NAMES_BEFORE = _set_of(
    """vitamin vitamins hepatitis type types group groups class factor protein grade plan stage phase category level
    influenza blood antigen immunoglobulin cyclosporin cyclosporine amphotericin toxin apolipoprotein hemoglobin
    haemoglobin coenzyme kinase herpes subtype variant serotype schedule wing figure table image panel unit ward lead
    complex cytochrome cathepsin receptor wave troponin penicillin tier appendix section part virus pugh apgar score
    interferon cluster strain hemophilia haemophilia neisseria"""
)
# Words that may follow a letter that stands for an option. Before any other lower-case word it is a name or an article.
_AFTER_OPTION = _set_of(
    """is was are were because since as and or nor but would will seems appears fits best correct which due given based
    rather not instead matches explains describes remains can cannot could should may might do does has have over than
    vs versus isn't looks represents refers being makes can't wouldn't doesn't also only then here again in on by from
    therefore thus so if when while whereas although though too alone says suggests indicates out wrong incorrect for
    the after more most likely"""
)
_NOT_BEHIND_ARTICLE = _set_of("for the in on by from also only then best correct due given more most likely")
_LETTER = re.compile(
    r"(?<![0-9A-Za-zÀ-ɏ_\-'’+&.])(?P<open>[(\[{⟦]?)(?P<letter>[A-Za-z])(?P<close>[)\]}⟧]?)(?![0-9A-Za-zÀ-ɏ_'’+&%°]|[-.]\w)"
)
_LETTER_LAST = re.compile(r"(?<!\w)([A-Z])\.$")
_CALLED = re.compile(r"\b(?:option|choice|letter|answer|ans|alternative)\s{0,2}[:#\-–—]?\s{0,2}$", re.IGNORECASE)
_ANSWERS = re.compile(r"\bans(?:wer)?\W{0,5}$", re.IGNORECASE)
_ASKED_FOR = re.compile(r"\b(?:option|choice|answer)\s(?:is|was|would be)\s{1,2}$", re.IGNORECASE)
_SAID = re.compile(r"\s{0,2}(?:$|[.!,;:)\n]|(?:because|since|as|due)\b)")
_IS_CORRECT = re.compile(r"\s(?:is|would be)\s(?:the\s)?(?:correct|right|best|answer)\b")
_WORD_BEFORE = re.compile(r"([\w-]{1,30})\s{0,3}$")
_WORD_AFTER = re.compile(r"[ \t]{1,3}(\w[\w'’-]{0,29})")
_WORD = re.compile(r"[\w'’]+|[:,?=→()⟦⟧/&\-–—]")
_GAP = r"[^\w\n]{0,3}"  # between two words of an option's text
# An option's text is not part of a longer word or number: "5" is not in "0.5", "-5" or "5-10".
_BEGINS, _ENDS = r"(?<!\w)(?<![.,\-–−](?=\d))", r"(?!\w)(?!(?<=\d)[.,\-–]\d)"
_BETWEEN = re.compile(r"(?:[^\S\n]|[.):,\-–—(\[]){0,6}")


@dataclass(frozen=True)
class Sentence:
    """A sentence as words and marks, and whether any of its letters stands beside another option's text."""

    words: str
    disagrees: bool


@dataclass(frozen=True)
class _Mark:
    start: int
    end: int
    letter: str
    by_text: bool
    disagrees: bool = False


class AnswerOptions:
    """The options of a question, compiled for searching."""

    def __init__(self, texts: tuple[tuple[str, str], ...]) -> None:
        self.texts = dict(texts)
        words_of = {letter: _words(text)[:LONGEST_OPTION] for letter, text in texts}
        # A text that is itself a letter of the options is ambiguous: "B" is the option B, whatever A's text is.
        distinct = [
            letter
            for letter, words in words_of.items()
            if words and list(words_of.values()).count(words) == 1 and " ".join(words).upper() not in self.texts
        ]
        longest_first = sorted(distinct, key=lambda letter: -len(" ".join(words_of[letter])))
        parts = [f"(?P<{letter}>{_GAP.join(map(re.escape, words_of[letter]))})" for letter in longest_first]
        self._pattern = re.compile(rf"{_BEGINS}(?:{'|'.join(parts)}){_ENDS}", re.IGNORECASE) if parts else None
        self._openings = {letter: words[0] for letter, words in words_of.items() if words}

    def find(self, text: str) -> Iterator[_Mark]:
        """Where options are named by their texts; of overlapping texts the longest."""
        for match in self._pattern.finditer(text) if self._pattern else ():
            yield _Mark(match.start(), match.end(), str(match.lastgroup), by_text=True)

    def are_listed_in(self, text: str) -> bool:
        """Whether a text names several options by their texts, as a repetition of the question does."""
        return len({mark.letter for mark in self.find(text)}) > 1

    def opens(self, letter: str, word: str) -> bool:
        """Whether an option's text begins with this word."""
        return self._openings.get(letter) == word.casefold()

    def is_text(self, letter: str, text: str) -> bool:
        """Whether a text is the option's, ignoring case and punctuation."""
        return _words(text) == _words(self.texts[letter])


@lru_cache(maxsize=2048)
def options_of(texts: tuple[tuple[str, str], ...]) -> AnswerOptions:
    return AnswerOptions(texts)


def normalise(text: str) -> str:
    r"""The text in plain characters, without markup: ``\boxed{B}`` is ``⟦B⟧``, and a bold letter stands in brackets."""
    # NFKC can turn one character into eighteen, so the text is shortened again.
    text = shortened(unicodedata.normalize("NFKC", text))
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("$", "")
    # A tagged answer is not in the requested form, so it is marked by another word than "answer".
    text = _TAG.sub(lambda tag: "\n" if tag[0].startswith("</") else "\nresponse: ", _JSON.sub(r"response: \1", text))
    text = _QUESTION_AND_ANSWER.sub(r"\1response: ", text)
    text = _BOXED.sub(lambda match: f" boxed ⟦{match[1].strip()}⟧", text)
    text = _QUOTES.sub("", _BOLD_LETTER.sub(r"(\2)", text))
    return _LINE_MARK.sub("", _MARKUP.sub("", text))


def shortened(text: str) -> str:
    """The beginning and the end of a text that is longer than any answer."""
    return text if len(text) <= LONGEST_HEAD + LONGEST_TAIL else f"{text[:LONGEST_HEAD]}\n{text[-LONGEST_TAIL:]}"


def parts_of(text: str) -> list[str]:
    """The text, split where the model makes up another question."""
    starts = [match.start() for match in _NEW_QUESTION.finditer(text)]
    bounds = [0, *starts, len(text)]
    return [part for low, high in pairwise(bounds) if (part := text[low:high]).strip()]


def without_lists(text: str, options: AnswerOptions) -> str:
    """The text without repetitions of the question: "(A, B, C, or D)", and lines that list the options one by one."""

    def listed(match: re.Match[str]) -> str:
        letters = set(re.findall(r"[A-J]", match[0]))
        return " " if letters == options.texts.keys() else match[0]

    lines = _LISTED_LETTERS.sub(listed, text).split("\n")
    kept: list[str] = []
    block: list[tuple[str, str]] = []  # lines that are only a letter and its text

    def close() -> None:
        if len({letter for letter, _ in block}) < 2:
            kept.extend(line for _, line in block)
        block.clear()

    for line in lines:
        letter = _option_line(line, options, cut_off=len(block) > 1 and line == lines[-1])
        if letter is not None:
            block.append((letter, line))
        elif line.strip() or not block:
            close()
            kept.append(line)
    close()
    return "\n".join(kept)


def _option_line(line: str, options: AnswerOptions, *, cut_off: bool) -> str | None:
    match = _OPTION_LINE.fullmatch(line)
    if match is None or match[1] not in options.texts:
        return None
    begun = cut_off and options.texts[match[1]].casefold().startswith(match[2].strip().casefold())
    return match[1] if begun or options.is_text(match[1], match[2]) else None


def sentences(text: str, options: AnswerOptions) -> list[Sentence]:
    """The sentences of a text, in their order."""
    pieces = [piece for piece in _SENTENCE_END.split(text) if piece and piece.strip()]
    pieces = _put_together(pieces, _is_abbreviated)
    pieces = _put_together(pieces, partial(_goes_on, options=options))
    pieces = _put_together(pieces, partial(_is_judged, options=options))
    return [_marked(piece, options) for piece in pieces]


def _put_together(pieces: list[str], belong: Callable[[str, str], bool]) -> list[str]:
    joined: list[str] = []
    for piece in pieces:
        if joined and belong(joined[-1], piece):
            joined[-1] += f" {piece}"
        else:
            joined.append(piece)
    return joined


def _is_abbreviated(before: str, after: str) -> bool:
    """Whether a full stop abbreviates a name, as in "E. coli"."""
    return _LETTER_LAST.search(before[-8:]) is not None and after[0].islower()


def _goes_on(before: str, after: str, options: AnswerOptions) -> bool:
    """Whether the full stop between two pieces belongs to a letter, as in "It is D. Aortic dissection"."""
    letter = _LETTER_LAST.search(before[-8:])
    if letter is None:
        return False
    text = next((mark for mark in options.find(after[:400]) if mark.start <= 2), None)
    if text is None:
        is_its_text = letter[1] in options.texts and options.is_text(letter[1], after)
        return is_its_text or before.strip(" (.") == letter[1]
    return text.letter == letter[1] or not after[text.end :].strip(" .)")


def _is_judged(before: str, after: str, options: AnswerOptions) -> bool:
    """Whether the sentence after a listed option calls it right or wrong."""
    return _JUDGES.match(after) is not None and _option_line(before, options, cut_off=False) is not None


def _marked(text: str, options: AnswerOptions) -> Sentence:
    text = text.translate(_TICKS)
    marks = _joined(text, sorted([*options.find(text), *_letters(text, options)], key=lambda mark: mark.start))
    words: list[str] = []
    at = 0
    for mark in marks:
        words += _WORD.findall(text[at : mark.start])
        words.append(f"{'#' if mark.by_text else '@'}{mark.letter}")
        at = mark.end
    words += _WORD.findall(text[at:])
    line = " ".join(word if word[0] in "@#" else word.lower().replace("’", "'") for word in words)
    return Sentence(re.sub(r"\b(?:option|choice|alternative) (?=@)", "", line), any(mark.disagrees for mark in marks))


def _joined(text: str, marks: list[_Mark]) -> list[_Mark]:
    """Join a letter and the option's text beside it into one mark, with the letter if they disagree."""
    joined: list[_Mark] = []
    for mark in marks:
        last = joined[-1] if joined else None
        if last is not None and mark.start < last.end:
            continue  # a letter inside an option's text
        apart = last is None or not _BETWEEN.fullmatch(text[last.end : mark.start])
        if last is None or apart or last.by_text == mark.by_text or (last.by_text and text[mark.start] not in "(["):
            joined.append(mark)
        else:
            letter = mark.letter if last.by_text else last.letter
            joined[-1] = _Mark(last.start, mark.end, letter, False, last.letter != mark.letter)
    return joined


def _letters(text: str, options: AnswerOptions) -> Iterator[_Mark]:
    """The letters that may stand for options, including letters beyond the options."""
    for match in _LETTER.finditer(text):
        before, after = text[max(0, match.start() - 40) : match.start()], text[match.end() : match.end() + 60]
        called = bool(match["open"] and match["close"]) or _CALLED.search(before) is not None
        letter = match["letter"].upper()
        if before.endswith(("N/", "n/")):
            continue
        if match["letter"].islower() and not called:
            alone = not text[: match.start()].strip() and not text[match.end() :].strip(" .:)\n")
            if not alone and not _is_said(before, after):
                continue
        is_no_option = _is_an_article if called else _is_a_name
        if match["close"] or not is_no_option(letter, before, after, options):
            yield _Mark(match.start(), match.end(), letter, by_text=False)


def _is_said(before: str, after: str) -> bool:
    """Whether a lower-case letter is called the answer: "the answer is b because", "b is correct"."""
    return bool((_ASKED_FOR.search(before) and _SAID.match(after)) or _IS_CORRECT.match(after))


def _is_an_article(letter: str, before: str, after: str, options: AnswerOptions) -> bool:
    """Whether an A after "Answer:" begins a sentence: "Answer: A 45-year-old man has"."""
    following = _WORD_AFTER.match(after)
    if letter != "A" or following is None or _ANSWERS.search(before) is None or options.opens(letter, following[1]):
        return False
    return not following[1][0].isupper() and following[1] not in _AFTER_OPTION


def _is_a_name(letter: str, before: str, after: str, options: AnswerOptions) -> bool:
    """Whether a bare letter is part of a name (vitamin D, E. coli, B cells), an article or a pronoun."""
    word = _WORD_BEFORE.search(before)
    if word and word[1].lower() in _NAMES_BEFORE:
        return True
    stop = after.startswith(".")
    following = _WORD_AFTER.match(after[1:] if stop else after)
    if following is None or options.opens(letter, following[1]):
        return False
    next_word = following[1]
    if stop:
        return next_word.islower() and next_word not in _AFTER_OPTION
    if letter == "I":
        return next_word.lower() not in ("is", "because", "since")
    if letter == "A":
        return next_word not in _AFTER_OPTION or next_word in _NOT_BEHIND_ARTICLE
    return next_word.lower() not in _AFTER_OPTION


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+(?:['’][^\W_]+)?|[↑↓<>≥≤+%]+|-(?=[\d.])", unicodedata.normalize("NFKC", text).casefold())
