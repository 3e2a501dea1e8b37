"""Preference pairs as token ids, and pairs that are left out or truncated."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from groupwise.data import Pair, PairBuilder, PromptBuilder, Row
from groupwise.errors import ConfigError, DataError
from groupwise.model.tiny import tiny_tokenizer
from tests.weights import smollm2

START, END = 257, 258  # the tiny tokenizer's; its other tokens are bytes


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def turns(*messages):
    return [
        token for message in messages for token in (START, *f"{message['role']}\n{message['content']}".encode(), END)
    ]


def asked(*messages):
    """The ids of a prompt: the messages, then the beginning of the assistant's turn."""
    return (*turns(*messages), START, *b"assistant\n")


def said(*messages):
    """The ids of an answer, without the beginning of its first turn."""
    return tuple(turns(*messages)[1 + len("assistant\n") :])


def ended(text):
    return (*text.encode(), END)


def tiny(template=None):
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer.chat_template = template or None
    return tokenizer


@cache
def smol():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2()))


TOKENIZERS = {"tiny": tiny, "smollm2": smol}


def build(*rows, chat=None, **options):
    return PairBuilder(PromptBuilder(tiny(), chat=chat), **options).build(rows)


YES, NO = assistant("Yes."), assistant("No.")
TALK = [user("Hi"), assistant("Hello"), user("Why?")]
TEXTS = {"prompt": "Why?", "chosen": "Yes.", "rejected": "No."}
PAIR = Pair(asked(user("Why?")), said(YES), said(NO))


def test_texts_become_messages_if_there_is_a_template():
    assert build(TEXTS) == [PAIR]
    assert build(TEXTS, chat=True) == [PAIR]
    assert build({"question": "Why?", "a": "Yes.", "b": "No."}, prompt="question", chosen="a", rejected="b") == [PAIR]


def test_plain_texts():
    row = {"prompt": "größer", "chosen": " ja", "rejected": "\nnein"}
    expected = [Pair(tuple("größer".encode()), ended(" ja"), ended("\nnein"))]
    assert build(row, chat=False) == expected
    assert PairBuilder(PromptBuilder(tiny(""))).build([row]) == expected
    assert build({**row, "chosen": " ja<|end|>"}, chat=False) == expected  # EOS is not added twice


def test_several_messages_are_an_answer():
    row = {"prompt": TALK, "chosen": [YES, user("So?"), NO], "rejected": NO}
    assert build(row) == [Pair(asked(*TALK), said(YES, user("So?"), NO), said(NO))]


def test_formats_may_be_mixed():
    rows = [
        TEXTS,
        {"prompt": TALK, "chosen": YES, "rejected": [NO]},
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes.", "rejected": "\n\nHuman: Hi\n\nAssistant: No."},
        {"input": "Why?", "output_1": "No.", "output_2": "Yes.", "label": 2},
    ]
    talk = Pair(asked(*TALK), said(YES), said(NO))
    assert build(*rows) == [PAIR, talk, Pair(asked(user("Hi")), said(YES), said(NO)), PAIR]
    raw = Pair(tuple(b"Why?"), ended("Yes."), ended("No."))
    dialogue = Pair(tuple(b"\n\nHuman: Hi\n\nAssistant:"), ended(" Yes."), ended(" No."))
    assert build(*rows, chat=False) == [raw, talk, dialogue, raw]


def test_the_system_prompt_comes_first():
    chat = [system("Be long."), user("Why?")]
    rows = [TEXTS, {"prompt": chat, "chosen": YES, "rejected": NO}]
    added, kept = PairBuilder(PromptBuilder(tiny(), system_prompt="Be brief.")).build(rows)
    assert added == Pair(asked(system("Be brief."), user("Why?")), said(YES), said(NO))
    assert kept == Pair(asked(*chat), said(YES), said(NO))
    with pytest.raises(ConfigError, match="system_prompt is a chat message, but these prompts are plain texts"):
        PairBuilder(PromptBuilder(tiny(), system_prompt="S", chat=False)).build([TEXTS])
    silent = tiny("{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(ConfigError, match="ignores system messages, so the model would never see system_prompt"):
        PairBuilder(PromptBuilder(silent, system_prompt="S")).build([TEXTS])
    strict = tiny(
        "{% if messages[0]['role'] == 'system' and not add_generation_prompt %}{{ raise_exception('No') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match=r"rejects system messages \(No\); leave system_prompt out"):
        PairBuilder(PromptBuilder(strict, system_prompt="S")).build([TEXTS])


def test_chat_template_kwargs_apply_to_answers():
    template = "{% for m in messages %}{{ m['content'] + ('!' if loud else '') }}{% endfor %}"
    prompts = PromptBuilder(tiny(template), chat_template_kwargs={"loud": True})
    assert PairBuilder(prompts).build([TEXTS]) == [Pair(tuple(b"Why?!"), tuple(b"Yes.!"), tuple(b"No.!"))]


def test_the_rows_are_left_as_they_were():
    row = {"prompt": list(TALK), "chosen": dict(YES), "rejected": [dict(NO)]}
    PairBuilder(PromptBuilder(tiny(), system_prompt="S")).build([row])
    assert row == {"prompt": TALK, "chosen": YES, "rejected": [NO]}


def test_refused_rows_are_counted():
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        TEXTS,
        {"prompt": "a", "chosen": "", "rejected": "c"},
        {"prompt": TALK, "chosen": YES, "rejected": assistant(" ")},
        {"prompt": TALK, "chosen": [YES], "rejected": "Yes."},
        {"prompt": TALK, "chosen": YES, "rejected": NO},
        {"chosen": "the same", "rejected": "the same"},
        {"prompt": "a", "chosen": "b", "rejected": "d" * 999},
    ]
    builder = PairBuilder(PromptBuilder(tiny()), max_length=200)
    assert builder.build(rows) == [PAIR, Pair(asked(*TALK), said(YES), said(NO))]
    assert builder.kept == (1, 5)
    assert builder.refused == {"same_answer": 3, "no_answer": 2, "too_long": 1}
    builder.build([TEXTS])
    assert builder.kept == (0,)
    assert builder.refused == {"same_answer": 0, "no_answer": 0, "too_long": 0}


def test_no_pairs_left():
    rows = [{"prompt": "ab", "chosen": "c", "rejected": "c"}, {"prompt": "ab", "chosen": "", "rejected": "c"}]
    with pytest.raises(DataError, match=r"^no pair is left of 2 rows: 1 with equal answers, 1 with an empty answer$"):
        build(*rows)
    with pytest.raises(
        DataError, match=r"^no pair is left of 1 rows: 1 with too many tokens; raise max_length, which is 3$"
    ):
        build(TEXTS, max_length=3)
    with pytest.raises(DataError, match=r"^there are no rows$"):
        build()


LENGTHS = [
    {"prompt": "ab", "chosen": "cd", "rejected": "e"},  # 5 tokens with the end
    {"prompt": "ab", "chosen": "c", "rejected": "defg"},  # 7
    {"prompt": "ab", "chosen": "cdef", "rejected": "cdegh"},  # 8; alike in the first five
    {"prompt": "abcde", "chosen": "f", "rejected": "g"},  # 7; five of them are the prompt
]


def test_too_long_is_dropped_and_counted():
    builder = PairBuilder(PromptBuilder(tiny(), chat=False), max_length=5)
    assert builder.build(LENGTHS) == [Pair((97, 98), ended("cd"), ended("e"))]
    assert (builder.kept, builder.refused["too_long"]) == ((0,), 3)
    builder = PairBuilder(PromptBuilder(tiny(), chat=False), max_length=7)
    assert len(builder.build(LENGTHS)) == 3
    assert builder.kept == (0, 1, 3)


def test_too_long_is_truncated_at_the_end():
    builder = PairBuilder(PromptBuilder(tiny(), chat=False), max_length=5, on_too_long="truncate")
    complete, truncated = builder.build(LENGTHS)
    assert complete == Pair((97, 98), ended("cd"), ended("e"))
    assert truncated == Pair((97, 98), ended("c"), tuple(b"def"))
    assert builder.kept == (0, 1)
    # The answers of the third pair become equal, and the fourth has no room for an answer.
    assert builder.refused == {"same_answer": 1, "no_answer": 0, "too_long": 1}


def test_too_long_is_an_error():
    same = {"prompt": "ab", "chosen": "c" * 99, "rejected": "c" * 99}  # is left out anyway
    assert len(build(same, LENGTHS[0], chat=False, max_length=5, on_too_long="error")) == 1
    with pytest.raises(
        DataError,
        match=r"^row 2: the prompt and the longer answer have 7 tokens, more than max_length=5; raise max_length, "
        r"or use on_too_long='drop' or 'truncate'$",
    ):
        build(*LENGTHS[:2], chat=False, max_length=5, on_too_long="error")
    with pytest.raises(DataError, match=r"^row 2: .* \(3 pairs are too long, the longest has 8\); raise max_length"):
        build(*LENGTHS, chat=False, max_length=5, on_too_long="error")


def test_the_prompt_limit_does_not_apply_to_pairs():
    assert PairBuilder(PromptBuilder(tiny(), max_prompt_length=1, on_too_long="truncate")).build([TEXTS]) == [PAIR]


def test_prompt_tokens_that_change_belong_to_the_answer():
    space, colon = ({"prompt": f"The sky is{end}", "chosen": "blue", "rejected": "4"} for end in " :")
    builder = PairBuilder(PromptBuilder(smol(), chat=False))
    pair, other = builder.build([space, colon])
    decoded = [smol().decode(ids) for ids in (pair.prompt, pair.chosen, pair.rejected)]
    assert decoded == ["The sky is", " blue<|im_end|>", " 4<|im_end|>"]
    assert smol().decode(other.prompt) == "The sky is:"
    assert builder.retokenised == 1
    builder.build([colon])
    assert builder.retokenised == 0
    # Both answers have the same prompt, even if only one of them changes its tokens.
    for answers in ((" blue", "land"), ("land", " blue")):
        row = dict(zip(("prompt", "chosen", "rejected"), ("The sky is", *answers), strict=True))
        (pair,) = builder.build([row])
        assert [smol().decode(ids) for ids in (pair.prompt, pair.chosen, pair.rejected)] == [
            "The sky",
            *(f" is{answer}<|im_end|>" for answer in answers),
        ]
    # A template whose generation prompt differs from the beginning of an answer, as for some reasoning models.
    thinking = tiny(tiny().chat_template.replace("assistant\\n' -}}{%- endif", "assistant\\n?' -}}{%- endif"))
    builder = PairBuilder(PromptBuilder(thinking))
    assert builder.build([TEXTS]) == [PAIR]
    assert builder.retokenised == 1


def test_a_prompt_whose_tokens_all_change():
    with pytest.raises(
        DataError,
        match=r"^row 1: all tokens of the prompt change when an answer follows; end it with a complete word",
    ):
        PairBuilder(PromptBuilder(smol(), chat=False)).build([{"prompt": "hou", "chosen": "se", "rejected": "r"}])
    silent = tiny("{% for m in messages if m['role'] == 'assistant' %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(DataError, match=r"^row 1: the prompt has no tokens"):
        PairBuilder(PromptBuilder(silent)).build([TEXTS])


def test_an_answer_that_a_template_ignores():
    deaf = tiny("{% for m in messages if m['content'] != 'No.' %}{{ m['content'] }}{% endfor %}")
    builder = PairBuilder(PromptBuilder(deaf))
    assert builder.build([TEXTS, {**TEXTS, "rejected": "n"}]) == [Pair(tuple(b"Why?"), tuple(b"Yes."), tuple(b"n"))]
    assert builder.refused["no_answer"] == 1


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": TALK, "chosen": "a", "rejected": "b"}, "prompt"),
        ({"conversations": TALK, "chosen": YES, "rejected": NO}, "conversations"),
        ({"prompt": "a", "chosen": YES, "rejected": NO}, "chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": NO}, "rejected"),
    ],
)
def test_messages_without_a_template(row, column):
    with pytest.raises(
        DataError, match=f"the column '{column}' holds messages, but the tokenizer has no chat template"
    ):
        PairBuilder(PromptBuilder(tiny(""))).build([row])


def test_texts_without_eos():
    tokenizer = tiny("")
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="the tokenizer has no EOS token"):
        PairBuilder(PromptBuilder(tokenizer)).build([TEXTS])


def test_errors_name_the_row():
    with pytest.raises(DataError, match=r"^row 2 has no column 'chosen'"):
        build(TEXTS, {})
    template = "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}{{ messages[-1]['content'] }}"
    rows = [Row(TEXTS, "a, line 1"), Row({"prompt": "b", "chosen": [YES, YES], "rejected": NO}, "a, line 2")]
    with pytest.raises(DataError, match=r"^a, line 2: the tokenizer's chat template rejects these messages: too"):
        PairBuilder(PromptBuilder(tiny(template))).build(rows)


CHARACTERS = st.characters(categories=["L", "N", "P", "Zs"], max_codepoint=0x17F) | st.sampled_from("\n\t€日本🙂")
TEXT = st.text(CHARACTERS, min_size=1, max_size=20).filter(str.strip)


@pytest.mark.parametrize("name", ["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("chat", [True, False])
@given(prompt=TEXT, chosen=TEXT, rejected=TEXT)
def test_pairs_decode_to_their_texts(name, chat, prompt, chosen, rejected):
    assume(chosen != rejected)
    tokenizer = TOKENIZERS[name]()
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    try:
        (pair,) = PairBuilder(PromptBuilder(tokenizer, chat=chat)).build([row])
    except DataError as error:
        assume("all tokens of the prompt change" not in str(error))
        raise
    assert pair.prompt
    for answer, ids in ((chosen, pair.chosen), (rejected, pair.rejected)):
        text = prompt + answer + tokenizer.eos_token
        if chat:
            text = tokenizer.apply_chat_template([user(prompt), assistant(answer)], tokenize=False)
        assert ids
        assert tokenizer.decode([*pair.prompt, *ids], clean_up_tokenization_spaces=False) == text
