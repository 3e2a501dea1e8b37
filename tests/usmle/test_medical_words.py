"""Medical words: the packaged list, the tool that makes it, and the words of a text."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import DataError
from groupwise.usmle import medical_words
from groupwise.usmle.medical_words import load_medical_vocabulary
from groupwise.usmle.medical_words import medical_terms as iterate_terms

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
ORDINARY = (
    "gsm8k_train.jsonl",
    "creative_prompts.jsonl",
    "llamafactory_dpo_en_demo.json",
    "hh_harmless_base_test.jsonl.gz",
)
LIST = Path(medical_words.__file__).parent / "medical_words.txt"


def run_tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "medical_words.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


MEDICAL_WORDS = {
    "abscess", "anemia", "aneurysm", "antibiotic", "aorta", "appendicitis", "aspirin", "asthma", "biopsy",
    "cancer", "cirrhosis", "creatinine", "diabetes", "diuretic", "dyspnea", "electrocardiogram", "embolism",
    "epilepsy", "femur", "hemoglobin", "hepatitis", "hypertension", "infarction", "insulin", "ischemia",
    "lisinopril", "lupus", "malaria", "mastectomy", "melanoma", "meningitis", "metformin", "myocardial",
    "neutropenia", "pancreas", "penicillin", "pneumonia", "pneumothorax", "sarcoidosis", "sepsis",
    "tachycardia", "thyroid", "troponin", "tuberculosis", "tumour", "ulcer", "warfarin",
}  # fmt: skip
ORDINARY_WORDS = {
    "abnormal", "above", "accident", "answer", "baseball", "because", "between", "bicycle", "blood", "correct",
    "crocodile", "diagnosis", "dormitory", "encounter", "family", "following", "guardian", "history",
    "hospital", "initial", "kitchen", "likely", "medicine", "nightmare", "option", "other", "patient",
    "physician", "prune", "question", "railway", "reversal", "scooter", "specified", "stroller", "subsequent",
    "symptom", "therefore", "treatment", "unspecified", "volcanic", "water",
}  # fmt: skip


def test_the_list_has_medical_words_and_no_ordinary_ones():
    vocabulary = load_medical_vocabulary()
    assert MEDICAL_WORDS - vocabulary == set()
    assert ORDINARY_WORDS & vocabulary == set()


def test_the_list_is_sorted_and_cached():
    lines = LIST.read_text(encoding="utf-8").splitlines()
    words = [line for line in lines if not line.startswith("#")]
    assert lines[0].startswith("#")
    assert "public domain" in lines[0]
    assert words == sorted(set(words))
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)
    assert load_medical_vocabulary() == set(words)
    assert load_medical_vocabulary() is load_medical_vocabulary()


@pytest.mark.slow
@pytest.mark.skipif(
    not all((DATA / name).exists() for name in ("icd10cm_words.txt", *ORDINARY)),
    reason="the texts that the list is made from are not available",
)
def test_the_list_is_what_the_tool_makes(tmp_path):
    made = tmp_path / "medical_words.txt"
    done = run_tool(DATA / "icd10cm_words.txt", "--ordinary", *(DATA / name for name in ORDINARY), "--out", made)
    assert done.returncode == 0, done.stderr
    assert made.read_bytes() == LIST.read_bytes()


def test_words_that_the_tool_leaves_out(tmp_path):
    icd = tmp_path / "icd.txt"
    icd.write_text(
        "bicycle\nonceseen\nzebritis\nzebritises\nfoot\nunspecified\nprunes\npackaged\nspread\nlumposis\nlinebroken\n"
    )
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"text": "Bicycles; a BICYCLE. Onceseen. Lumposis twice: lumposises."}\n{"text": "spread"}\n')
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(b'"packaged packaged spread linebroken\\nlinebroken"'))
    out = tmp_path / "out.txt"
    done = run_tool(icd, "--ordinary", plain, packed, "--out", out)
    assert done.returncode == 0, done.stderr
    text = out.read_text(encoding="utf-8")
    words = [line for line in text.splitlines() if not line.startswith("#")]
    assert {"onceseen", "zebritis", "lisinopril", "tachycardic"} <= set(words)
    ordinary = {"bicycle", "packaged", "spread", "lumposis", "linebroken"}
    short, general, plural = {"foot"}, {"unspecified", "prunes"}, {"zebritises"}
    assert not (ordinary | short | general | plural) & set(words)
    assert words == sorted(words)
    assert "icd.txt --ordinary plain.jsonl packed.gz --out out.txt" in text
    assert str(tmp_path) not in text
    assert f"{len(words)} words in" in done.stdout.replace(",", "")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("none.txt", None),
        ("latin.txt", b"\xe9\xff"),
        ("cut.gz", gzip.compress(b"words", mtime=0)[:-6]),
        ("no.gz", b"words"),
    ],
)
def test_the_tool_reports_files_that_it_cannot_read(tmp_path, name, content):
    icd, text = tmp_path / "icd.txt", tmp_path / name
    icd.write_text("zebritis\n")
    if content is not None:
        text.write_bytes(content)
    done = run_tool(icd, "--ordinary", text, "--out", tmp_path / "out.txt")
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def medical_terms(text, *vocabulary):
    """The distinct terms, in the order of their first use."""
    return list(dict.fromkeys(iterate_terms(text, *vocabulary)))


VOCABULARY = frozenset({"abscess", "aspirin", "ulcer", "tabes", "ménière", "virus"})


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("", []),
        ("nothing of the kind", []),
        ("An ulcer, then aspirin, then an ulcer.", ["ulcer", "aspirin"]),
        ("ASPIRIN Aspirin aspirin", ["aspirin"]),
        ("Ulcers and abscesses; an ulcer", ["ulcer", "abscess"]),
        ("viruses", ["virus"]),
        ("tabes is no plural of tab", ["tabes"]),
        ("tab tabe ulcerss ulcered peptulcer", []),
        ("non-ulcer/aspirin", ["ulcer", "aspirin"]),
        ("the ulcer's edge", ["ulcer"]),
        ("**ulcer** _aspirin_", ["ulcer", "aspirin"]),
        ("ulcer2 2ulcer ulcer² 3virus4", []),
        ("MÉNIÈRE's disease", ["ménière"]),
        ("ulceré", []),
        ("s es", []),
    ],
)
def test_terms(text, terms):
    assert medical_terms(text, VOCABULARY) == terms


def test_terms_of_the_packaged_list():
    text = "Troponins are raised: this is acute myocardial infarction. Give aspirin, and no antibiotics."
    assert medical_terms(text) == ["troponin", "acute", "myocardial", "infarction", "aspirin", "antibiotic"]
    assert medical_terms("Janet sells 16 - 3 - 4 = 9 duck eggs a day, so the answer is 18.") == []


def test_an_empty_vocabulary():
    assert medical_terms("ulcer and aspirin", frozenset()) == []


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("a" * 1_000_000, []),
        ("a" * 1_000_000 + "1", []),
        pytest.param("s" * 1_000_000, [], marks=pytest.mark.slow),
        pytest.param("es " * 333_333, [], marks=pytest.mark.slow),
        pytest.param("_" * 1_000_000, [], marks=pytest.mark.slow),
        ("ulcer1" * 166_666, []),
        ("ulcer " * 166_666, ["ulcer"]),
        pytest.param("\u0130\u0301" * 500_000, [], marks=pytest.mark.slow),
        ("\0\ud800" * 500_000 + " ulcer", ["ulcer"]),
    ],
)
def test_a_megabyte_is_read_in_linear_time(text, terms):
    assert medical_terms(text, VOCABULARY) == terms


@given(st.lists(st.sampled_from(["ulcer", "Aspirins", "ABSCESSES", "x", "ulcers2", "the"])))
def test_the_terms_of_a_text_are_those_of_its_words(words):
    meaning = {"ulcer": "ulcer", "Aspirins": "aspirin", "ABSCESSES": "abscess"}
    assert medical_terms(" ".join(words), VOCABULARY) == list(dict.fromkeys(meaning[w] for w in words if w in meaning))


def test_a_vocabulary_from_a_file(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("\ufeff# mine\nUlcer\n\n  aspirin  # a drug\nulcer\nflu\n", encoding="utf-8")
    assert load_medical_vocabulary(path) == {"ulcer", "aspirin", "flu"}


def test_a_home_folder(tmp_path, monkeypatch):
    (tmp_path / "words.txt").write_text("ulcer\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_medical_vocabulary("~/words.txt") == {"ulcer"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no words"),
        (b"# only a comment\n\n", "has no words"),
        (b"\x89PNG\r\n\x1a\n\xff", "is not a text in UTF-8"),
        (b"ulcer\n\0\0\0\n", r"line 2 .* is '\\x00\\x00\\x00', which is not a single word of letters"),
        (
            b"ulcer\n\nmyocardial infarction\n",
            r"line 3 .* is 'myocardial infarction'.* each word of a phrase on its own line",
        ),
        (b"b12\n", r"line 1 .* is 'b12'"),
    ],
)
def test_invalid_files(tmp_path, content, message):
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        load_medical_vocabulary(path)
    assert str(path) in str(error.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"none\.txt cannot be read: No such file"):
        load_medical_vocabulary(tmp_path / "none.txt")
    with pytest.raises(DataError, match=r"cannot be read: .* is a folder, not a file"):
        load_medical_vocabulary(tmp_path)
