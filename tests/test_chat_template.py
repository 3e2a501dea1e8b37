"""Chat templates in their process: the texts of transformers, and limits of time, memory and output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from groupwise import chat_template
from groupwise.chat_template import KNOWN, TemplateError, chat_ids, render_chats
from groupwise.data.prompts import PromptBuilder
from groupwise.errors import DataError
from groupwise.model.tiny import tiny_tokenizer
from groupwise.model.weights import cached

CHATS = [
    [
        {"role": "system", "content": "Be <b>brief</b> &"},
        {"role": "user", "content": "Wie geht's? \u2028 \x07 🙂"},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b "},
        {"role": "user", "content": "c"},
    ],
]
# The features that real templates use: loops with break, namespaces, macros, tests, filters, tools and dates.
LARGE = """
{%- set ns = namespace(found=false) -%}
{%- macro show(m) -%}{{ '<|start|>' ~ m.role ~ '\\n' ~ (m['content'] | trim) ~ eos_token }}{%- endmacro -%}
{%- if tools %}{{ tools | tojson(indent=2) }}{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif -%}
{%- for message in messages[::-1] -%}
  {%- if message.role == 'user' and not ns.found -%}{%- set ns.found = true -%}{{ loop.index0 }}{%- break -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages %}{{ show(message) }}{% if message.thinking is defined %}{{ message.thinking }}{% endif %}
{% endfor -%}
{%- generation %}{{ dict(a=1, b=[1, 2.5, none, true]) | tojson }}{% endgeneration -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% if enable_thinking is false %}<no>{% endif %}{% endif -%}
"""


def tokenizer_with(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return city


@pytest.mark.parametrize(
    "options",
    [{}, {"add_generation_prompt": True, "enable_thinking": False, "tools": [weather]}],
    ids=["plain", "more"],
)
def test_texts_and_ids_are_those_of_transformers(options):
    tokenizer = tokenizer_with(LARGE)
    texts = render_chats(tokenizer, CHATS, **options)
    assert texts == tokenizer.apply_chat_template(CHATS, tokenize=False, **options)
    assert chat_ids(tokenizer, CHATS, **options) == tokenizer.apply_chat_template(CHATS, **options)["input_ids"]
    assert "weather" in texts[0] or not options


def test_templates_of_the_catalogue_are_rendered_alike_here_and_there(monkeypatch):
    from transformers import AutoTokenizer

    tokenizers = [tiny_tokenizer()]
    for name in ("smollm2-135m", "qwen2.5-coder-1.5b"):
        if (folder := cached(name)) is not None:  # not fetched for this
            tokenizers.append(AutoTokenizer.from_pretrained(str(folder)))
    here = [render_chats(tokenizer, CHATS, add_generation_prompt=True) for tokenizer in tokenizers]
    monkeypatch.setattr(chat_template, "KNOWN", frozenset())
    assert here == [render_chats(tokenizer, CHATS, add_generation_prompt=True) for tokenizer in tokenizers]


def test_the_templates_of_the_catalogue_are_known():
    import hashlib

    templates = [tiny_tokenizer().chat_template]
    for name in ("smollm2-135m", "qwen2.5-coder-1.5b"):
        if (folder := cached(name)) is not None:
            templates.append((folder / "chat_template.jinja").read_text())
    assert {hashlib.sha256(template.encode()).hexdigest() for template in templates} <= KNOWN


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 'a' * 10**10 }}", "1 GiB of memory"),
        ("{% for i in range(999) %}{{ 'a' * 5000 }}{% endfor %}", "makes a text of 4,995,000 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "nested too deeply"),
        (
            "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "(1 GiB of memory|CPU time)",
        ),
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}{% endfor %}{% endfor %}"
            "{% endfor %}",
            r"more than 0\.5 s of CPU time",
        ),
    ],
    ids=["memory", "output", "recursion", "nesting", "doubling", "time"],
)
def test_a_template_that_takes_too_much_is_stopped_and_names_the_row(template, problem, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.5)
    rows = [{"prompt": "fine"}, {"prompt": "bad"}]
    template = "{% if messages[0].content == 'bad' %}" + template + "{% else %}a{% endif %}"
    with pytest.raises(DataError, match=rf"row [12].*chat template .*{problem}.*another model"):
        PromptBuilder(tokenizer_with(template)).build(rows)
    assert render_chats(tokenizer_with("{{ 1 + 1 }}"), CHATS) == ["2", "2"]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.x.y }}", "has no attribute"),
        ("{{ ().__class__.__bases__ }}", "unsafe"),
        ("{% for %}", "Expected"),
        ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_fails_gives_its_reason(template, problem):
    with pytest.raises(TemplateError, match=problem) as caught:
        render_chats(tokenizer_with("{% if messages | length == 3 %}" + template + "{% endif %}"), CHATS)
    assert caught.value.row in (0, 1)
    assert not caught.value.is_limit


def test_a_process_that_was_killed_is_started_again():
    tokenizer = tokenizer_with("{{ messages[0].content }}")
    assert len(render_chats(tokenizer, CHATS)) == 2
    os.kill(chat_template._WORKER._process.pid, signal.SIGKILL)
    with pytest.raises(TemplateError, match="was killed"):
        render_chats(tokenizer, CHATS)
    assert len(render_chats(tokenizer, CHATS)) == 2


PARENT = """
import os, sys, time
from groupwise.chat_template import _WORKER, render_chats
from groupwise.model.tiny import tiny_tokenizer
tokenizer = tiny_tokenizer()
tokenizer.chat_template = "{{ messages[0].content }}"
render_chats(tokenizer, [[{"role": "user", "content": "a"}]])
print(_WORKER._process.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_the_process_ends_with_its_parent(sent):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as parent:
        worker = int(parent.stdout.readline())
        parent.send_signal(sent)
        parent.wait(60)
    state = Path(f"/proc/{worker}/stat")
    for _ in range(600):
        if not state.exists() or state.read_text().rpartition(") ")[2].startswith("Z"):  # nobody waits for it
            return
        time.sleep(0.1)
    pytest.fail("the process still runs")
