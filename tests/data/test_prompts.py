"""Prompts as token ids, and prompts that are invalid, too long, dropped or truncated."""

from __future__ import annotations

import pytest

from groupwise.data import Prompt, PromptBuilder, Row, completion_for_reward, read_rows, reward_inputs
from groupwise.data import prompts as prompts_module
from groupwise.errors import ConfigError, DataError
from groupwise.model.tiny import tiny_tokenizer
from tests.weights import smollm2

START, END = 257, 258  # the tiny tokenizer's; its other tokens are bytes
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Why?"}
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '<|start|>' + m['content'] }}{% endfor %}"
)
SILENT = "{% for m in messages if m['role'] != 'system' %}{{ '<|start|>' + m['content'] }}{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


def tiny(template=None):
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer.chat_template = template or None
    return tokenizer


def rows_of(*prompts):
    return [Row({"prompt": prompt}, f"q.jsonl, line {number}") for number, prompt in enumerate(prompts, start=1)]


def turn(role, text):
    return [START, *f"{role}\n{text}".encode(), END]


@pytest.fixture(scope="module")
def smol():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2()))


def test_a_text_becomes_a_user_message_if_there_is_a_template():
    ids = [*turn("user", "größer?"), START, *b"assistant\n"]
    text = "<|start|>user\ngrößer?<|end|><|start|>assistant\n"
    expected = Prompt(tuple(ids), text)
    assert PromptBuilder(tiny()).build(rows_of("größer?")) == [expected]
    assert PromptBuilder(tiny(), chat=True).build([{"prompt": "größer?"}]) == [expected]


def test_a_plain_text():
    expected = Prompt(tuple("größer?".encode()), "größer?")
    assert PromptBuilder(tiny(), chat=False).build(rows_of("größer?")) == [expected]
    assert PromptBuilder(tiny(template="")).build(rows_of("größer?")) == [expected]


def test_messages_are_rendered_whatever_chat_is():
    ids = (*turn("system", "Be brief."), *turn("user", "Why?"), START, *b"assistant\n")
    for chat in (None, True, False):
        (prompt,) = PromptBuilder(tiny(), chat=chat).build(rows_of([SYSTEM, USER]))
        assert prompt.ids == ids


def test_the_last_message_may_be_empty_if_something_follows():
    rows = [{"prompt": [{"role": "user", "content": " "}]}]
    with pytest.raises(DataError, match="is empty"):
        PromptBuilder(tiny_tokenizer()).build(rows)
    (prompt,) = PromptBuilder(tiny_tokenizer(), may_be_empty=True).build(rows)
    assert prompt.text == "<|start|>user\n <|end|><|start|>assistant\n"


def test_another_column():
    (prompt,) = PromptBuilder(tiny(), chat=False).build([{"question": "ab", "prompt": 3}], column="question")
    assert prompt.ids == (97, 98)


def test_the_system_prompt_comes_first():
    builder = PromptBuilder(tiny(), system_prompt="Be brief.")
    row = [{"role": "system", "content": "Be long."}, USER]
    with_ours, with_rows = builder.build(rows_of([USER], row))
    assert with_ours.text == "<|start|>system\nBe brief.<|end|><|start|>user\nWhy?<|end|><|start|>assistant\n"
    assert with_rows.text == "<|start|>system\nBe long.<|end|><|start|>user\nWhy?<|end|><|start|>assistant\n"
    (wrapped,) = builder.build(rows_of("Why?"))
    assert wrapped == with_ours


def test_the_rows_are_left_as_they_were():
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None}
    rows = rows_of([message])
    (prompt,) = PromptBuilder(tiny(), system_prompt="S").build(rows)
    assert prompt.text == "<|start|>system\nS<|end|><|start|>user\nab<|end|><|start|>assistant\n"
    assert rows == [{"prompt": [message]}]
    assert len(message) == 3


def test_chat_template_kwargs():
    template = "{{ '<|start|>' + messages[0]['content'] + ('!' if loud else '') }}"
    for settings, text in (({}, "<|start|>Why?"), ({"loud": True}, "<|start|>Why?!")):
        (prompt,) = PromptBuilder(tiny(template), chat_template_kwargs=settings).build(rows_of([USER]))
        assert prompt.text == text
    (prompt,) = PromptBuilder(tiny(""), chat_template_kwargs={"chat_template": template}).build(rows_of("Why?"))
    assert prompt.text == "<|start|>Why?"


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "padding", "return_tensors", "return_dict"])
def test_reserved_chat_template_kwargs(name):
    with pytest.raises(ConfigError, match=rf"chat_template_kwargs may not set {name}; remove it"):
        PromptBuilder(tiny(), chat_template_kwargs={name: True, "loud": 1})


def test_a_real_tokenizer(smol):
    assistant = "<|im_start|>assistant\n"
    (prompt,) = PromptBuilder(smol, system_prompt="Be brief.").build(rows_of("Größe?"))
    assert prompt.text == f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGröße?<|im_end|>\n{assistant}"
    assert prompt.ids == tuple(smol.encode(prompt.text, add_special_tokens=False))
    assert prompt.ids[:2] == (1, smol.convert_tokens_to_ids("system"))
    (raw,) = PromptBuilder(smol, chat=False).build(rows_of("Hello world, a . b"))
    assert raw == Prompt(tuple(smol("Hello world, a . b")["input_ids"]), "Hello world, a . b")


def test_prompts_do_not_depend_on_the_batch(smol, monkeypatch):
    monkeypatch.setattr(prompts_module, "CHUNK", 10)
    for tokenizer in (smol, tiny()):
        for chat in (True, False):
            builder = PromptBuilder(tokenizer, chat=chat)
            texts = [f"What is {n} times {n * n}?" * (1 + n % 3) for n in range(23)]
            together = builder.build(rows_of(*texts))
            assert [prompt for text in texts for prompt in builder.build(rows_of(text))] == together
            assert [texts[n] in together[n].text for n in range(23)] == [True] * 23
            assert (builder.dropped, builder.kept) == (0, (0,))


class Counting:
    """The tiny tokenizer; counts the prompts of each call."""

    def __init__(self):
        self.real = tiny()
        self.calls = []

    def __call__(self, texts):
        self.calls.append(len(texts))
        return self.real(texts)

    def apply_chat_template(self, chats, **options):
        self.calls.append(len(chats))
        return self.real.apply_chat_template(chats, **options)

    def __getattr__(self, name):
        return getattr(self.real, name)


@pytest.mark.parametrize("chat", [True, False])
def test_the_tokenizer_is_called_with_a_thousand_prompts(chat):
    tokenizer = Counting()
    assert len(PromptBuilder(tokenizer, chat=chat).build(rows_of(*["a"] * 2300))) == 2300
    assert tokenizer.calls == [1000, 1000, 300]


def test_messages_from_a_file(tmp_path):
    """Arrow adds nulls for missing keys; templates must not see them."""
    import pyarrow as pa
    from pyarrow import parquet

    template = (
        "{% for m in messages %}{{ m['content'] }}{% if 'name' in m %}{{ m['name'] + '!' }}{% endif %}{% endfor %}"
    )
    rows = [{"prompt": [{"role": "system", "content": "a", "name": "N"}, {"role": "user", "content": "b"}]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "q.parquet")
    (prompt,) = PromptBuilder(tiny(template)).build(read_rows(tmp_path / "q.parquet"))
    assert prompt.text == "aN!b"


def test_too_long_is_an_error():
    builder = PromptBuilder(tiny(), chat=False, max_prompt_length=4)
    assert len(builder.build(rows_of("abcd", "abc"))) == 2
    with pytest.raises(
        DataError,
        match=r"^q.jsonl, line 2: the prompt has 5 tokens, more than max_prompt_length=4; raise max_prompt_length, or "
        r"use on_too_long='drop'$",
    ):
        builder.build(rows_of("abcd", "abcde"))
    with pytest.raises(DataError, match=r"has 5 tokens.* \(2 prompts are too long, the longest has 7\); raise"):
        builder.build(rows_of("abcde", "abcdefg", "a"))


def test_too_long_is_dropped_and_counted():
    builder = PromptBuilder(tiny(), chat=False, max_prompt_length=4, on_too_long="drop")
    prompts = builder.build(rows_of("abcde", "abcd", "abcdef", "a"))
    assert [prompt.text for prompt in prompts] == ["abcd", "a"]
    assert (builder.dropped, builder.kept) == (2, (1, 3))
    builder.build(rows_of("a"))
    assert (builder.dropped, builder.kept) == (0, (0,))
    with pytest.raises(
        DataError, match=r"every prompt has more than max_prompt_length=4 tokens \(the shortest has 5\)"
    ):
        builder.build(rows_of("abcdef", "abcde"))
    (prompt,) = PromptBuilder(tiny(), max_prompt_length=23, on_too_long="drop").build(rows_of("a", "longer"))
    assert len(prompt.ids) == 19  # three special tokens, "user\n" and "assistant\n" beside the text; the other has 24


def test_too_long_is_truncated():
    builder = PromptBuilder(tiny(), chat=False, max_prompt_length=4, on_too_long="truncate")
    prompts = builder.build(rows_of("abcdef", "abcd", "a"))
    assert [(prompt.ids, prompt.text) for prompt in prompts] == [
        ((99, 100, 101, 102), "cdef"),
        ((97, 98, 99, 100), "abcd"),
        ((97,), "a"),
    ]
    assert builder.dropped == 0


def test_a_chat_prompt_is_not_truncated():
    with pytest.raises(ConfigError, match="on_too_long='truncate' would remove the first tokens of a chat prompt"):
        PromptBuilder(tiny(), max_prompt_length=4, on_too_long="truncate").build(rows_of("a"))
    with pytest.raises(ConfigError, match="use 'drop' or 'error'"):
        PromptBuilder(tiny(), chat=False, max_prompt_length=4, on_too_long="truncate").build(rows_of([USER]))
    assert (
        len(PromptBuilder(tiny(), on_too_long="truncate").build(rows_of("a"))) == 1
    )  # no limit, so nothing is truncated


def test_invalid_settings():
    for prompt in ("\ud83d", 5):
        with pytest.raises(ConfigError, match="system_prompt must be a text without lone surrogates, or None, got"):
            PromptBuilder(tiny(), system_prompt=prompt)


def test_without_a_template():
    with pytest.raises(ConfigError, match="chat=True, but the tokenizer has no chat template; use chat=False"):
        PromptBuilder(tiny(""), chat=True)
    with pytest.raises(DataError, match="the column 'prompt' holds messages, but the tokenizer has no chat template"):
        PromptBuilder(tiny("")).build(rows_of([USER]))


def test_a_system_prompt_needs_the_chat_template():
    with pytest.raises(ConfigError, match="these prompts are plain texts; use chat=True, or write it into the"):
        PromptBuilder(tiny(), chat=False, system_prompt="S").build(rows_of("a"))
    with pytest.raises(ConfigError, match="plain texts; choose a model with a chat template, or write it"):
        PromptBuilder(tiny(""), system_prompt="S").build(rows_of("a"))
    assert (
        PromptBuilder(tiny(), chat=False, system_prompt="S")
        .build(rows_of([USER]))[0]
        .text.startswith("<|start|>system\nS<|end|>")
    )


def test_a_template_that_rejects_system_messages():
    assert len(PromptBuilder(tiny(NO_SYSTEM)).build(rows_of("a"))) == 1
    with pytest.raises(
        ConfigError, match=r"rejects system messages \(System role not supported\); leave system_prompt out, or"
    ):
        PromptBuilder(tiny(NO_SYSTEM), system_prompt="S").build(rows_of("a", "b"))
    with pytest.raises(DataError, match=r"^q.jsonl, line 2: .* rejects these messages: System role not supported"):
        PromptBuilder(tiny(NO_SYSTEM)).build(rows_of([USER], [SYSTEM, USER]))


def test_a_template_that_ignores_system_messages():
    row = [{"role": "system", "content": "own"}, USER]
    assert len(PromptBuilder(tiny(SILENT)).build(rows_of(row))) == 1
    for rows in (rows_of("a"), rows_of(row, [USER])):
        with pytest.raises(ConfigError, match=r"ignores system messages, so the model would never see system_prompt"):
            PromptBuilder(tiny(SILENT), system_prompt="S").build(rows)


def test_the_templates_default_system_message(smol):
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    plain = PromptBuilder(smol).build(rows_of("a"))
    assert default in plain[0].text
    same = PromptBuilder(smol, system_prompt=default).build(rows_of("a"))
    assert same[0].ids == plain[0].ids
    nothing = PromptBuilder(smol, system_prompt="").build(rows_of("a"))
    assert nothing[0].text.startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user")


def test_errors_name_the_row_that_a_template_rejects():
    answer = {"role": "assistant", "content": "Because."}
    rows = rows_of([USER], [USER, answer, USER], [USER, USER])
    with pytest.raises(DataError, match=r"^q.jsonl, line 3: .*rejects these messages: roles must alternate$"):
        PromptBuilder(tiny(ALTERNATING)).build(rows)
    with pytest.raises(DataError, match=r"^q.jsonl, line 3: .*: roles must alternate"):
        PromptBuilder(tiny(ALTERNATING)).build([*rows_of([USER]) * 1002, rows[2]])
    with pytest.raises(DataError, match=r"^q.jsonl, line 1: .*rejects these messages: "):
        PromptBuilder(tiny("{{ messages[0].nothing.at_all }}")).build(rows)


def test_no_tokens_at_all():
    silent = tiny("{% if messages[0]['content'] != 'b' %}{{ messages[0]['content'] }}{% endif %}")
    with pytest.raises(DataError, match=r"^q.jsonl, line 2: the prompt has no tokens"):
        PromptBuilder(silent).build(rows_of("a", "b"))


def test_invalid_rows_are_found_first():
    with pytest.raises(DataError, match=r"^q.jsonl, line 2: the prompt is empty"):
        PromptBuilder(tiny()).build(rows_of("a", ""))
    with pytest.raises(DataError, match=r"^q.jsonl, line 1: the prompt contains a lone surrogate"):
        PromptBuilder(tiny(), chat=False).build(rows_of("\udc80"))
    with pytest.raises(DataError, match="there are no rows"):
        PromptBuilder(tiny()).build([])


def test_completions_for_rewards():
    assert completion_for_reward([USER], "Because.") == [{"role": "assistant", "content": "Because."}]
    assert completion_for_reward("Why?", "Because.") == "Because."


def test_what_rewards_take():
    rows = [{"q": "Why?", "answer": 1}, {"q": [USER], "level": 2}]
    prompts, completions, columns = reward_inputs(rows, ["a", "b"], "q")
    assert prompts == ["Why?", [USER]]
    assert completions == ["a", [{"role": "assistant", "content": "b"}]]
    assert columns == {"answer": [1, None], "level": [None, 2]}
    with pytest.raises(ValueError, match="zip"):
        reward_inputs(rows, ["a"], "q")
