"""What is recorded of single tokens: as by the plain computation, with any tokenizer, and without changing the run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from groupwise.analysis.run_reader import RunReader
from groupwise.model import load_tokenizer
from groupwise.tasks import Task
from groupwise.training.monitor import token_details
from groupwise.training.monitor.token_details import choose_prompts, token_ends
from groupwise.training.store.token_files import TokenRow
from groupwise.training.trainer import Callback, Trainer
from groupwise.training.update.policy_masks import masked_in_updates
from groupwise.training.update.result import UpdateResult
from tests.training.runs import ROWS, check_same, checkpoint_of, even, metrics_of, run_steps, small_trainer

CORPUS = ["the answer is 42, the answer is 17.", "so the end 🙂🙂 is near", "größer, naïve café — 日本語"] * 3
EVERY_STEP = {"run": {"save_tokens_every": 1}}
KL = {"loss": {"kl_coef": 0.1}, "sampling": {"temperature": 0.8}}


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, as GPT-2, Llama 3 and Qwen have: an emoji may be one token or up to four."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|pad|>"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")


def metaspace() -> PreTrainedTokenizerFast:
    """Words that begin with ▁, as in SentencePiece: the first one of a text loses its space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=120, special_tokens=["</s>"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


BYTES, WORDS = byte_level(), metaspace()
END = BYTES.eos_token_id


def texts_of(tokenizer: Any, ids: list[int]) -> list[str]:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    ends = token_ends(tokenizer, ids, text)
    return TokenRow(1, 0, 0, 0, text, ids, ends, [], [], [], None).texts


def test_a_split_character_belongs_to_its_last_token():
    assert texts_of(BYTES, BYTES("the end 🙂").input_ids)[-1] == " 🙂"  # seen in training, so it is one token
    ids = BYTES("a🚀b").input_ids
    assert texts_of(BYTES, ids) == ["a", *[""] * (len(ids) - 3), "🚀", "b"]
    assert len(ids) > 4


def test_special_tokens_have_no_text():
    ids = [END, *BYTES("the").input_ids, END, *BYTES("🚀").input_ids, END, END]
    *_, last, end, another = texts_of(BYTES, ids)
    assert (texts_of(BYTES, ids)[0], last, end, another) == ("", "🚀", "", "")
    assert texts_of(BYTES, [END] * 40) == [""] * 40
    assert texts_of(BYTES, []) == []


def test_bytes_that_are_no_text():
    rocket = BYTES("🚀").input_ids
    assert texts_of(BYTES, rocket[:2]) == ["\ufffd", ""]  # cut off in the middle of a character
    ids = [rocket[1], rocket[1], *BYTES("b").input_ids]
    assert texts_of(BYTES, ids) == ["\ufffd", "\ufffd", "b"]
    long = texts_of(BYTES, [rocket[0]] * 50)
    assert "".join(long) == BYTES.decode([rocket[0]] * 50)


@given(st.text(alphabet="the 42🙂🚀ßé日.\n", max_size=20))
@example("🙂 🙂🚀🚀")
def test_the_tokens_of_a_text_are_the_text(text):
    """Against the literal version: the text of the first tokens, as far as it is that of all."""
    ids = BYTES(text).input_ids
    prefixes = [BYTES.decode(ids[: number + 1]).rstrip("\ufffd") for number in range(len(ids))]
    assert token_ends(BYTES, ids, text) == [len(prefix) for prefix in prefixes]


@pytest.mark.parametrize("tokenizer", [BYTES, WORDS, load_tokenizer("tiny")], ids=["bytes", "words", "tiny"])
@given(data=st.data())
def test_any_ids(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    text = tokenizer.decode(ids, skip_special_tokens=True)
    ends = token_ends(tokenizer, ids, text)
    assert len(ends) == len(ids)
    assert ends == sorted(ends)
    assert not ends or ends[-1] == len(text)


def test_words_that_begin_with_a_space():
    ids = WORDS("the answer is 42").input_ids
    texts = texts_of(WORDS, ids)
    assert "".join(texts) == "the answer is 42"
    assert texts[0][0] == "t"
    assert any(text.startswith(" ") for text in texts[1:])


class Shouting:
    """A tokenizer whose earlier text changes with later tokens, so that no window is enough."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        text = "".join(chr(number) for number in ids)
        return text.upper() if "!" in text else text


def test_a_tokenizer_that_changes_its_mind():
    ids = [ord(letter) for letter in "Go on!"]
    assert token_ends(Shouting(), ids, "GO ON!") == [1, 1, 1, 1, 1, 6]


def test_the_prompts_with_the_largest_spread():
    rewards = torch.tensor([0.0, 0.1, 1.0, 1.0, math.nan, math.nan, 0.0, 1.0, 0.0, 0.1], dtype=torch.float64)
    assert choose_prompts(rewards, 2, 1) == [3]
    assert choose_prompts(rewards, 2, 2) == [0, 3]  # of equal ones the first
    assert choose_prompts(rewards, 2, 4) == [0, 1, 3, 4]
    assert choose_prompts(rewards, 2, 99) == [0, 1, 2, 3, 4]


class Plain(Callback):
    """Computes each step's log-probs, entropy and reference by the model's own forward, one completion at a time."""

    def __init__(self) -> None:
        self.expected: dict[tuple[int, int, int], list[torch.Tensor]] = {}

    def on_rollout(self, trainer: Trainer, batch: Any, group_advantages: Any) -> None:
        assert trainer.reference is not None
        for number, ids in enumerate(batch.ids):
            prompt = number // batch.samples
            inputs = torch.tensor([*batch.prompts[prompt].ids, *ids.tolist()])[None]
            logps = self._distribution(trainer, inputs, len(ids))
            with trainer.reference.in_place():
                reference = self._distribution(trainer, inputs, len(ids))
            values = [x.gather(1, ids[:, None])[:, 0] for x in (logps, reference)]
            values.append(-(logps.exp() * logps).sum(1))
            self.expected[trainer.step + 1, prompt, number % batch.samples] = values

    @torch.no_grad()
    def _distribution(self, trainer: Trainer, inputs: torch.Tensor, length: int) -> torch.Tensor:
        logits = trainer.components.model(input_ids=inputs).logits[0, -length - 1 : -1].double()
        return (logits / trainer.recipe.sampling.temperature).log_softmax(-1)


def test_the_numbers_of_each_token(tmp_path):
    plain = Plain()
    trainer = small_trainer(tmp_path / "run", KL, EVERY_STEP, {"train": {"steps": 2}}, callbacks=[plain])
    trainer.run()
    reader = RunReader(tmp_path / "run")
    assert reader.token_steps == [1, 2]
    for step in (1, 2):
        rows, samples = reader.tokens(step), reader.rollouts(step)
        assert len(rows) == 2 * 4
        spread = {n: {row["reward"] for row in samples if row["prompt_number"] == n} for n in range(3)}
        assert all(len(spread[row.prompt_number]) > 1 for row in rows)
        for row in rows:
            (sample,) = [s for s in samples if (s["prompt_number"], s["sample"]) == (row.prompt_number, row.sample)]
            assert (row.completion, row.row, len(row.ids)) == (
                sample["completion"],
                sample["row"],
                sample["completion_tokens"],
            )
            assert "".join(row.texts) == row.completion
            logps, reference, entropy = plain.expected[step, row.prompt_number, row.sample]
            assert row.policy_logps == pytest.approx(logps.tolist(), abs=1e-5)
            assert row.sampler_logps == pytest.approx(logps.tolist(), abs=1e-5)  # on-policy
            assert row.ref_logps == pytest.approx(reference.tolist(), abs=1e-5)
            assert row.entropy == pytest.approx(entropy.tolist(), abs=1e-5)
    apart = [abs(a - b) for row in reader.tokens(2) for a, b in zip(row.policy_logps, row.ref_logps, strict=True)]
    assert max(apart) > 1e-3


def test_kept_sets_are_those_of_sampling(tmp_path):
    kept = {"masks": {"keep_sampling_mask": True}, "sampling": {"top_k": 3}, "train": {"steps": 1}}
    small_trainer(tmp_path / "run", kept, EVERY_STEP).run()
    for row in RunReader(tmp_path / "run").tokens(1):
        assert row.policy_logps == pytest.approx(row.sampler_logps, abs=1e-5)
        assert max(row.entropy) <= math.log(3) + 1e-6
        assert row.ref_logps is None


def test_when_and_how_many(tmp_path):
    two = {"run": {"save_tokens_every": 2, "save_tokens_prompts": 1}}
    small_trainer(tmp_path / "two", two, {"train": {"steps": 3}}).run()
    reader = RunReader(tmp_path / "two")
    assert reader.token_steps == [1, 3]
    assert len({row.prompt_number for row in reader.tokens(1)}) == 1
    none = {"run": {"save_rollouts": False, "save_tokens_every": 1}, "train": {"steps": 1}}
    small_trainer(tmp_path / "none", none).run()
    assert not {"tokens", "rollouts", "evaluations"} & {path.name for path in (tmp_path / "none").iterdir()}


DROPOUT = {"model": {"lora": {"rank": 4, "dropout": 0.2}}}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [KL, DROPOUT], ids=["kl", "dropout"])
def test_the_run_is_the_same_without(tmp_path, changes):
    for name, every in (("with", 1), ("without", 0)):
        small_trainer(tmp_path / name, changes, {"run": {"save_tokens_every": every}}).run()
    assert RunReader(tmp_path / "with").token_steps == [1, 2, 3, 4]
    assert not (tmp_path / "without" / "tokens").exists()
    one, other = (checkpoint_of(tmp_path / name, 4) for name in ("with", "without"))
    assert one.keys() == other.keys()
    assert all(
        torch.equal(x, other[name]) if isinstance(x, torch.Tensor) else x == other[name] for name, x in one.items()
    )
    assert repr(metrics_of(tmp_path / "with")) == repr(metrics_of(tmp_path / "without"))


@pytest.mark.slow
def test_a_resumed_run_records_the_same(tmp_path):
    small_trainer(tmp_path / "a", KL, EVERY_STEP).run()
    run_steps(small_trainer(tmp_path / "b", KL, EVERY_STEP, {"run": {"checkpoint_every": 2}}), 3)
    reader = RunReader(tmp_path / "b")
    assert (reader.token_steps, reader.evaluation_steps, reader.checkpoints.keys()) == ([1, 2, 3], [0, 2], {2})
    small_trainer(tmp_path / "b", KL, EVERY_STEP, resume=True).run()
    check_same(tmp_path / "a", tmp_path / "b", 4)
    assert RunReader(tmp_path / "b").token_steps == [1, 2, 3, 4]


def test_later_files_are_deleted_on_resume(tmp_path):
    run_steps(small_trainer(tmp_path / "run", EVERY_STEP, {"run": {"checkpoint_every": 2}}), 3)
    files = sorted(path.name for kind in ("tokens", "rollouts") for path in (tmp_path / "run" / kind).iterdir())
    assert files == sorted(2 * [f"step-00000{number}.parquet" for number in (1, 2, 3)])
    (tmp_path / "run" / "evaluations" / "step-000003.parquet").touch()
    with small_trainer(tmp_path / "run", EVERY_STEP, resume=True) as trainer:
        trainer._start()
    reader = RunReader(tmp_path / "run")
    assert (reader.token_steps, reader.rollout_steps, reader.evaluation_steps) == ([1, 2], [1, 2], [0, 2])


@pytest.mark.slow
@pytest.mark.parametrize("failures", [2, 10**6])
def test_running_out_of_memory(tmp_path, monkeypatch, failures):
    budgets: list[int] = []
    compute = token_details.completion_logps

    def hungry(*arguments: Any, token_budget: int, **options: Any) -> Any:
        budgets.append(token_budget)
        if len(budgets) <= failures:
            raise torch.OutOfMemoryError("out of memory")
        return compute(*arguments, token_budget=token_budget, **options)

    small_trainer(tmp_path / "plain", KL, {"run": {"save_tokens_every": 0}}).run()
    monkeypatch.setattr(token_details, "completion_logps", hungry)
    trainer = small_trainer(tmp_path / "run", KL, EVERY_STEP)
    budget = trainer.updater.token_budget
    trainer.run()
    assert budgets[:3] == [budget, budget // 2, budget // 4]
    assert trainer.updater.token_budget == budget
    steps = RunReader(tmp_path / "run").token_steps
    assert steps == ([1, 2, 3, 4] if failures == 2 else [])
    assert sum("memory ran out for the details of single tokens" in text for text in trainer.display.said) == (
        not steps
    )
    one, other = (checkpoint_of(tmp_path / name, 4) for name in ("run", "plain"))
    assert all(torch.equal(x, other[name]) for name, x in one.items() if isinstance(x, torch.Tensor))


def test_samples_that_the_update_has_masked(tmp_path):
    """They have an advantage, so the batch alone does not show it. The metric also counts samples without one."""
    drift = {"masks": {"off_policy": "reference_drift", "off_policy_threshold": 0.02}}
    small_trainer(tmp_path / "run", KL, drift, {"train": {"iterations": 1}}).run()
    reader = RunReader(tmp_path / "run")
    masked = {step: [row for row in reader.rollouts(step) if row["masked_out"] == "off_policy"] for step in (1, 4)}
    assert masked[1] == []  # the policy is the reference
    assert 0 < len(masked[4]) <= round(12 * reader.training_rows[3]["masks/off_policy"])
    assert all(row["contributes"] and row["advantage"] for row in masked[4])


def test_samples_masked_in_every_pass():
    parts = [SimpleNamespace(empty=False), SimpleNamespace(empty=True), SimpleNamespace(empty=False)]
    masked = [{"off_policy": [0, 1]}, {"off_policy": [7]}, {"off_policy": [1, 2]}, {}]  # two passes over two of them
    assert masked_in_updates(parts, [UpdateResult(masked_out=names) for names in masked]) == {1: "off_policy"}
    assert masked_in_updates([], []) == {}


def test_grades_and_held_out_completions(tmp_path):
    grades = {"even": lambda row, text: None if "e" in text else len(text) % 2 == 0, "any": lambda *_: True}
    task = Task("graded", ROWS, ROWS[:3], grades=grades, metric="even", rewards=[])
    small_trainer(tmp_path / "run", {"evaluate": {"samples": 2}}, task=task, rewards=[even]).run()
    reader = RunReader(tmp_path / "run")
    assert reader.metric == "even"
    for row in reader.rollouts(2):
        assert row["grade/even"] is grades["even"]({}, row["completion"])
        assert row["grade/any"] is True
    assert reader.evaluation_steps == [0, 2, 4]
    answers = reader.evaluation_answers(4)
    assert [(row["row"], row["sample"]) for row in answers] == [(n, s) for n in range(3) for s in range(2)]
    assert [row["prompt"] for row in answers[::2]] == [row["prompt"] for row in ROWS[:3]]
    assert all(row["grade/even"] is grades["even"]({}, row["completion"]) for row in answers)
    (last,) = [row for row in reader.evaluations if row["step"] == 4]
    assert last["eval/even"] == pytest.approx(sum(bool(row["grade/even"]) for row in answers) / 6)
    assert {"completion_tokens", "stop_reason", "where"} <= answers[0].keys()
