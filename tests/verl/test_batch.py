"""From keys, tags and token ids to groups, with a real tokenizer and a real embedder."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.config import GroupingSection
from groupwise.errors import InputError
from groupwise.grouping.embed import load_embedder
from groupwise.grouping.grouper import LocalGrouper, group_texts
from groupwise.integrations.verl.batch import decode_answers, find_groups, read_sessions
from groupwise.model.tiny import tiny_tokenizer
from tests.weights import wordllama


def test_sessions_use_their_last_output_and_skip_padding():
    keys = ["u_1_0", "u_0_2", "pad_0_0", "v_x_0_0", "u_0_10", "u_0_0"]
    tags = [{}, {}, {"is_padding": True}, {"is_padding": False}, {}, {}]
    sessions = read_sessions(keys, tags)
    assert sessions.uids == ["u", "u", "pad", "v_x"]
    assert sessions.last == [0, 4, 2, 3]
    assert sessions.session == [0, 1, 2, 3, 1, 1]
    assert sessions.answers == {"u": [1, 0], "v_x": [3]}


@given(st.permutations(["u_0_0", "u_1_0", "u_2_0", "v_0_0", "v_0_1", "v_1_0"]))
def test_order_of_the_batch_does_not_matter(keys):
    sessions = read_sessions(keys, [{}] * len(keys))
    named = {uid: [keys[sessions.last[place]] for place in places] for uid, places in sessions.answers.items()}
    assert named == {"u": ["u_0_0", "u_1_0", "u_2_0"], "v": ["v_0_1", "v_1_0"]}
    assert [sessions.uids[place] for place in sessions.session] == [key[0] for key in keys]


@pytest.mark.parametrize("key", ["u", "u_0", "_0_0", "u_0_x"])
def test_invalid_key(key):
    with pytest.raises(InputError, match=f"the key '{key}' of verl's batch is not of the form uid_session_number"):
        read_sessions([key], [{}])


def test_only_text_of_the_model_is_decoded():
    tokenizer = tiny_tokenizer()
    ids = torch.tensor(tokenizer.encode("héllo[tool says]bye<|end|><|pad|>"))
    mask = torch.ones_like(ids)
    mask[6:17] = 0  # é is two bytes
    assert decode_answers(tokenizer, [ids, ids], [torch.ones_like(ids), mask], "</think>") == [
        "héllo[tool says]bye",
        "héllobye",
    ]


def test_mark_is_kept_even_if_special():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["</think>"]})
    ids = torch.tensor(tokenizer.encode("hm</think>yes<|end|>"))
    every = torch.ones_like(ids)
    assert decode_answers(tokenizer, [ids], [every], "</think>") == ["hm</think>yes"]
    assert decode_answers(tokenizer, [ids], [every], None) == ["hmyes"]


TEXTS = {
    "u": ["a dog barks at the cat", "the dog barked at a cat", "quarterly interest rates rose", "interest rates rise"],
    "v": ["snow in the mountains"],
    "w": ["one egg and flour", "seven violins", "an egg with flour", "a violin and six more", "flour and two eggs"],
}


def test_prompts_with_different_numbers_of_answers():
    settings = GroupingSection(embedder=str(wordllama()), workers=0)
    keys = [f"{uid}_{number}_0" for number in range(5) for uid in TEXTS if number < len(TEXTS[uid])]
    sessions = read_sessions([*keys, "pad_0_0"], [*([{}] * len(keys)), {"is_padding": True}])
    texts = {place: TEXTS[key[0]][int(key[2])] for place, key in enumerate(keys)}
    labels, metrics = find_groups(sessions, texts, LocalGrouper(settings))

    embedder = load_embedder(settings.embedder)
    alone = {uid: group_texts(embedder, [texts], settings) for uid, texts in TEXTS.items()}
    expected = [f"{key[0]}_{alone[key[0]].labels[0, int(key[2]), 0]}" for key in keys]
    assert labels == [*expected, "pad_0"]
    assert len({label for label in expected if label[0] == "u"}) == 2
    sizes = [int(alone[uid].labels.max()) + 1 for uid in TEXTS]
    assert metrics["similarity_groups/avg_groups_per_prompt"] == pytest.approx(sum(sizes) / 3)
    assert metrics["similarity_groups/n_prompts_split_into_1_groups"] == sizes.count(1)
    assert metrics["similarity_groups/n_single_member_groups"] == sum(expected.count(label) == 1 for label in expected)
    mean = sum(float(result.scores[0]) for result in alone.values()) / 3
    assert metrics["similarity_groups/avg_silhouette_score"] == pytest.approx(mean)


def test_batch_of_padding_has_no_metrics():
    settings = GroupingSection(embedder=str(wordllama()), workers=0)
    labels, metrics = find_groups(read_sessions(["pad_0_0"], [{"is_padding": True}]), {}, LocalGrouper(settings))
    assert (labels, metrics) == (["pad_0"], {})
