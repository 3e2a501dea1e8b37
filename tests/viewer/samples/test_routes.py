"""What the page is told about samples, without a browser."""

from __future__ import annotations

import shutil

import pytest

from groupwise.errors import CheckpointError, InputError
from groupwise.grouping.labels import LABELS
from groupwise.training.store.rollout_files import read_rollouts
from groupwise.viewer.routes import groups as groups_routes
from groupwise.viewer.routes import questions as questions_routes
from groupwise.viewer.routes import sample
from groupwise.viewer.runs import NotServedError
from tests.viewer.samples.conftest import HOSTILE, api_of


@pytest.fixture(scope="module")
def get(answers_run):
    api = api_of(answers_run)
    return lambda path, **query: api.get(f"run/answers/{path}", {name: str(value) for name, value in query.items()})


def paths(branch, before=""):
    """Each sample's text along its path."""
    text = before + branch["text"]
    if not branch["children"]:
        return dict.fromkeys(branch["samples"], text)
    return {number: path for child in branch["children"] for number, path in paths(child, text).items()}


def test_a_step_s_groups(get, answers_run):
    answer = get("groups", step=2)
    rows = read_rollouts(answers_run, [2]).to_pylist()
    shown = [(group["prompt_number"], one) for group in answer["groups"] for one in group["samples"]]
    assert len(answer["groups"]) == 3
    for row, (prompt, one) in zip(rows, shown, strict=True):
        assert (prompt, one["sample"], one["completion"]) == (row["prompt_number"], row["sample"], row["completion"])
        assert (one["reward"], one["advantage"]) == (row["reward"], row["advantage"])
        assert one["grades"] == {"vowel": row["grade/vowel"]}
        assert one["rewards"] == {"even": row["reward/even"]}
        assert (one["why"] is None) == row["contributes"]
        assert one["why"] != row["masked_out"] or one["why"] is None  # in words
    assert get("groups")["step"] == 6


def test_filters_keep_what_they_count(get):
    answer = get("groups", step=1)
    counts = {one["name"]: one["count"] for one in answer["filters"]}
    assert 0 < counts["disagreement"] < 3
    for name, count in counts.items():
        assert len(get("groups", step=1, filter=name)["groups"]) == count
    both = get("groups", step=1, filter="disagreement,masked")["groups"]
    assert len(both) <= min(counts["disagreement"], counts["masked"])
    with pytest.raises(InputError, match="filter"):
        get("groups", filter="unheard")
    with pytest.raises(CheckpointError, match="step 99"):
        get("groups", step=99)


def test_search_in_a_step_and_in_all(get, monkeypatch):
    step = next(one["step"] for one in get("prompt", row=3)["visits"])
    assert [group["row"] for group in get("groups", step=step, search="SAY THREE")["groups"]] == [3]
    assert not get("groups", step=step, search="not there")["groups"]
    visits = {(one["step"], one["prompt_number"]) for one in get("prompt", row=3)["visits"]}
    found = get("groups", search="say three", everywhere=1)
    assert {(one["step"], one["prompt_number"]) for one in found["matches"]} == visits
    assert found["older"] == 0
    # In pieces, every match is found once.
    monkeypatch.setattr(groups_routes, "STEPS_SEARCHED", 2)
    monkeypatch.setattr(groups_routes, "MATCHES", 1)
    pieces, before = [], 1000
    while True:
        part = get("groups", search="say three", everywhere=1, before=before)
        pieces += part["matches"]
        if not part["older"]:
            break
        before = part["first"]
    assert pieces == found["matches"]


def test_long_texts_are_sent_on_demand(answers_run, monkeypatch):
    monkeypatch.setattr(groups_routes, "SENT", 3)
    api = api_of(answers_run)
    group = api.get("run/answers/groups", {"step": "1"})["groups"][0]
    assert len(group["prompt"]) == 3
    full = api.get("run/answers/group", {"step": "1", "prompt": "0"})
    assert len(full["prompt"]) == 3 + group["prompt_hidden"]
    assert full["prompt_hidden"] == 0
    for cut, one in zip(group["samples"], full["samples"], strict=True):
        assert one["completion"].startswith(cut["completion"])
        assert len(one["completion"]) == len(cut["completion"]) + cut["hidden"]


def test_pages_hold_few_samples(answers_run, monkeypatch):
    monkeypatch.setattr(groups_routes, "SAMPLES_PER_PAGE", 12)
    api = api_of(answers_run)
    pages = [api.get("run/answers/groups", {"step": "1", "page": str(page)}) for page in (1, 2, 9)]
    assert [[group["prompt_number"] for group in page["groups"]] for page in pages] == [[0, 1], [2], [2]]


@pytest.mark.parametrize("step", [1, 2])  # with and without recorded tokens
def test_one_group_as_a_tree(get, step):
    prompt = get("tokens", step=1)["prompt"]
    group = get("group", step=step, prompt=prompt)
    assert group["by_tokens"] == (step == 1)
    assert paths(group["tree"]) == {one["sample"]: one["completion"] for one in group["samples"]}
    assert group["tree"]["samples"] == [one["sample"] for one in group["samples"]]
    for branch in group["tree"]["children"]:
        assert branch["text"].startswith(branch["choice"])
        assert not branch["ends"]
        assert branch["choice"] or not branch["text"]  # a part of a character has no text
    shares = [fork["share"] for fork in group["forks"]]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1 + 1e-9
    first = group["forks"][0]
    assert sum(one["count"] for one in first["branches"]) <= len(group["samples"])


def test_one_prompt_through_the_run(get, answers_run):
    rows = [row for row in read_rollouts(answers_run).to_pylist() if row["row"] == 0]
    history = get("prompt", row=0)
    assert [one["step"] for one in history["visits"]] == sorted({row["step"] for row in rows})
    assert [end["step"] for end in history["ends"]] == [history["visits"][0]["step"], history["visits"][-1]["step"]]
    for visit in history["visits"]:
        answers = [bool(row["grade/vowel"]) for row in rows if row["step"] == visit["step"]]
        assert visit["value"] == pytest.approx(sum(answers) / len(answers))
    middle = history["visits"][1]["step"]
    assert [end["step"] for end in get("prompt", row=0, at=middle)["ends"]] == [history["visits"][0]["step"], middle]
    assert HOSTILE in history["prompt"]
    held_out = get("prompt", row=1, held_out=1)
    assert [one["step"] for one in held_out["visits"]] == [0, 3, 6]
    assert held_out["ends"][0]["summary"]["contributing"] is None
    with pytest.raises(NotServedError, match="row 77"):
        get("prompt", row=77)


def test_tokens_of_an_answer(get):
    answer = get("tokens", step=3)
    one = next(one for one in get("group", step=3, prompt=answer["prompt"])["samples"] if one["sample"] == 0)
    assert "".join(token["text"] for token in answer["tokens"]) == one["completion"]
    assert len(answer["tokens"]) == one["completion_tokens"]
    for token in answer["tokens"]:
        assert token["logp"] < 0 < token["entropy"]
        assert token["sampler_logp"] == pytest.approx(token["logp"], abs=1e-3)  # before the update
        assert token["ref_logp"] is not None
    other = get("tokens", step=3, prompt=answer["prompts"][1]["prompt"], sample=2)
    assert other["sample"] == 2
    assert other["prompt"] != answer["prompt"]


def test_tokens_that_were_not_recorded(get):
    answer = get("tokens", step=2)
    assert answer["steps"] == [1, 3, 5]
    assert "step 2" in answer["missing"]
    assert "run.save_tokens_every = 2" in answer["missing"]
    unrecorded = next(n for n in range(3) if n not in {one["prompt"] for one in get("tokens", step=1)["prompts"]})
    assert f"prompt {unrecorded}" in get("tokens", step=1, prompt=unrecorded)["missing"]
    assert "no answer 50" in get("tokens", step=1, sample=50)["missing"]


def test_questions(get, monkeypatch):
    answer = get("questions", part="train", sort="row")
    assert [row["row"] for row in answer["rows"]] == list(range(6))
    assert answer["statuses"][0]["count"] == 6 == sum(one["count"] for one in answer["statuses"][1:])
    for row in answer["rows"]:
        history = get("prompt", row=row["row"])["visits"]
        measured = [(answer["bins"][place], value) for place, value, here in row["cells"] if here]
        assert measured == [(str(one["step"]), one["value"]) for one in history]
        assert [place for place, *_ in row["cells"]] == list(range(row["cells"][0][0], 6))  # held until the last step
    for one in answer["statuses"]:
        assert len(get("questions", part="train", status=one["name"])["rows"]) == one["count"]
    assert get("questions", part="held_out")["bins"] == ["0", "3", "6"]
    monkeypatch.setattr(questions_routes, "COLUMNS", 3)
    assert get("questions", part="train")["bins"] == ["1–2", "3–4", "5–6"]
    with pytest.raises(InputError, match="status"):
        get("questions", status="unheard")


def test_pairs_are_those_that_were_trained_on(get, answers_run):
    metrics = {}
    for step in range(1, 7):
        answer = get("pairs", step=step)
        metrics[step] = len(answer["pairs"])
        for pair in answer["pairs"]:
            assert pair["margin"] > 0
            assert (pair["chosen"]["pair"], pair["rejected"]["pair"]) == ("chosen", "rejected")
            assert pair["chosen"]["reward"] - pair["rejected"]["reward"] == pytest.approx(pair["margin"])
            for one in (pair["chosen"], pair["rejected"]):
                assert "".join(text for text, _ in one["segments"]) == one["completion"]
    assert sum(metrics.values()) > 0


@pytest.mark.slow
def test_clusters(clusters_run):
    answer = api_of(clusters_run).get("run/clusters/clusters", {"step": "1"})
    assert answer["mapped"]
    assert len(answer["points"]) == 6
    assert {point["cluster"] for point in answer["points"]} == set(answer["clusters"])
    assert answer["prompts"][0]["clusters"] == len(answer["clusters"])
    lone = [
        point
        for point in answer["points"]
        if sum(other["cluster"] == point["cluster"] for other in answer["points"]) == 1
    ]
    assert all("alone" in point["why"] for point in lone)


def test_a_run_without_clusters(get):
    with pytest.raises(NotServedError, match="no clusters"):
        get("clusters")
    assert sample.LABELS == LABELS


def test_damaged_files_are_named(answers_run, tmp_path):
    folder = shutil.copytree(answers_run, tmp_path / "answers")
    (folder / "rollouts" / "step-000006.parquet").write_bytes(b"half a fi")
    (folder / "tokens" / "step-000005.parquet").write_bytes(b"")
    shutil.rmtree(folder / "evaluations")
    api = api_of(folder)
    with pytest.raises(CheckpointError, match="step-000006"):
        api.get("run/answers/groups")
    group = api.get("run/answers/group", {"step": "5"})  # by words, as the tokens cannot be read
    assert not group["by_tokens"]
    assert group["tree"]["samples"] == list(range(6))
    with pytest.raises(CheckpointError, match="step-000005"):
        api.get("run/answers/tokens", {"step": "5"})
    questions = api.get("run/answers/questions")
    assert questions["part"] == "train"
    assert len(questions["rows"]) == 6
    shutil.rmtree(folder / "rollouts")
    with pytest.raises(NotServedError, match="save_rollouts"):
        api_of(folder).get("run/answers/groups")


def test_a_resumed_run_is_read_again(answers_run, tmp_path):
    folder = shutil.copytree(answers_run, tmp_path / "answers")
    api = api_of(folder)
    before = api.get("run/answers/questions", {"part": "train"})
    for step in (5, 6):
        (folder / "rollouts" / f"step-{step:06d}.parquet").unlink()
    after = api.get("run/answers/questions", {"part": "train"})
    assert sum(row["visits"] for row in before["rows"]) == 18
    assert sum(row["visits"] for row in after["rows"]) == 12
