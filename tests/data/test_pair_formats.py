"""Every format of a preference row, the split of texts without a prompt, and invalid rows."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from groupwise.data.pair_formats import Preference, PreferenceReader
from groupwise.errors import DataError


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def read(row, chat=True, columns=("prompt", "chosen", "rejected")):
    return PreferenceReader(*columns, chat).read(row, "p.jsonl, line 7")


YES, NO, WHY = assistant("Yes."), assistant("No."), user("Why?")
TALK = [user("Hi"), assistant("Hello"), WHY]
BAR = {"input": "Why?", "output_1": "Yes.", "output_2": "No."}

# the format, the row, and its messages: prompt, chosen, rejected
FORMATS = [
    ("texts", {"prompt": "Why?", "chosen": "Yes.", "rejected": "No."}, [WHY], [YES], [NO]),
    ("messages", {"prompt": TALK, "chosen": [YES], "rejected": [NO]}, TALK, [YES], [NO]),
    ("messages in tuples", {"prompt": tuple(TALK), "chosen": (YES,), "rejected": (NO,)}, TALK, [YES], [NO]),
    ("one message", {"prompt": TALK, "chosen": YES, "rejected": NO}, TALK, [YES], [NO]),
    ("messages and texts", {"prompt": TALK, "chosen": "Yes.", "rejected": "No."}, TALK, [YES], [NO]),
    ("messages and a text", {"prompt": TALK, "chosen": [YES], "rejected": "No."}, TALK, [YES], [NO]),
    ("a text and messages", {"prompt": "Why?", "chosen": [YES], "rejected": NO}, [WHY], [YES], [NO]),
    (
        "an answer of several messages",
        {"prompt": "Hi", "chosen": [YES, WHY, NO], "rejected": "No."},
        [user("Hi")],
        [YES, WHY, NO],
        [NO],
    ),
    (
        "content in parts, and nulls",
        {
            "prompt": [{"role": "user", "content": [{"type": "text", "text": "Why?"}], "name": None}],
            "chosen": [{**YES, "name": None}],
            "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "No."}]}],
        },
        [WHY],
        [YES],
        [NO],
    ),
    ("no prompt", {"chosen": [*TALK, YES], "rejected": [*TALK, NO]}, TALK, [YES], [NO]),
    ("a null as prompt", {"prompt": None, "chosen": [*TALK, YES], "rejected": [*TALK, NO]}, TALK, [YES], [NO]),
    (
        "no prompt, and one answer begins with the other",
        {"chosen": [user("Hi"), YES], "rejected": [user("Hi"), YES, WHY, NO]},
        [user("Hi")],
        [YES],
        [YES, WHY, NO],
    ),
    (
        "no prompt, and the user goes on differently",
        {"chosen": [user("Hi"), YES, WHY, NO], "rejected": [user("Hi"), YES, user("How?"), NO]},
        [user("Hi")],
        [YES, WHY, NO],
        [YES, user("How?"), NO],
    ),
    ("the prompt twice", {"prompt": "Why?", "chosen": [*TALK, YES], "rejected": [*TALK, NO]}, TALK, [YES], [NO]),
    (
        "dialogues",
        {
            "chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant: Yes.",
            "rejected": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant: No. ",
        },
        TALK,
        [YES],
        [NO],
    ),
    (
        "dialogues with paragraphs, and two turns of one speaker",
        {
            "chosen": "Human: Why?\nYes?\n\nAssistant: Yes.\n\nHumans:\n\n1. all\n\nAssistant:  so\n\nAssistant:",
            "rejected": "Human: Why?\nYes?\n\nAssistant: Yes.",
        },
        [user("Why?\nYes?")],
        [assistant("Yes.\n\nHumans:\n\n1. all\n\nso")],
        [YES],
    ),
    (
        "dialogues that part early",
        {
            "chosen": "\n\nHuman: Hi\n\nAssistant: Yes.\n\nHuman: Why?\n\nAssistant: No.",
            "rejected": "\n\nHuman: Hi\n\nAssistant: Yes.\n\nHuman: How?\n\nAssistant: No.",
        },
        [user("Hi")],
        [YES, WHY, NO],
        [YES, user("How?"), NO],
    ),
    ("words", {"chosen": "Say it:\nYes.", "rejected": "Say it:\nNo."}, [user("Say it:")], [YES], [NO]),
    (
        "ShareGPT",
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Hello"},
                {"from": "user", "value": "Why?", "role": None},
            ],
            "chosen": {"from": "gpt", "value": "Yes."},
            "rejected": {"from": "assistant", "value": "No."},
        },
        [{"role": "system", "content": "Be brief."}, *TALK],
        [YES],
        [NO],
    ),
    ("ShareGPT with roles", {"conversations": TALK, "chosen": YES, "rejected": NO}, TALK, [YES], [NO]),
    ("both prompts", {"conversations": 3, "prompt": "Why?", "chosen": YES, "rejected": NO}, [WHY], [YES], [NO]),
    ("LLMBar, 1", {**BAR, "label": 1}, [WHY], [YES], [NO]),
    ("LLMBar, 2", {**BAR, "label": 2}, [WHY], [NO], [YES]),
    ("LLMBar in a csv", {**BAR, "label": "2"}, [WHY], [NO], [YES]),
    ("LLMBar beside nulls", {**BAR, "label": 1, "prompt": None, "chosen": None}, [WHY], [YES], [NO]),
]


def test_every_format():
    for name, row, *expected in FORMATS:
        assert read(row) == Preference(*expected), name


def test_columns_of_other_names():
    row = {"question": "Why?", "good": "Yes.", "bad": "No.", "chosen": 3, "prompt": 4}
    assert read(row, columns=("question", "good", "bad")) == Preference([WHY], [YES], [NO])


def test_texts_as_they_are():
    row = {"prompt": " Why?", "chosen": "\nYes. ", "rejected": "No."}
    assert read(row, chat=False) == Preference(" Why?", "\nYes. ", "No.")
    assert read({**BAR, "label": 2}, chat=False) == Preference("Why?", "No.", "Yes.")
    assert read({"prompt": "Why?", "chosen": YES, "rejected": "No."}, chat=False) == Preference([WHY], [YES], [NO])


def test_the_prompt_of_a_dialogue_as_text_ends_with_the_assistant_mark():
    opening = "\n\nHuman: Hi\n\nAssistant: I see\n\nHuman: Why?\n\nAssistant:"
    chosen, rejected = " I do.\n\nAssistant: Yes.", " I do not. "
    row = {"chosen": opening + chosen, "rejected": opening + rejected}
    assert read(row, chat=False) == Preference(opening, chosen, rejected)


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("The sky is blueish.", "The sky is blue.", "The sky is"),  # TRL would split the word
        ("a\nblue", "a\ngreen", "a\n"),
        ("a  blue", "a  green", "a "),
        ("a\nb1", "a\nb2", "a\n"),
        ("a b\nc", "a b c", "a b"),
        ("a bc", "a b c", "a"),
        ("a b", "a b c", "a"),
        ("a b c", "a b", "a"),
        (" a b", " a c", " a"),
        ("Human: a b", "Human: a c", "Human: a"),  # not a dialogue: no assistant
        ("So.\n\nHuman: a\n\nAssistant: b", "So.\n\nHuman: a\n\nAssistant: bc", "So.\n\nHuman: a\n\nAssistant:"),
        ("So.\n\nHuman: a\n\nAssistant: I b", "So.\n\nHuman: a\n\nAssistant: I c", "So.\n\nHuman: a\n\nAssistant: I"),
    ],
)
def test_split_of_texts(chosen, rejected, prompt):
    expected = Preference(prompt, chosen[len(prompt) :], rejected[len(prompt) :])
    assert read({"chosen": chosen, "rejected": rejected}, chat=False) == expected


WORDS = st.lists(st.sampled_from(["a", "b", "ab", "abc", " ", " ", "\n", "\t"]), min_size=1, max_size=12).map("".join)


@given(beginning=WORDS, chosen=WORDS, rejected=WORDS)
def test_words_are_not_split(beginning, chosen, rejected):
    row = {"chosen": f"a {beginning}{chosen}", "rejected": f"a {beginning}{rejected}"}
    preference = read(row, chat=False)
    assume(not isinstance(preference, str))
    for name, answer in (("chosen", preference.chosen), ("rejected", preference.rejected)):
        assert preference.prompt + answer == row[name]
        assert preference.prompt.split() + answer.split() == row[name].split()
        assert answer.strip()


@pytest.mark.slow
@given(beginning=WORDS, chosen=WORDS, rejected=WORDS)
def test_the_split_is_trls_unless_that_splits_a_word(beginning, chosen, rejected):
    from trl.data_utils import extract_prompt

    row = {"chosen": f"a {beginning}{chosen}", "rejected": f"a {beginning}{rejected}"}
    preference = read(row, chat=False)
    assume(not isinstance(preference, str))
    peer = extract_prompt(row)
    complete_words = all(peer["prompt"].split() + peer[name].split() == row[name].split() for name in row)
    prefix = row["chosen"].startswith(row["rejected"]) or row["rejected"].startswith(row["chosen"])
    if complete_words and not prefix:
        assert preference.prompt == peer["prompt"]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "", "rejected": "c"}, "no_answer"),
        ({"prompt": "a", "chosen": "b", "rejected": " \n"}, "no_answer"),
        ({"prompt": TALK, "chosen": [], "rejected": NO}, "no_answer"),
        ({"prompt": TALK, "chosen": YES, "rejected": assistant(" ")}, "no_answer"),
        ({"prompt": TALK, "chosen": YES, "rejected": ""}, "no_answer"),
        ({"prompt": TALK, "chosen": YES, "rejected": [assistant(""), WHY, assistant("")]}, "no_answer"),
        ({"chosen": [*TALK, YES], "rejected": [*TALK, assistant("")]}, "no_answer"),
        ({"chosen": [*TALK, YES], "rejected": []}, "no_answer"),
        ({"chosen": "\n\nHuman: Hi\n\nAssistant: ", "rejected": "\n\nHuman: Hi\n\nAssistant: a"}, "no_answer"),
        ({"chosen": "Yes. ", "rejected": "Yes. No."}, "no_answer"),
        ({"chosen": "", "rejected": "Yes. No."}, "no_answer"),
        (
            {
                "chosen": "Assistant: a\n\nHuman: b\n\nAssistant:",
                "rejected": "Assistant: a\n\nHuman: b\n\nAssistant: c",
            },
            "no_answer",
        ),
        ({"chosen": "same", "rejected": "same"}, "same_answer"),
        ({"chosen": YES, "rejected": [YES]}, "same_answer"),
        ({"chosen": "Human: a\n\nAssistant: b ", "rejected": "Human: a\n\nAssistant: b"}, "same_answer"),
    ],
)
def test_rows_without_a_preference(row, reason, chat):
    assert read(row, chat=chat) == reason


SURROGATE = "caf\ud83d"
COLUMN = "; put the prompt into the column 'prompt'"
WORD = ": the chosen and the rejected do not begin with a common complete word that could be the prompt"
MESSAGE = (
    ": the chosen and the rejected do not begin with a common message before the assistant's that could be the prompt"
)
NULL, KIND = " is missing (null); it must be a text", " is of type int; it must be a text"
BEGINS = (
    " begins with a message of the user, but must begin with the assistant's; leave the prompt out of the answers, or "
)
ENDS = " ends with a message of the user, but must end with the assistant's; remove what follows it, or the row"


def texts(**columns):
    return {"prompt": "a", "chosen": "b", "rejected": "c", **columns}


def conversations(*messages):
    return {"conversations": list(messages), "chosen": YES, "rejected": NO}


BAD = [
    ({}, " has no column 'chosen' (it has: none)"),
    ({"choosen": "b", "rejected": "c"}, " has no column 'chosen'; did you mean 'choosen'?"),
    ({"chosen": "b", "reject": "c"}, " has no column 'rejected'; did you mean 'reject'? (it has: 'chosen', 'reject')"),
    (texts(chosen=None), f": the chosen{NULL}, a message or a list of messages such as ["),
    (texts(rejected=3), f": the rejected{KIND}, a message or a list of messages such as ["),
    (texts(prompt=3), f": the prompt{KIND} or a list of messages"),
    ({"prompt": 3, "chosen": YES, "rejected": NO}, f": the prompt{KIND} or a list of messages"),
    ({"prompt": 3, "chosen": [*TALK, YES], "rejected": [*TALK, NO]}, f": the prompt{KIND} or a list of messages"),
    (texts(prompt=" "), ": the prompt is empty; fill it in or remove the row"),
    ({"prompt": " ", "chosen": YES, "rejected": NO}, ": the prompt is empty"),
    (texts(prompt=[]), ": the prompt is an empty list; it needs at least one message"),
    (texts(prompt=[YES]), ": the prompt ends with a message of the assistant;"),
    (texts(prompt=["x"]), ": message 1 of the prompt is of type str; a message is an object"),
    (texts(chosen=["x"]), ": message 1 of the chosen is of type str; a message is an object"),
    (texts(chosen={"content": "x"}), ": message 1 of the chosen has no 'role' (it has: 'content')"),
    (texts(chosen=[YES, {"role": "user"}]), ": message 2 of the chosen has no 'content' (it has: 'role')"),
    (texts(chosen={"role": "asistant", "content": "x"}), ": message 1 of the chosen: unknown role 'asistant'; did you"),
    (texts(rejected=assistant(3)), ": message 1 of the rejected: its content is of type int; it must be a text or"),
    (texts(prompt=SURROGATE), ": the prompt contains a lone surrogate"),
    (texts(prompt=[user(SURROGATE)]), ": message 1 of the prompt contains a lone surrogate"),
    (texts(chosen=SURROGATE), ": the chosen contains a lone surrogate"),
    (texts(rejected=[YES, assistant(SURROGATE)]), ": message 2 of the rejected contains a lone surrogate"),
    ({"prompt": TALK, "chosen": [*TALK, YES], "rejected": [*TALK, NO]}, f": the chosen{BEGINS}leave the"),
    (texts(rejected=user("x")), f": the rejected{BEGINS}leave the column 'prompt' out"),
    ({"prompt": TALK, "chosen": WHY, "rejected": NO}, f": the chosen{BEGINS}leave the column 'prompt' out"),
    ({"prompt": TALK, "chosen": [YES, WHY], "rejected": NO}, f": the chosen{ENDS}"),
    ({"prompt": "a", "chosen": WHY, "rejected": user("x")}, f": the chosen{ENDS}"),
    ({"chosen": [*TALK, YES], "rejected": TALK}, f": the rejected{ENDS}"),
    ({"chosen": "Human: a\n\nAssistant: b\n\nHuman: c", "rejected": "Human: a\n\nAssistant: d"}, f": the chosen{ENDS}"),
    ({"prompt": None, "chosen": "blue", "rejected": "blueish"}, f"{WORD}{COLUMN}"),
    ({"chosen": YES, "rejected": NO}, f"{MESSAGE}{COLUMN}"),
    ({"chosen": [*TALK, YES], "rejected": "No."}, MESSAGE),
    ({"chosen": [user("a"), YES], "rejected": [user("b"), NO]}, MESSAGE),
    ({"prompt": "a", "chosen": [user("a"), WHY, YES], "rejected": [user("a"), user("b"), NO]}, MESSAGE),
    ({"chosen": "Human: a\n\nAssistant: b", "rejected": "Human: c\n\nAssistant: d"}, MESSAGE),
    (conversations({"from": "tool", "value": "a"}), ": message 1 of the conversations: unknown speaker 'tool' (allowe"),
    (conversations({"from": ["gpt"], "value": "a"}), ": message 1 of the conversations: unknown speaker ['gpt'] (al"),
    (conversations(user("a"), {"from": "gpt"}), ": message 2 of the conversations has no 'value' (it has: 'from')"),
    (conversations({"from": "human", "value": 3}), ": message 1 of the conversations: its content is of type int"),
    (conversations({"from": "gpt", "value": "a"}), ": the conversations ends with a message of the assistant"),
    (texts(chosen={"from": "gtp", "value": "b"}), ": message 1 of the chosen: unknown speaker 'gtp'; did you mean 'gp"),
    ({"output_1": "a", "output_2": "b", "label": 1}, " has no column 'input' (it has: 'output_1', 'output_2'"),
    ({**BAR, "lable": 1}, " has no column 'label'; did you mean 'lable'?"),
    ({**BAR, "label": 1, "input": None}, f": the input{NULL}"),
    ({**BAR, "label": 1, "output_1": None}, f": the output_1{NULL}, a message"),
    ({**BAR, "label": 0}, ": the label is 0; it must be 1 or 2, the number of the better output"),
    ({**BAR, "label": True}, ": the label is True; it must be 1 or 2"),
    ({**BAR, "label": None}, ": the label is None; it must be 1 or 2"),
    ({**BAR, "label": "A"}, ": the label is 'A'; it must be 1 or 2"),
]  # fmt: skip


def test_invalid_rows():
    for row, sentence in BAD:
        with pytest.raises(DataError) as caught:
            read(row)
        assert str(caught.value).startswith(f"p.jsonl, line 7{sentence}"), row


def test_a_column_is_suggested_only_if_it_is_missing():
    for columns, hint in (({"prompt": None}, ""), ({"promt": "a"}, "; did you mean 'promt'?"), ({"question": "a"}, "")):
        with pytest.raises(DataError) as caught:
            read({"chosen": "b", "rejected": "c", **columns})
        assert str(caught.value) == f"p.jsonl, line 7{WORD}{COLUMN}{hint}"
