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


def test_the_last_output_stands_for_a_session_and_filling_is_no_answer():
    keys = ["u_1_0", "u_0_2", "pad_0_0", "v_x_0_0", "u_0_10", "u_0_0"]
    tags = [{}, {}, {"is_padding": True}, {"is_padding": False}, {}, {}]
    found = read_sessions(keys, tags)
    assert found.uids == ["u", "u", "pad", "v_x"]
    assert found.last == [0, 4, 2, 3]
    assert found.session == [0, 1, 2, 3, 1, 1]
    assert found.answers == {"u": [1, 0], "v_x": [3]}


@given(st.permutations(["u_0_0", "u_1_0", "u_2_0", "v_0_0", "v_0_1", "v_1_0"]))
def test_the_order_of_a_batch_changes_nothing(keys):
    found = read_sessions(keys, [{}] * len(keys))
    named = {uid: [keys[found.last[place]] for place in places] for uid, places in found.answers.items()}
    assert named == {"u": ["u_0_0", "u_1_0", "u_2_0"], "v": ["v_0_1", "v_1_0"]}
    assert [found.uids[place] for place in found.session] == [key[0] for key in keys]


@pytest.mark.parametrize("key", ["u", "u_0", "_0_0", "u_0_x"])
def test_a_key_of_another_form_is_named(key):
    with pytest.raises(InputError, match=f"the key '{key}' of verl's batch is not of the form uid_session_number"):
        read_sessions([key], [{}])


def test_only_what_the_model_wrote_is_read():
    tokenizer = tiny_tokenizer()
    ids = torch.tensor(tokenizer.encode("héllo[tool says]bye<|end|><|pad|>"))
    mask = torch.ones_like(ids)
    mask[6:17] = 0  # é is two bytes
    assert decode_answers(tokenizer, [ids, ids], [torch.ones_like(ids), mask], "</think>") == [
        "héllo[tool says]bye",
        "héllobye",
    ]


def test_a_mark_that_a_tokenizer_calls_special_stays():
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


def test_prompts_with_unequal_numbers_of_answers_are_grouped_as_each_would_be_alone():
    how = GroupingSection(embedder=str(wordllama()), workers=0)
    keys = [f"{uid}_{number}_0" for number in range(5) for uid in TEXTS if number < len(TEXTS[uid])]
    sessions = read_sessions([*keys, "pad_0_0"], [*([{}] * len(keys)), {"is_padding": True}])
    texts = {place: TEXTS[key[0]][int(key[2])] for place, key in enumerate(keys)}
    found, metrics = find_groups(sessions, texts, LocalGrouper(how))

    embedder = load_embedder(how.embedder)
    alone = {uid: group_texts(embedder, [texts], how) for uid, texts in TEXTS.items()}
    expected = [f"{key[0]}_{alone[key[0]].labels[0, int(key[2]), 0]}" for key in keys]
    assert list(found.labels) == [*expected, "pad_0"]
    assert len({label for label in expected if label[0] == "u"}) == 2
    sizes = [int(alone[uid].labels.max()) + 1 for uid in TEXTS]
    assert metrics["similarity_groups/avg_groups_per_prompt"] == pytest.approx(sum(sizes) / 3)
    assert metrics["similarity_groups/n_prompts_split_into_1_groups"] == sizes.count(1)
    assert metrics["similarity_groups/n_single_member_groups"] == sum(expected.count(label) == 1 for label in expected)
    mean = sum(float(each.scores[0]) for each in alone.values()) / 3
    assert metrics["similarity_groups/avg_silhouette_score"] == pytest.approx(mean)


def test_a_batch_that_is_all_filling_has_nothing_to_log():
    how = GroupingSection(embedder=str(wordllama()), workers=0)
    found, metrics = find_groups(read_sessions(["pad_0_0"], [{"is_padding": True}]), {}, LocalGrouper(how))
    assert (list(found.labels), metrics) == (["pad_0"], {})
