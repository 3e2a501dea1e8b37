"""TRL's DPOTrainer makes the same ids from random texts and conversations and from real data."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from groupwise.data import Pair, PairBuilder, PromptBuilder, read_rows
from groupwise.model.tiny import tiny_tokenizer
from tests.weights import smollm2

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[2].parent / "shared" / "data"


@cache
def smol():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2()))


TOKENIZERS = {"tiny": tiny_tokenizer, "smollm2": smol}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def trl_pairs(rows, tokenizer):
    """TRL's pairs of rows that are all messages or all texts."""
    from datasets import Dataset
    from trl import DPOTrainer
    from trl.data_utils import maybe_extract_prompt

    args = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    data = Dataset.from_list([maybe_extract_prompt(row) for row in rows])
    made = DPOTrainer._prepare_dataset(SimpleNamespace(_tokenizer=tokenizer), data, tokenizer, args, "train")
    columns = zip(made["prompt_ids"], made["chosen_ids"], made["rejected_ids"], strict=True)
    return [Pair(*map(tuple, ids)) for ids in columns]


SCRAPS = [
    "the ",
    "sky",
    " is",
    "größer",
    "\n",
    "\n\n",
    "  ",
    "12",
    "345",
    "x=",
    "日本",
    "🙂",
    ".",
    "?!",
    " a",
    "\t",
    "n't",
]


def scribble(rng):
    text = "".join(rng.choice(SCRAPS) for _ in range(rng.randint(1, 8)))
    return text if text.strip() else f"{text}b"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_random_texts(name):
    rng = random.Random(0)
    rows = [
        {"prompt": f"Q{scribble(rng)}", "chosen": scribble(rng), "rejected": f"2{scribble(rng)}"} for _ in range(300)
    ]
    builder = PairBuilder(PromptBuilder(TOKENIZERS[name](), chat=False))
    expected = trl_pairs(rows, TOKENIZERS[name]())
    assert builder.build(rows) == [expected[number] for number in builder.kept]
    assert len(builder.kept) > 290
    assert (builder.retokenised > 20) == (name == "smollm2")  # bytes never merge


def test_truncation_is_trls():
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    rng = random.Random(2)
    rows = [
        {"prompt": scribble(rng), "chosen": f"1{scribble(rng)}", "rejected": f"2{scribble(rng)}"} for _ in range(99)
    ]
    limit = 20
    builder = PairBuilder(PromptBuilder(tiny_tokenizer(), chat=False), max_length=limit, on_too_long="truncate")
    pairs = builder.build(rows)
    complete = trl_pairs(rows, tiny_tokenizer())
    assert builder.kept == tuple(number for number, pair in enumerate(complete) if len(pair.prompt) < limit)
    assert 0 < builder.refused["too_long"] < 50
    collate = DataCollatorForPreference(pad_token_id=256, max_length=limit)
    for number, pair in zip(builder.kept, pairs, strict=True):
        ids = {f"{name}_ids": list(getattr(complete[number], name)) for name in ("prompt", "chosen", "rejected")}
        made = collate([ids])
        for answer, tokens, mask in zip(
            (pair.chosen, pair.rejected), made["input_ids"], made["completion_mask"], strict=True
        ):
            assert tokens[mask.bool()].tolist() == list(answer)
            assert tokens[: len(pair.prompt)].tolist() == list(pair.prompt)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("form", ["prompt", "no prompt", "text"])
def test_random_conversations(name, form):
    rng = random.Random(1)
    rows = []
    for _ in range(150):
        prompt = [system(scribble(rng))] if rng.random() < 0.3 else []
        prompt += [make(scribble(rng)) for _ in range(rng.randint(0, 2)) for make in (user, assistant)]
        prompt.append(user(scribble(rng)))
        chosen, rejected = [assistant(f"1{scribble(rng)}")], [assistant(f"2{scribble(rng)}")]
        if rng.random() < 0.3:
            rejected += [user(scribble(rng)), assistant(scribble(rng))]
        if form == "prompt":
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        else:
            rows.append({"chosen": prompt + chosen, "rejected": prompt + rejected})
            if form == "text":
                rows[-1]["prompt"] = prompt[-1]["content"]
    assert PairBuilder(PromptBuilder(TOKENIZERS[name]())).build(rows) == trl_pairs(rows, TOKENIZERS[name]())


def paragraphs_of(text):
    """A dialogue of HH as messages, read paragraph by paragraph."""
    messages = []
    for paragraph in text.removeprefix("\n\n").split("\n\n"):
        speaker, _, words = paragraph.partition(":")
        role = {"Human": "user", "Assistant": "assistant"}.get(speaker)
        if role is None:
            messages[-1]["content"] += f"\n\n{paragraph}"
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n\n{words.strip()}"
        else:
            messages.append({"role": role, "content": words})
    return [{**message, "content": message["content"].strip()} for message in messages]


def from_dialogues(row):
    return {name: paragraphs_of(row[name]) for name in ("chosen", "rejected")}


def from_sharegpt(row):
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    columns = (row["conversations"], [row["chosen"]], [row["rejected"]])
    made = [[{"role": roles[each["from"]], "content": each["value"]} for each in column] for column in columns]
    return dict(zip(("prompt", "chosen", "rejected"), made, strict=True))


def from_llmbar(row):
    better, worse = (row["output_1"], row["output_2"]) if row["label"] == 1 else (row["output_2"], row["output_1"])
    return {"prompt": [user(row["input"])], "chosen": [assistant(better)], "rejected": [assistant(worse)]}


def real(name, *rest):
    path = DATA / name
    absent = pytest.mark.skipif(not path.exists(), reason=f"{name} is not on this machine")
    return pytest.param(path, *rest, marks=absent, id=name)


# Where one speaker has two turns in a row.
ODD = (667, 763, 1254, 1319, 1688, 1849, 1950, 1952, 2036)


@pytest.mark.parametrize(
    ("path", "convert", "rows", "no_answer", "odd"),
    [
        real("llamafactory_dpo_en_demo.json", from_sharegpt, 300, 0, ()),
        real("hh_harmless_base_test.jsonl.gz", from_dialogues, 2312, 4, ODD),
        real("llmbar_LLMBar_Natural.json", from_llmbar, 100, 0, ()),
    ],
)
def test_real_data(path, convert, rows, no_answer, odd):
    data = read_rows(path)
    builder = PairBuilder(PromptBuilder(smol()))
    pairs = builder.build(data)
    assert len(data) == rows
    assert builder.refused == {"same_answer": 0, "no_answer": no_answer, "too_long": 0}
    assert builder.retokenised == 0
    by_row = dict(zip(builder.kept, pairs, strict=True))
    assert len(by_row) == rows - no_answer
    some = sorted({*builder.kept[::12], *odd})
    assert [by_row[number] for number in some] == trl_pairs([convert(data[number]) for number in some], smol())


@pytest.mark.parametrize("path", [real("hh_harmless_base_test.jsonl.gz")])
def test_real_dialogues_as_texts(path):
    rows = read_rows(path, limit=600)
    builder = PairBuilder(PromptBuilder(tiny_tokenizer(), chat=False))
    pairs = builder.build(rows)
    assert len(pairs) == 598  # two have an answer without text
    for number, pair in zip(builder.kept, pairs, strict=True):
        prompt = bytes(pair.prompt).decode()
        assert prompt.endswith("\n\nAssistant:")
        assert prompt + bytes(pair.chosen[:-1]).decode() == rows[number]["chosen"]
        assert prompt + bytes(pair.rejected[:-1]).decode() == rows[number]["rejected"]
