"""Chat templates: programs of a small grammar, and real templates with something wrong in them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise import chat_template
from groupwise.data.prompts import PromptBuilder
from groupwise.model.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tests.fuzz import accepted, many
from tests.fuzz.mutate import JUNK

TOKENIZER = tiny_tokenizer()
ROWS = [{"prompt": "ab"}, {"prompt": "c" * 100}]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|start|>system' }}"
    "{% endif %}{{'<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)

NAMES = st.sampled_from(["messages", "message", "x", "ns.x", "loop", "eos_token", "self", "cycler", "undefined_name"])
NUMBERS = st.sampled_from(["0", "3", "9**9", "10**6", "-1", "99999", "1e308"])
TEXTS = st.sampled_from(["'a'", "''", "'\\x00'", "'\\x1b[2J'", "'%s'", "'{0.__class__}'"])
FILTERS = st.sampled_from(
    ["upper", "length", "list", "tojson", "center(9**9)", "batch(2)", "join(',')", "replace('a','aaaa')",
     "map('upper')", "sum", "sort", "random", "wordwrap(1)", "indent(9**9)", "format(1)", "first",
     "attr('__class__')", "xmlattr"]
)  # fmt: skip


def expressions(depth: int = 2) -> st.SearchStrategy[str]:
    atoms = st.one_of(NAMES, NUMBERS, TEXTS)
    if not depth:
        return atoms
    inner = expressions(depth - 1)
    return st.one_of(
        atoms,
        st.tuples(inner, st.sampled_from(["*", "+", "~", "**", "%", "//", "in", "and", "=="]), inner).map(
            lambda parts: f"({' '.join(parts)})"
        ),
        st.tuples(inner, FILTERS).map(lambda parts: f"({parts[0]})|{parts[1]}"),
        st.tuples(inner, inner).map(lambda parts: f"({parts[0]})[{parts[1]}]"),
        inner.map(lambda part: f"range({part})"),
        inner.map(lambda part: f"raise_exception({part})"),
        inner.map(lambda part: f"[{part}] * {part}"),
        inner.map(lambda part: f"({part}).__class__.__mro__"),
    )


def templates(depth: int = 2) -> st.SearchStrategy[str]:
    prints = expressions().map(lambda part: f"{{{{ {part} }}}}")
    texts = st.sampled_from(["text", "{%", "}}", "\x00", "{# comment #}", "{% generation %}a{% endgeneration %}"])
    if not depth:
        return st.one_of(prints, texts)
    inner = templates(depth - 1)
    return st.one_of(
        prints,
        texts,
        st.lists(inner, max_size=3).map("".join),
        st.tuples(expressions(), inner).map(lambda p: f"{{% for x in {p[0]} %}}{p[1]}{{% endfor %}}"),
        st.tuples(expressions(), inner).map(lambda p: f"{{% if {p[0]} %}}{p[1]}{{% endif %}}"),
        expressions().map(lambda p: f"{{% set x = {p} %}}"),
        inner.map(lambda p: f"{{% set ns = namespace(x='a') %}}{p}{{% set ns.x = ns.x ~ ns.x %}}"),
        inner.map(lambda p: f"{{% macro f(x) %}}{p}{{{{ f(x) }}}}{{% endmacro %}}{{{{ f(1) }}}}"),
    )


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)


def build(template: Any, **options: Any) -> Any:
    TOKENIZER.chat_template = template
    prompts = PromptBuilder(TOKENIZER, **options).build(ROWS)
    assert sum(len(prompt.text) for prompt in prompts) < 2**20
    return prompts


@many(2)
@given(templates())
def test_programs(template):
    accepted("chat templates", lambda: build(template))


@many(3)
@given(st.data())
def test_damaged_templates(data):
    template = data.draw(st.sampled_from([CHAT_TEMPLATE, CHATML]))
    at = data.draw(st.integers(0, len(template)))
    insert = data.draw(st.one_of(expressions(), st.sampled_from(["{{", "%}", "{% endfor %}", "'", "\ud800"])))
    template = template[:at] + insert + template[at + data.draw(st.integers(0, 10)) :]
    accepted("chat templates", lambda: build(template))


@given(JUNK, st.dictionaries(st.sampled_from(["tools", "documents", "x", "messages", "chat_template"]), JUNK))
def test_templates_and_variables_of_any_type(template, options):
    accepted("chat templates", lambda: build(template, chat_template_kwargs=options))


def test_the_process_answers_after_everything():
    assert build(CHATML)[0].text.startswith("<|start|>system<|start|>user\nab")
