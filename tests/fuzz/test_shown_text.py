"""Texts that are shown: in a terminal, in Markdown, in CSV files and in pictures."""

from __future__ import annotations

import csv
import html.parser
import io
import unicodedata
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from huggingface_hub import ModelCardData
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from groupwise.plots import new_figure, plain_label, save_figure
from groupwise.redaction import hide_secrets
from groupwise.rundir import write_csv
from groupwise.terminal import make_console, write_text
from groupwise.text import code_span, encodable, escape_markdown, markdown_table, one_line, printable
from groupwise.training.store.model_card import base_model
from tests.fuzz import many, tried
from tests.fuzz.texts import broken_text

JOINED = "\u200c\u200d"
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def hidden(text: str) -> list[str]:
    """The characters of a text that a terminal obeys or does not show, but for joiners and variation selectors."""
    flags = ("eng", "sct", "wls")
    for name in flags:
        text = text.replace("🏴" + "".join(chr(0xE0000 + ord(letter)) for letter in f"gb{name}\x7f"), "")
    return [
        letter
        for letter in text
        if letter not in "\n\t"
        and letter not in JOINED
        and (unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.category(letter) == "Cf")
        and letter not in "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
        and not "\U00013430" <= letter <= "\U0001345f"  # format controls of Egyptian hieroglyphs, which are shown
    ]


@many(20)
@given(broken_text())
def test_printable_text_has_nothing_that_a_terminal_obeys_or_hides(text):
    tried("texts on a terminal")
    shown = printable(text)
    assert hidden(shown) == []
    assert printable(shown) == shown
    assert "\n" not in one_line(text)
    visible = [letter for letter in hide_secrets(text) if unicodedata.category(letter)[0] in "LNPS"]
    assert [letter for letter in visible if letter not in shown] == []


@many(5)
@given(broken_text(), st.sampled_from(["utf-8", "ascii", "latin-1", "cp1252"]))
def test_any_text_can_be_written_to_any_stream(text, encoding):
    tried("texts on a terminal")
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    write_text(text, stream)
    make_console(stream, width=40).print(text, soft_wrap=True)
    written = stream.buffer.getvalue().decode(encoding)
    assert hidden(written) == []
    assert encodable(written, encoding) == written


def rendered(markdown: str) -> tuple[list[str], str]:
    """The tags of a page as a browser sees them, and its text."""

    class Page(html.parser.HTMLParser):
        tags: list[str] = []  # noqa: RUF012 - replaced below
        text = ""

        def handle_starttag(self, tag: str, attributes: object) -> None:
            self.tags.append(tag)

        def handle_data(self, data: str) -> None:
            self.text += data

    page = Page()
    page.tags = []
    page.feed(MARKDOWN.render(markdown))
    page.close()
    return page.tags, page.text


@many(10)
@given(broken_text(), broken_text())
def test_markdown_shows_the_text_and_nothing_else(first, second):
    tried("texts in Markdown")
    cells = [escape_markdown(first), escape_markdown(second), "end"]
    tags, text = rendered(markdown_table(["a", "b", "c"], [cells]))
    assert set(tags) <= {"table", "thead", "tbody", "tr", "th", "td"}
    assert tags.count("td") == 3
    assert " ".join(text.split()) == " ".join(f"a b c {one_line(first)} {one_line(second)} end".split())
    tags, text = rendered(f"# {escape_markdown(first)}\n\n- x: {code_span(second)}\n")
    assert set(tags) <= {"h1", "ul", "li", "code"}
    assert " ".join(text.split()) == " ".join(f"{one_line(first)} x: {one_line(second)}".split())


@many(10)
@given(st.lists(broken_text(), min_size=1, max_size=4))
@example(["\r"])
@example(["+1\n", "-1 "])
def test_a_csv_file_is_read_as_it_was_written_and_has_no_formula(texts):
    tried("texts in CSV files")
    row = {f"{place}{text}": text for place, text in enumerate(texts)} | {"number": -1.5}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        write_csv(path, [row])
        with open(path, newline="", encoding="utf-8") as file:
            _, cells = csv.reader(file, strict=True)
    *read, number = cells
    assert number == "-1.5"
    for cell, text in zip(read, texts, strict=True):
        assert hidden(cell) == []
        if cell.startswith(("=", "+", "-", "@", "\t", "\n")):
            float(cell)
        else:
            assert cell.removeprefix("'") == printable(text).removeprefix("'") or cell == printable(text)


@many(5)
@given(broken_text())
def test_the_front_matter_of_a_card_is_one_block(name):
    tried("names in model cards")
    source = f"owner/{name}"
    block = ModelCardData(library_name="transformers", **base_model(source)).to_yaml()
    assert yaml.safe_load(block)["base_model"] == one_line(source)
    assert "---" not in block.splitlines()


@settings(max_examples=settings().max_examples // 8 + 1)
@given(st.lists(broken_text(4), min_size=1, max_size=3))
def test_any_name_can_stand_in_a_picture(names):
    tried("names in pictures")
    figure = new_figure()
    axes = figure.add_subplot()
    for name in names:
        axes.plot([0, 1], [0, 1], label=plain_label(f"{name} (1 run)"))
    axes.set_title(plain_label(names[0]))
    axes.legend()
    with TemporaryDirectory() as folder:
        save_figure(figure, Path(folder) / "picture.png")
