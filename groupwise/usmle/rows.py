"""Multiple-choice questions in one format, from the formats of the public data sets. Invalid questions are refused.

- MedQA: options {A: …} or [{key, value}]; answer_idx, a letter; answer, its text
- MedMCQA: opa, opb, opc, opd; cop, 1 to 4 in the original files, 0 to 3 on the hub
- MMLU: A, B, C, D in a .csv without a header, choices on the hub; answer, a letter or a number from 0
"""

from __future__ import annotations

import csv
import io
import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from groupwise import data
from groupwise.config import Recipe
from groupwise.data.read import is_local
from groupwise.data.rows import list_columns
from groupwise.errors import DataError
from groupwise.paths import MEGABYTE, is_file, is_folder, user_path
from groupwise.tasks.base import TaskRow
from groupwise.tasks.rows import hold_out, read_both

SAMPLE, SAMPLE_HELD_OUT = "usmle_sample.jsonl", 16
LETTERS = "ABCDEFGHIJ"
MMLU_COLUMNS = ("question", "A", "B", "C", "D", "answer")
MEDMCQA_OPTIONS = ("opa", "opb", "opc", "opd")
# Columns that are read; all others go into the row's metadata.
READ_COLUMNS = {
    "question", "options", "answer", "answer_idx", "explanation", "exp", "category", "subject_name", "subject",
    "step", "meta_info", "id", "choices", "cop", *MEDMCQA_OPTIONS, *LETTERS,
}  # fmt: skip


def read_questions(recipe: Recipe, skipped: Counter[str] | None) -> tuple[list[TaskRow], list[TaskRow]]:
    """The training and the held-out questions that ``[data]`` names.

    ``skipped`` counts the invalid questions that are left out, by reason; with None an invalid one is an error.
    """

    def read(source: str, **options: Any) -> list[TaskRow]:
        return _valid(_read(source, **options), skipped)

    return read_both(recipe, read)


def sample_questions(recipe: Recipe) -> tuple[list[TaskRow], list[TaskRow]]:
    """The packaged sample. Its last 16 questions are held out, unless the recipe draws others."""
    text = (resources.files("groupwise.usmle") / SAMPLE).read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    rows = [question_of(data.Row(values, f"{SAMPLE}, line {at}")) for at, values in enumerate(lines, start=1)]
    settings = recipe.data
    if settings.held_out_from_train:
        train, held_out = hold_out(rows[: settings.train_rows], settings.held_out_from_train, recipe.train.seed)
    else:
        train, held_out = rows[:-SAMPLE_HELD_OUT][: settings.train_rows], rows[-SAMPLE_HELD_OUT:]
    return train, held_out[: settings.held_out_rows]


def question_of(row: Mapping[str, Any]) -> TaskRow:
    """A row in the task's format; a `DataError` that names the row's file and line if it is not a valid question."""
    where = data.where_of(row, 0)
    if "question" not in row:
        raise DataError(f"{where}: there is no column 'question' (there are {list_columns(row)})")
    question = row["question"]
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{where}: the question is empty")
    options = _options(row, where)
    parsed: TaskRow = {
        "question": question.strip(),
        "options": options,
        "answer": _answer(row, options, where),
        "explanation": _text(row, "explanation", "exp"),
        "category": _text(row, "category", "subject_name", "subject"),
        "step": _text(row, "step", "meta_info"),
        "id": _text(row, "id"),
        "metadata": {name: value for name, value in row.items() if name not in READ_COLUMNS},
    }
    return data.Row(parsed, where)


def _read(source: str, *, split: str | None, subset: str | None, limit: int | None) -> list[dict[str, Any]]:
    """`data.read_rows`, also for MMLU's files, which have no header and the subject in their name."""
    path = user_path(source)
    if is_folder(path, DataError) and (files := sorted(path.glob("[!.]*.csv"))) and all(map(_has_no_header, files)):
        rows = [row for file in files for row in _read(str(file), split=split, subset=subset, limit=limit)]
        return rows[:limit]
    header = MMLU_COLUMNS if _has_no_header(path) else None
    rows = data.read_rows(source, split=split, subset=subset, limit=limit, header=header)
    if header is not None:
        subject = re.sub(r"^mmlu_|_(?:test|dev|val)$", "", path.stem).replace("_", " ")
        return [data.Row({**row, "subject": subject}, data.where_of(row, 0)) for row in rows]
    on_hub = not is_local(source)
    # A few rows do not show whether a file counts from 0 or from 1.
    all_rows = rows if on_hub or limit is None or "cop" not in rows[0] else data.read_rows(source)
    return _counted_from_one(rows, all_rows, on_hub=on_hub)


def _has_no_header(path: Path) -> bool:
    if path.suffix.lower() != ".csv" or not is_file(path, DataError):
        return False
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            fields = next(csv.reader(io.StringIO(file.read(MEGABYTE), newline="")), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return False  # reading the file gives the error
    names = {field.strip().casefold() for field in fields}
    return len(fields) == len(MMLU_COLUMNS) and fields[-1].strip() in set("ABCD") and not names & {"question", "answer"}


def _counted_from_one(
    rows: list[dict[str, Any]], all_rows: Sequence[Mapping[str, Any]], *, on_hub: bool
) -> list[dict[str, Any]]:
    """MedMCQA's ``cop`` counted from 1, as in the original files. The hub, and files saved from it, count from 0.

    A 0 anywhere in ``all_rows`` means counting from 0, a 4 means counting from 1.
    """
    numbers = {cop for row in all_rows if isinstance(cop := _cop(row), int)}
    if 0 in numbers and 4 in numbers:
        where = next(data.where_of(row, 0) for row in all_rows if _cop(row) == 4)
        raise DataError(f"{where}: cop is 4, but other rows have cop 0; it counts either from 0 or from 1, not both")
    if 0 not in numbers and (4 in numbers or not on_hub):
        return rows
    # -1 marks a row without a right answer in both.
    return [
        data.Row({**row, "cop": cop + 1}, data.where_of(row, 0))
        if isinstance(cop := _cop(row), int) and cop >= 0
        else row
        for row in rows
    ]


def _cop(row: Mapping[str, Any]) -> Any:
    """The number of MedMCQA's right option, which is a text in a .csv file."""
    cop = row.get("cop")
    return int(cop) if isinstance(cop, str) and re.fullmatch(r"-?[0-9]{1,9}", cop.strip()) else cop


def _valid(rows: Sequence[Mapping[str, Any]], skipped: Counter[str] | None) -> list[TaskRow]:
    questions: list[TaskRow] = []
    first_error: DataError | None = None
    for row in rows:
        try:
            questions.append(question_of(row))
        except DataError as error:
            if skipped is None:
                raise DataError(f"{error}; correct the row, or set task_options.bad_rows = 'skip'") from error
            first_error = first_error or error
            skipped[str(error).removeprefix(f"{data.where_of(row, 0)}: ").split(" (")[0]] += 1
    if first_error is not None and not questions:
        raise DataError(f"{first_error}; none of the {len(rows)} rows is a valid question") from first_error
    return questions


def _options(row: Mapping[str, Any], where: str) -> dict[str, str]:
    column: Any = row.get("options")
    is_list = isinstance(column, Sequence) and not isinstance(column, str)
    if isinstance(column, Mapping):
        pairs = [(letter, text) for letter, text in column.items() if text is not None]  # Arrow fills with nulls
    elif is_list and all(isinstance(option, Mapping) for option in column):
        pairs = [(option.get("key"), option.get("value")) for option in column]
    else:
        texts = column if is_list else row.get("choices")
        if texts is None:
            names = MEDMCQA_OPTIONS if MEDMCQA_OPTIONS[0] in row else [name for name in LETTERS if name in row]
            texts = [row.get(name) for name in names]
        pairs = list(zip(string.ascii_uppercase, texts, strict=False))
    return check_options(pairs, where)


def check_options(pairs: Sequence[tuple[Any, Any]], where: str) -> dict[str, str]:
    """Options by letter, in order; a `DataError` if there are too few or too many, or if one is empty or repeated."""
    if not 2 <= len(pairs) <= len(LETTERS):
        raise DataError(f"{where}: a question needs 2 to 10 options (it has {len(pairs)})")
    options: dict[str, str] = {}
    for letter, text in pairs:
        if not isinstance(letter, str) or letter not in set(LETTERS) or letter in options:
            raise DataError(f"{where}: options need distinct letters from A to J (got {letter!r})")
        if not isinstance(text, (str, int, float)) or not str(text).strip():
            raise DataError(f"{where}: an option is empty ({letter})")
        options[letter] = str(text).strip()
    plain = [" ".join(text.casefold().split()) for text in options.values()]
    double = next((text for text in plain if plain.count(text) > 1), None)
    if double is not None:
        raise DataError(f"{where}: two options are the same ({double!r})")
    return dict(sorted(options.items()))


def _answer(row: Mapping[str, Any], options: Mapping[str, str], where: str) -> str:
    if "cop" in row:
        value = _cop(row)
        letter = _letter(value - 1, options) if isinstance(value, int) else None
    else:
        value = row["answer_idx"] if row.get("answer_idx") is not None else row.get("answer")
        letter = _letter(value, options)
    if letter is None:
        raise DataError(f"{where}: the answer is none of the options (got {value!r}, options {', '.join(options)})")
    # In MedQA the answer is the option's text, which may itself be a letter: a place in a picture.
    answer = row.get("answer")
    if "cop" not in row and answer != options[letter] and _letter(answer, options) not in (None, letter):
        raise DataError(f"{where}: answer_idx and answer are different options ({value!r} and {answer!r})")
    return letter


def _letter(value: Any, options: Mapping[str, str]) -> str | None:
    """The letter of an option that is given by its letter, by its number from 0, or by its text."""
    if value is None:
        return None  # not the option "None"
    if isinstance(value, int) and not isinstance(value, bool):
        letter = LETTERS[value] if 0 <= value < len(LETTERS) else ""
        return letter if letter in options else None
    text = str(value).strip()
    if text in options:
        return text
    return next((letter for letter, option in options.items() if option == text), None)


def _text(row: Mapping[str, Any], *names: str) -> str | None:
    """The first of these columns that is not empty, as a text."""
    values = [str(row[name]).strip() for name in names if row.get(name) is not None]
    return next((value for value in values if value), None)
