"""The Markdown summary, read by a real parser: tables and code stay what they are whatever texts a run has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from groupwise.analysis.run_reader import RunReader
from groupwise.analysis.summary import summarize
from groupwise.text import printable
from groupwise.viewer.markdown import fenced, format_number, run_markdown
from tests.analysis.written_runs import sample, write_run

PARSER = MarkdownIt("commonmark").enable("table")
HOSTILE = [
    "```\n# not a heading\n````\n| a | b |\n|--|--|\n| 1 | 2 |",
    "<script>alert(1)</script> & [link](javascript:alert(1)) ![x](http://example.org/x.png)",
    "~~~\nindented\n    code\n~~~~\n\n---\n* list",
    "zero\u200bwidth \x1b[31mred\x1b[0m \u202eright to left",
]


def tables(text):
    """Each table as rows of cells, in which markup is resolved."""
    found, row = [], []
    for token in PARSER.parse(text):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            row = []
        elif token.type == "inline" and found and token.level > 2:
            row.append("".join(child.content for child in token.children))
        elif token.type == "tr_close":
            found[-1].append(row)
    return found


def accuracy(value):
    return {"accuracy": value, "accuracy_low": value - 0.1, "accuracy_high": value + 0.1}


def answers(rights):
    return [
        {
            "row": row,
            "sample": 0,
            "prompt": HOSTILE[0],
            "completion": HOSTILE[1],
            "completion_tokens": 2,
            "stop_reason": "eos",
            "grade/accuracy": right,
        }
        for row, right in enumerate(rights)
    ]


@pytest.fixture
def page(tmp_path):
    rollouts = [sample(number, 0, number / 4, prompt=text, completion=text) for number, text in enumerate(HOSTILE)]
    steps = [{"reward": 0.25, "a|b`c": 1.0, "step_time": 2.0, "time/generate": 1.0}, {"reward": 0.75, "step_time": 2.0}]
    folder = write_run(
        tmp_path / "a|b *c* <d>",
        settings={"loss": {"kl_coef": 0.3}, "run": {"name": "x"}, "sampling": {"stop": ["|", "`", "<b>"]}},
        steps=steps,
        rollouts={2: rollouts},
        evaluations={0: accuracy(0.2), 2: accuracy(0.6)},
        answers={0: answers([True, False, False]), 2: answers([True, True, True])},
    )
    return run_markdown(summarize(RunReader(folder)))


def test_tables_by_hand(page):
    found = {table[0][0]: table for table in tables(page)}
    assert {len(row) for row in found["held out"]} == {3}
    assert found["held out"][1] == ["accuracy", "20.0 % [10.0 %, 30.0 %] (step 0)", "60.0 % [50.0 %, 70.0 %] (step 2)"]
    assert ["reward", "0.25", "0.75", "0.25 (step 1)", "0.75 (step 2)"] in found["metric"]
    assert found["stage"][1:] == [["generate", "1 s", "25.0 %"]]
    settings = {row[0]: row[1:] for row in found["setting"][1:]}
    assert settings["loss.kl_coef"] == ["0.3", "0.0"]
    assert settings["sampling.stop"] == ["['|', '`', '<b>']", "[]"]
    assert "The same 3 questions after step 0 and after step 2: 2 better, 0 worse, 1 as before." in page
    assert "McNemar's test gives p = 0.500." in page


def test_hostile_texts_are_code_and_nothing_else(page):
    tokens = PARSER.parse(page)
    code = [token.content.removesuffix("\n") for token in tokens if token.type == "fence"]
    for text in HOSTILE:
        assert printable(text) in code
    kinds = {token.type for token in tokens} | {child.type for token in tokens for child in token.children or ()}
    assert not kinds & {"html_block", "html_inline", "link_open", "image", "hr", "bullet_list_open", "code_block"}
    headings = [tokens[place + 1].content for place, token in enumerate(tokens) if token.type == "heading_open"]
    assert headings[0] == r"a\|b \*c\* \<d\>"
    assert not any("not a heading" in heading for heading in headings)


def test_what_could_not_be_read_is_listed(tmp_path):
    folder = write_run(tmp_path / "run", steps=[{"reward": 0.1}], rollouts={1: [sample(0, 0, 1.0)]}, finished=False)
    (folder / "rollouts" / "step-000001.parquet").write_bytes(b"PAR1")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("{damaged\n")
    text = run_markdown(summarize(RunReader(folder)))
    assert "## What could not be read" in text
    assert "line 2" in text
    assert "step-000001.parquet" in text
    assert "; the run is stopped." in text


@given(st.text(alphabet=st.sampled_from("`~ab\n |<#\\\t\r\x00\u2028"), max_size=40))
def test_a_fence_holds_any_text(text):
    (token,) = PARSER.parse(fenced(text, 1000))
    assert token.type == "fence"
    assert token.content == f"{printable(text)}\n"


def test_long_texts_are_cut_in_the_middle():
    shown = fenced("a" * 900 + "b" * 900, 600)
    assert "1,200 characters left out" in shown
    assert shown.count("a") > 390  # and those of the sentence
    assert shown.rstrip("`\n").endswith("b" * 200)


def test_number_formats():
    values = {0.23833: "0.2383", 1204.0: "1,204", 1204.56: "1,204.6", 1.5e-5: "1.5e-05", -0.5: "-0.5", 0.0: "0"}
    assert {value: format_number(value) for value in values} == values
