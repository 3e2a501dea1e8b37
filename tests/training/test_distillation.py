"""Runs that learn from a teacher: alone and beside GRPO, resumed, refused, in several processes, and from a server."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from groupwise.config import make_recipe
from groupwise.conversations import Episode
from groupwise.data import Prompt, PromptBuilder
from groupwise.errors import ConfigError, DataError, TeacherServerError
from groupwise.model.tiny import tiny_config, tiny_model, tiny_tokenizer
from groupwise.tasks import Task
from groupwise.training import teacher as loading
from groupwise.training.early_checks import check_names
from groupwise.training.preflight import describe_run
from groupwise.training.rollout.episodes import _teacher_ids
from groupwise.training.store.arrivals import read_arrivals
from groupwise.training.trainer import Callback
from tests.distributed.forks import fork_ranks, values
from tests.training.runs import (
    ROWS,
    TASK,
    TOOL_TEMPLATE,
    RecordingDisplay,
    check_same,
    even,
    metrics_of,
    run_steps,
    small_recipe,
    small_trainer,
)
from tests.training.teacher_server import TeacherProcess
from tests.training.test_conversations import Counting

ALONE = {"loss": {"policy_coef": 0.0}, "evaluate": {"before_training": False, "every": 0}}
TWO = {"train": {"steps": 2}}
ANSWERS = [{**row, "answer": number, "note": "abc"[number % 3]} for number, row in enumerate(ROWS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny model with other weights."""
    place = tmp_path_factory.mktemp("teacher")
    tiny_model(7).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def taught(place: Path, teacher: object, *changes, **options):
    """A run with a teacher and without rewards."""
    distillation = {"distillation": {"weight": 1.0, "teacher": None if teacher is None else str(teacher)}}
    return small_trainer(place, ALONE, distillation, *changes, **{"rewards": [], **options})


def kl_of(place: Path) -> list[float]:
    return [row["distillation/kl"] for row in metrics_of(place) if "distillation/kl" in row]


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_teacher_alone_needs_no_rewards(tmp_path, folder):
    changes = {"optimizer": {"learning_rate": 3e-3}, "train": {"steps": 6}}
    trainer = taught(tmp_path / "run", folder, changes)
    result = trainer.run()
    kl = kl_of(tmp_path / "run")
    assert len(kl) == 6
    assert kl[-1] < kl[0] / 2
    rows = [row for row in metrics_of(tmp_path / "run") if row["step"]]
    assert all(row["loss"] == row["loss/distillation"] == row["distillation/kl"] for row in rows)
    assert all(row["signal/contributing"] == 1.0 and row["signal/tokens_not_computed"] < 1e-12 for row in rows)
    assert not any(name.startswith(("reward_", "rewards/", "warnings", "eval")) for row in rows for name in row)
    assert not any("reward" in row for row in rows)
    card = (result.model / "README.md").read_text()
    assert "- on-policy-distillation" in card
    assert "- grpo" not in card


@pytest.mark.slow
def test_rewards_of_a_run_with_a_teacher_alone_are_only_reported(tmp_path, folder):
    taught(tmp_path / "one", folder, TWO).run()
    taught(tmp_path / "other", folder, TWO, rewards=[even]).run()
    assert kl_of(tmp_path / "one") == kl_of(tmp_path / "other")
    assert all("reward" in row for row in metrics_of(tmp_path / "other") if "loss" in row)


@pytest.mark.slow
def test_a_weight_of_zero_changes_nothing(tmp_path, folder):
    small_trainer(tmp_path / "plain", TWO).run()
    trainer = small_trainer(tmp_path / "zero", TWO, {"distillation": {"teacher": str(folder)}})
    assert trainer.components.teacher is None
    assert trainer.display.heard("distillation.weight is 0")
    trainer.run()
    check_same(tmp_path / "plain", tmp_path / "zero", 2)


RESUMED = {
    "full": {},
    "sampled": {"distillation": {"kl": "sampled"}, "train": {"iterations": 2}},
    "reference": {
        "distillation": {"teacher": "reference", "show": "{prompt} {note}"},
        "reference": {"refresh_every": 1, "mix": 0.5},
    },
    "policy": {"distillation": {"teacher": "policy", "show": "answer"}, "loss": {"policy_coef": 1.0}},
    "adapter": {"distillation": {"teacher": "tiny"}, "model": {"lora": {"rank": 2}}, "loss": {"policy_coef": 1.0}},
    "asynchronous": {"distillation": {"kl": "sampled"}, "train": {"max_staleness": 1}},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in RESUMED])
def test_a_resumed_run_is_the_run_that_never_stopped(name, tmp_path, folder):
    task = Task("answers", ANSWERS)

    def trainer(place, **options):
        rewards = [even] if name in ("policy", "adapter") else []
        return taught(tmp_path / place, folder, RESUMED[name], task=task, rewards=rewards, **options)

    if name == "asynchronous":
        run_steps(trainer("short"), 2)
        resumed = trainer("short", resume=True)
        resumed.run()
        assert all(map(math.isfinite, kl_of(tmp_path / "short")))
        assert len(kl_of(tmp_path / "short")) == 4
        return
    trainer("long").run()
    run_steps(trainer("short"), 2)
    trainer("short", resume=True).run()
    check_same(tmp_path / "long", tmp_path / "short", 4)


@pytest.mark.slow
def test_a_teacher_that_changed_is_noticed(tmp_path):
    place = tmp_path / "teacher"
    tiny_tokenizer().save_pretrained(place)
    tiny_model(7).save_pretrained(place)
    run_steps(taught(tmp_path / "run", place), 1)
    tiny_model(8).save_pretrained(place)
    with pytest.raises(ConfigError, match=r"other inputs: teacher \("):
        taught(tmp_path / "run", place, resume=True)


@pytest.mark.slow
def test_a_server_that_has_another_model_is_noticed_and_one_that_has_moved_is_not(tmp_path, servers):
    run_steps(served(tmp_path / "run", servers.urls["vllm"], SAMPLED), 1)
    with pytest.raises(
        ConfigError, match=r"other inputs: teacher \(before: teacher, on a server, now: other, on a ser"
    ):
        served(tmp_path / "run", servers.urls["renamed"], SAMPLED, resume=True)
    assert served(tmp_path / "run", servers.urls["flaky"], SAMPLED, resume=True).run().steps == 2


@pytest.mark.slow
def test_the_weight_can_be_scheduled(tmp_path, folder):
    ramp = {"ramps": {"distillation.weight": {"from": 0.0, "to": 2.0, "steps": 2}}}
    trainer = small_trainer(tmp_path / "run", ramp, {"distillation": {"teacher": str(folder)}, "train": {"steps": 3}})
    trainer.run()
    rows = [row for row in metrics_of(tmp_path / "run") if "loss" in row]
    assert ["distillation/kl" in row for row in rows] == [False, True, True]
    assert rows[2]["loss/distillation"] == pytest.approx(2 * rows[2]["distillation/kl"])


@pytest.mark.slow
@pytest.mark.parametrize("kl", ["full", "sampled"])
@pytest.mark.parametrize("sharding", ["optimizer", "weights"])
def test_two_processes_learn_what_one_does(kl, sharding, tmp_path, folder):
    def go(place, **changes):
        shown = {"distillation": {"kl": kl, "show": "{prompt} {note}"}, "train": {"steps": 2, "batch_size": 3}}
        trainer = taught(tmp_path / place, folder, shown, changes, task=Task("answers", ANSWERS))
        trainer.run()

    values(fork_ranks(1, lambda: go("one")))
    values(fork_ranks(2, lambda: go("two", model={"sharding": sharding})))
    for one, two in zip(metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two"), strict=True):
        for name in ("distillation/kl", "loss", "grad_norm"):
            assert one[name] == pytest.approx(two[name], rel=2e-4, abs=1e-7), (name, one["step"])


def with_window(place: Path, room: int) -> Path:
    """A teacher that can read this many tokens at once."""
    model = tiny_model(7)
    model.config.max_position_embeddings = room
    model.save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def test_conversations_end_where_the_teachers_window_does(tmp_path):
    room, place = 48, with_window(tmp_path / "teacher", 48)
    options = {"environment": Counting, "callbacks": [lengths := ConversationLengths()]}
    taught(tmp_path / "run", place, {"optimizer": {"learning_rate": 3e-3}, "train": {"steps": 6}}, **options).run()
    kl, rows = kl_of(tmp_path / "run"), metrics_of(tmp_path / "run")
    assert kl[-1] < kl[0] / 2
    assert sum(row.get("episodes/token_limit", 0) for row in rows) > 1
    assert room - 8 < max(lengths.seen) <= room


class ConversationLengths(Callback):
    """The tokens of all conversations, with their prompts."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_rollout(self, trainer, batch, group_advantages):
        prompts = batch.prompt_ids.lengths[batch.prompt_of]
        self.seen += (prompts + batch.turns.ids.lengths).tolist()


class Greeting(Counting):
    """Puts messages behind the row's, the same for all samples of a prompt or others for each."""

    alike = True
    made = 0

    async def start(self, row, seed):
        await super().start(row, seed)
        Greeting.made += 1
        return [{"role": "user", "content": f" ({seed % 7 if self.alike else Greeting.made})"}]


class Differing(Greeting):
    alike = False


class Prompts(Callback):
    """The prompts of all batches, and those of the teacher, as texts."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def on_rollout(self, trainer, batch, group_advantages):
        pairs = zip(batch.prompt_ids.tolist(), batch.teacher_ids.tolist(), strict=True)
        self.seen += [tuple(map(trainer.components.tokenizer.decode, pair)) for pair in pairs]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("environment", [Counting, Greeting, Differing])
def test_a_teacher_of_conversations_is_shown_more(tmp_path, folder, environment, chat):
    """The environment's messages stand behind what it is shown."""
    template = tmp_path / "chat.jinja"
    template.write_text(TOOL_TEMPLATE)
    changes = {
        "distillation": {"show": "{prompt} {note}!"},
        "train": {"steps": 6},
        "optimizer": {"learning_rate": 3e-3},
        "data": {"chat": chat, "max_prompt_length": 2000},
        "environment": {"chat_template": str(template)} if chat else {},
    }
    options = {"environment": environment, "callbacks": [prompts := Prompts()]}
    taught(tmp_path / "run", folder, changes, task=Task("answers", ANSWERS), **options).run()
    for own, teachers in prompts.seen:
        row = next(row for row in ANSWERS if row["prompt"] in own)
        assert teachers == own.replace(row["prompt"], f"{row['prompt']} {row['note']}!")
        assert ("(" in own) == (environment is not Counting)
    kl = kl_of(tmp_path / "run")
    assert kl[-1] < kl[0]


def test_a_conversation_leaves_room_for_what_the_teacher_is_shown(tmp_path):
    room, place = 64, with_window(tmp_path / "teacher", 64)
    options = {"environment": Counting, "callbacks": [lengths := ConversationLengths()]}
    shown = {"distillation": {"show": "{prompt} {note} is shown"}, "train": {"steps": 3}}
    taught(tmp_path / "run", place, shown, task=Task("answers", ANSWERS), **options).run()
    longer = len(" a is shown")
    assert room - longer - 8 < max(lengths.seen) <= room - longer


def test_an_end_of_the_prompt_that_only_the_teacher_has_is_refused():
    prompt = Prompt((1, 2, 3), "", teacher_ids=(1, 2, 9, 4))
    with pytest.raises(ConfigError, match="changes the end of the prompt"):
        _teacher_ids(prompt, Episode([1, 2, 7, 3]))
    assert _teacher_ids(Prompt((1, 2, 3), "", teacher_ids=(1, 8, 8, 3)), Episode([1, 2, 7, 3])) == (1, 8, 8, 7, 3)


# --- what the teacher is shown ----------------------------------------------------------------------------------------


def shown_texts(show, rows, chat=False):
    tokenizer = tiny_tokenizer()
    if chat:
        tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    builder = PromptBuilder(tokenizer, chat=chat, max_prompt_length=60)
    prompts = builder.build(rows, "prompt")
    return [
        tokenizer.decode(prompt.teacher_ids)
        for prompt in loading.with_teacher_ids(prompts, rows, builder, show, "prompt")
    ]


def test_a_column_is_shown_in_a_standard_template_and_a_template_as_it_is():
    rows = [{"prompt": "1 + 1?", "answer": 2, "why": "x" * 100}]
    (text,) = shown_texts("answer", rows)
    assert text.startswith("1 + 1?\n\n")
    assert "reference:\n2\n\n" in text
    assert shown_texts("{prompt} It is {answer}. \\boxed{{answer}}", rows) == ["1 + 1? It is 2. \\boxed{answer}"]
    assert shown_texts("{why}", rows) == ["x" * 100]  # data.max_prompt_length is the student's


def test_of_messages_the_last_one_of_the_user_is_changed():
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    rows = [{"prompt": [*chat, {"role": "user", "content": "v"}], "answer": "w"}]
    assert shown_texts("{prompt}={answer}", rows, chat=True) == ["<system>s<user>u<assistant>a<user>v=w"]
    with pytest.raises(DataError, match="no message of the user"):
        shown_texts("{prompt}={answer}", [{"prompt": chat[:1], "answer": 1}], chat=True)


def test_columns_that_cannot_be_shown():
    with pytest.raises(ConfigError, match="'anwser', which the rows do not have; did you mean 'answer'"):
        shown_texts("{prompt} {anwser}", [{"prompt": "p", "answer": 1}])
    with pytest.raises(ConfigError, match="column 'solution'"):
        shown_texts("solution", [{"prompt": "p"}])
    with pytest.raises(DataError, match=r"row 2: .*'answer', not None"):
        shown_texts("answer", [{"prompt": "p", "answer": "a"}, {"prompt": "p", "answer": None}])


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"weight": 1}, "there is no teacher; set distillation.teacher"),
        ({"weight": 1, "teacher": "policy"}, "set distillation.show"),
        ({"weight": 1, "teacher": "reference"}, "set loss.kl_coef"),
        ({"weight": 1, "teacher": "x", "server": "http://h:1"}, "leave one of them out"),
        ({"weight": 1, "server": "host:8000"}, "not an address"),
    ],
)
def test_contradictions(table, words):
    with pytest.raises(ConfigError, match=words):
        make_recipe({"distillation": table})


def test_a_server_at_another_temperature_or_with_kept_sets():
    server = {"distillation": {"weight": 1, "server": "http://h:1", "kl": "sampled"}}
    with pytest.raises(ConfigError, match=r"sampling.temperature is 0.7, but a server"):
        make_recipe({**server, "sampling": {"temperature": 0.7}})
    with pytest.raises(ConfigError, match=r"masks.keep_sampling_mask"):
        make_recipe({**server, "masks": {"keep_sampling_mask": True}, "sampling": {"top_k": 3}})


def word_tokenizer(words):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", eos_token="z")


LETTERS = [*map(chr, range(97, 123)), "?"]


def test_a_teacher_with_another_tokenizer_is_refused_by_name(tmp_path):
    place = tmp_path / "other-teacher"
    tiny_model(7).save_pretrained(place)
    word_tokenizer(LETTERS).save_pretrained(place)
    with pytest.raises(ConfigError, match=r"other-teacher has another tokenizer than the model tiny.*in the teacher"):
        taught(tmp_path / "run", place)
    assert not (tmp_path / "run").exists()


def test_which_tokenizers_are_the_same():
    own, same = word_tokenizer(LETTERS), word_tokenizer(LETTERS)
    same.chat_template = "another {{ messages }}"
    loading.check_same_tokenizer("big", same, "small", own)
    same.add_special_tokens({"extra_special_tokens": ["<of the teacher>"]})
    loading.check_same_tokenizer("big", same, "small", own)  # the student never writes it
    with pytest.raises(ConfigError, match=r"1 token of 28 differ.*'<of the teacher>', is 27 .* does not exist"):
        loading.check_same_tokenizer("big", own, "small", same)
    swapped = word_tokenizer(["b", "a", *LETTERS[2:]])  # as many tokens, other ids
    with pytest.raises(ConfigError, match=r"big has another .* model small: 2 tokens of 27 .*'a', is 0 .* is 1 in the"):
        loading.check_same_tokenizer("big", swapped, "small", own)
    one, other = word_tokenizer(LETTERS), word_tokenizer(LETTERS)
    one.add_special_tokens({"extra_special_tokens": ["<a>", "<b>"]})
    other.add_special_tokens({"extra_special_tokens": ["<b>", "<a>"]})
    with pytest.raises(ConfigError, match=r"2 tokens of 29 differ, the first, '<b>'"):
        loading.check_same_tokenizer("big", one, "small", other)


@pytest.mark.parametrize("rows", [27, 64])
def test_rows_beyond_the_tokens_are_padding(rows):
    loading.check_vocabulary("big", rows, "small", word_tokenizer(LETTERS))


def test_a_teacher_without_a_row_for_a_token_is_refused(tmp_path):
    place = tmp_path / "teacher"
    model = tiny_model(7)
    model.resize_token_embeddings(model.config.vocab_size - 1)
    model.save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    with pytest.raises(ConfigError, match=r"embeddings of 258 tokens, but the model tiny has a token 258"):
        taught(tmp_path / "run", place)


@pytest.mark.slow
def test_a_teacher_whose_embeddings_are_padded_teaches_the_same(tmp_path, folder):
    model = tiny_model(7)
    model.resize_token_embeddings(model.config.vocab_size + 5)
    model.save_pretrained(tmp_path / "padded")
    tiny_tokenizer().save_pretrained(tmp_path / "padded")
    for name, teacher in (("padded-run", tmp_path / "padded"), ("plain-run", folder)):
        taught(tmp_path / name, teacher, TWO).run()
    assert kl_of(tmp_path / "padded-run") == pytest.approx(kl_of(tmp_path / "plain-run"), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kl", ["full", "sampled"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_teacher_in_another_dtype(dtype, kl, tmp_path, folder):
    for name, own in (("other", dtype), ("same", "auto")):
        trainer = taught(tmp_path / name, folder, TWO, {"distillation": {"kl": kl, "dtype": own}})
        assert trainer.components.teacher.handle.dtype == (getattr(torch, dtype) if name == "other" else torch.float32)
        trainer.run()
    first, second = kl_of(tmp_path / "other"), kl_of(tmp_path / "same")
    assert first == pytest.approx(second, rel=0.05 if dtype == "bfloat16" else 1e-4, abs=1e-3)
    assert first != second


def test_a_teacher_that_does_not_exist_is_found_in_a_second():
    with pytest.raises(ConfigError, match=r"distillation.teacher: there is no folder"):
        check_names(small_recipe({"distillation": {"weight": 1, "teacher": "./nowhere"}}))


def test_a_prompt_that_does_not_fit_the_teachers_window(tmp_path, folder):
    long = Task("long", [{"prompt": "p", "answer": "x" * 5000}])
    with pytest.raises(ConfigError, match=r"the teacher's longest prompt .*\(distillation.show\)"):
        taught(tmp_path / "run", folder, {"distillation": {"show": "answer"}, "train": {"batch_size": 1}}, task=long)


def test_nothing_to_learn_names_distillation(tmp_path):
    with pytest.raises(ConfigError, match=r"distillation\.weight are all 0"):
        small_trainer(tmp_path / "run", {"loss": {"policy_coef": 0.0, "kl_coef": 0.1}})


# --- before a run -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_memory_of_the_teacher_is_estimated(tmp_path, folder):
    import json

    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ANSWERS))
    settings = {"data": {"train": str(data)}, "distillation": {"weight": 1.0, "teacher": str(folder)}}
    lines = list(describe_run(small_recipe(ALONE, settings), timed=True, display=RecordingDisplay()))
    assert any(line.endswith("  teacher") for line in lines)
    weights = sum(weight.numel() for weight in tiny_model(7).parameters())
    assert f"teacher: {folder}, {weights:,} weights, torch.float32; the exact KL, weight 1" in lines
    shared = {"distillation": {"teacher": "tiny"}, "model": {"lora": {"rank": 2}}}
    lines = list(describe_run(small_recipe(ALONE, settings, shared), timed=False, display=RecordingDisplay()))
    assert not any(line.endswith("  teacher") for line in lines)
    assert any("takes no memory of its own" in line for line in lines)
    assert "teacher: tiny; the exact KL, weight 1" in lines
    itself = {"distillation": {"teacher": "policy", "show": "{prompt} = {answer}", "kl": "sampled"}}
    lines = list(describe_run(small_recipe(ALONE, settings, itself), timed=False, display=RecordingDisplay()))
    assert "teacher: the policy itself; the KL of the sampled tokens, weight 1" in lines
    assert any(line.endswith("as the teacher sees it: 'Say number 0:  = 0'") for line in lines)


# --- a server ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers(folder):
    with TeacherProcess(folder) as process:
        yield process


def served(place: Path, url: str, *changes, **options):
    return taught(place, None, {"distillation": {"server": url, "wait": 20.0}}, TWO, *changes, **options)


SAMPLED = {"distillation": {"kl": "sampled"}}


@pytest.mark.slow
def test_a_server_gives_what_its_model_gives(tmp_path, folder, servers):
    before = servers.requests("vllm")
    served(tmp_path / "sampled", servers.urls["vllm"], SAMPLED).run()
    assert servers.requests("vllm") - before >= 2 * 12
    all_but_one = {"distillation": {"top_k": tiny_config().vocab_size - 1}}
    served(tmp_path / "full", servers.urls["vllm"], all_but_one).run()
    for kl in ("sampled", "full"):
        taught(tmp_path / f"{kl}-local", folder, {"distillation": {"kl": kl}}, TWO).run()
        assert kl_of(tmp_path / kl) == pytest.approx(kl_of(tmp_path / f"{kl}-local"), rel=5e-3, abs=1e-4)


@pytest.mark.slow
def test_a_server_scores_conversations(tmp_path, folder, servers):
    served(tmp_path / "server", servers.urls["vllm"], SAMPLED, environment=Counting).run()
    taught(tmp_path / "local", folder, SAMPLED, TWO, environment=Counting).run()
    assert kl_of(tmp_path / "server") == pytest.approx(kl_of(tmp_path / "local"), rel=5e-3, abs=1e-4)


@pytest.mark.slow
def test_a_server_that_fails_now_and_then_or_has_only_echo(tmp_path, servers):
    for kind in ("flaky", "echo"):
        served(tmp_path / kind, servers.urls[kind], SAMPLED).run()
    assert kl_of(tmp_path / "echo") == pytest.approx(kl_of(tmp_path / "flaky"), rel=1e-5)
    with pytest.raises(ConfigError, match=r"only OpenAI's echo.*set distillation.kl to 'sampled'"):
        served(tmp_path / "no", servers.urls["echo"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    {
        "plain": r"'teacher' at http://127.* returns no log-probs of its prompts",
        "short": r"room for 8 tokens, .*--max-model-len",
        "odd": r"'teacher' at http://127.* has another tokenizer than the model tiny",
        "locked": r"401.*variable that distillation.api_key_env names",
    }.items(),
)
def test_servers_that_cannot_be_used(kind, words, tmp_path, servers):
    with pytest.raises(ConfigError, match=words):
        served(tmp_path / "run", servers.urls[kind], SAMPLED)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_key_of_a_server(tmp_path, servers, monkeypatch):
    key = {"distillation": {"kl": "sampled", "api_key_env": "TEACHER_KEY"}}
    with pytest.raises(ConfigError, match="variable TEACHER_KEY is not set"):
        served(tmp_path / "run", servers.urls["locked"], key)
    monkeypatch.setenv("TEACHER_KEY", "secret")
    assert served(tmp_path / "run", servers.urls["locked"], key).run().steps == 2


AT_THE_END = {"run": {"checkpoint_every": 0}, "train": {"steps": 4}}
DYING = {
    "sampled": SAMPLED,
    "top tokens beside GRPO": {"loss": {"policy_coef": 1.0}},
    "several updates": {"distillation": {"kl": "sampled"}, "train": {"update_per_step": True, "iterations": 2}},
    "rows by pass rate": {"distillation": {"kl": "sampled"}, "data": {"sampling": "pass_rate"}},
}


@pytest.mark.parametrize(
    "name", [name if name == "sampled" else pytest.param(name, marks=pytest.mark.slow) for name in DYING]
)
def test_a_server_that_dies_within_a_step_loses_no_finished_step(name, tmp_path, folder, servers):
    changes = DYING[name], AT_THE_END, {"distillation": {"wait": 0.5}}
    options = {"rewards": [even]} if name in ("top tokens beside GRPO", "rows by pass rate") else {}
    served(tmp_path / "long", servers.urls["vllm"], *changes, **options).run()
    finished = 2  # of 4 steps
    batches = 1 if name == "several updates" else finished
    at = 2 + 12 * batches + 5  # two requests when the run starts, and one for each of 12 completions
    with TeacherProcess(folder, [f"dies {at}"]) as process:
        url = process.urls[f"dies {at}"]
        trainer = served(tmp_path / "short", url, *changes, **options)
        with pytest.raises(TeacherServerError, match=rf"{url}.*has failed for 0.5 seconds .*--resume"):
            trainer.run()
    assert trainer.step == finished
    assert (tmp_path / "short" / f"checkpoint-{finished}").exists()
    resumed = served(tmp_path / "short", servers.urls["vllm"], *changes, resume=True, **options)
    resumed.run()
    assert resumed.display.heard(f"resuming after step {finished}")
    check_same(tmp_path / "long", tmp_path / "short", 4)


@pytest.mark.slow
def test_an_asynchronous_run_whose_teacher_dies_goes_on_with_the_groups_it_had(tmp_path, folder, servers):
    ahead = SAMPLED, AT_THE_END, {"train": {"max_staleness": 1}, "distillation": {"wait": 0.5}}
    with TeacherProcess(folder, ["dies 31"]) as process:
        trainer = served(tmp_path / "run", process.urls["dies 31"], *ahead)
        with pytest.raises(TeacherServerError, match="resume"):
            trainer.run()
    assert (tmp_path / "run" / f"checkpoint-{trainer.step}").exists()
    waiting = [group.number for group in trainer.collector._groups]
    resumed = served(tmp_path / "run", servers.urls["vllm"], *ahead, resume=True)
    with resumed:
        list(resumed.steps())
    taken = [number for arrival in read_arrivals(str(tmp_path / "run")).values() for number in arrival.taken]
    assert set(waiting) <= set(taken)
    assert len(taken) == len(set(taken)) == 4 * 3


@pytest.mark.slow
def test_processes_whose_teacher_dies_save_together(tmp_path, folder, servers):
    changes = SAMPLED, AT_THE_END, {"distillation": {"wait": 0.5}}

    def go(place, url, resume=False):
        def run():
            served(tmp_path / place, url, *changes, resume=resume).run()

        return fork_ranks(2, run)

    values(go("long", servers.urls["vllm"]))
    with TeacherProcess(folder, ["dies 33"]) as process:  # each process makes two requests at the start
        results = go("short", process.urls["dies 33"])
    for result in results:  # the server fails one or both
        assert re.match("TeacherServerError|RankError: rank . failed while asking the teacher", result.error), results
    assert any("TeacherServerError" in result.error for result in results)
    assert (tmp_path / "short" / "checkpoint-2").exists()
    values(go("short", servers.urls["vllm"], resume=True))
    check_same(tmp_path / "long", tmp_path / "short", 4)


@pytest.mark.slow
def test_held_out_rows_without_grades_and_rewards_are_not_evaluated(tmp_path, folder):
    trainer = taught(tmp_path / "run", folder, TWO, {"evaluate": {"every": 1}}, task=replace(TASK, train=ROWS))
    assert trainer.metric is None
    assert trainer.run().held_out == {}
