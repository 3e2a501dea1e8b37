"""Reward models: tiny, untrained classifiers of transformers, against the same models called one row at a time."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.errors import ConfigError, InputError
from groupwise.model.tiny import tiny_config, tiny_model, tiny_tokenizer
from groupwise.rewards import Scorer, make_reward, named, reward_model

PROMPTS = ["Write a haiku.", "Why is the sky blue? Explain it to a child of five.", "Hi", "Name a river in Africa."]
ANSWERS = ["Old pond.", "Because blue light is scattered most by the air, and so it comes from everywhere.", "", "Nile"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *".?!", *LETTERS, *(f"##{letter}" for letter in LETTERS)]


def save(model: Any, tokenizer: Any, folder: Path) -> str:
    with torch.no_grad():
        for weight in model.parameters():  # large enough for scores that differ
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A decoder with one output, a chat template and a padding token."""
    from transformers import LlamaForSequenceClassification

    config = tiny_config()
    config.num_labels = 1
    return save(LlamaForSequenceClassification(config), tiny_tokenizer(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A decoder with absolute positions, without a padding token and without a chat template."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.pad_token = None
    config = GPT2Config(vocab_size=259, n_positions=256, n_embd=32, n_layer=2, n_head=2, num_labels=1)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 257, 258, None
    return save(GPT2ForSequenceClassification(config), tokenizer, tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """An encoder with three named outputs."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(WORDS)})
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        num_labels=3,
        id2label={0: "bad", 1: "fair", 2: "good"},
        label2id={"bad": 0, "fair": 1, "good": 2},
    )
    return save(BertForSequenceClassification(config), tokenizer, folder)


def load(folder: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder).eval()


def row_logits(folder: str, encode: Any) -> torch.Tensor:
    """The outputs of each row alone, from transformers."""
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder)
    with torch.no_grad():
        rows = [encode(tokenizer, *row) for row in zip(PROMPTS, ANSWERS, strict=True)]
        return torch.cat([model(**row).logits for row in rows])


def chat(tokenizer, prompt, answer):
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    return {"input_ids": torch.tensor([ids])}


def pair(tokenizer, prompt, answer):
    return tokenizer(prompt, answer, return_tensors="pt")


def joined(tokenizer, prompt, answer):
    return {"input_ids": torch.tensor([tokenizer(f"{prompt}\n\n{answer}")["input_ids"]])}


CASES = {
    "llama": (chat, {}),
    "gpt2": (joined, {}),
    "bert": (pair, {"label": "good"}),
}


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 2, 16])
@pytest.mark.parametrize("name", CASES)
def test_a_batch_has_the_scores_of_its_rows_alone(request, name, batch_size):
    folder = request.getfixturevalue(name)
    encode, options = CASES[name]
    logits = row_logits(folder, encode)
    expected = logits[:, 0] if name != "bert" else logits.log_softmax(-1)[:, 2]
    assert expected.std() > 1e-3
    rewards = reward_model(model=folder, device="cpu", batch_size=batch_size, **options)(PROMPTS, ANSWERS)
    torch.testing.assert_close(torch.tensor(rewards), expected, atol=1e-5, rtol=1e-5)


def test_scales(llama, bert):
    raw = row_logits(llama, chat)[:, 0]
    rewards = reward_model(model=llama, device="cpu", scale="sigmoid")(PROMPTS, ANSWERS)
    torch.testing.assert_close(torch.tensor(rewards), 1 / (1 + (-raw).exp()), atol=1e-5, rtol=1e-5)
    outputs = row_logits(bert, pair)
    probabilities = outputs.exp() / outputs.exp().sum(1, keepdim=True)
    for label in (0, "fair"):
        rewards = reward_model(model=bert, device="cpu", scale="sigmoid", label=label)(PROMPTS, ANSWERS)
        expected = probabilities[:, {0: 0, "fair": 1}[label]]
        torch.testing.assert_close(torch.tensor(rewards), expected, atol=1e-5, rtol=1e-5)


def test_half_precision_is_close(gpt2):
    raw = row_logits(gpt2, joined)[:, 0]
    rewards = torch.tensor(reward_model(model=gpt2, device="cpu", dtype="bfloat16")(PROMPTS, ANSWERS))
    assert (rewards != raw).any()
    torch.testing.assert_close(rewards, raw, atol=0.1, rtol=0.05)


def test_regression_outputs(bert, tmp_path):
    for file in Path(bert).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "problem_type": "regression"}))
    outputs = row_logits(bert, pair)
    rewards = reward_model(model=str(tmp_path), device="cpu", label=1)(PROMPTS, ANSWERS)
    torch.testing.assert_close(torch.tensor(rewards), outputs[:, 1], atol=1e-5, rtol=1e-5)


def test_conversations_and_thinking(llama):
    reward = reward_model(model=llama, device="cpu")
    messages = [{"role": "user", "content": PROMPTS[0]}]
    thinking = [{"role": "assistant", "content": f"<think>hm</think>\n{ANSWERS[0]}"}]
    system = [{"role": "system", "content": "Be brief."}, *messages]
    plain, same, other = reward([PROMPTS[0], messages, system], [ANSWERS[0], thinking, ANSWERS[0]])
    assert plain == pytest.approx(same, abs=1e-5)
    assert abs(plain - other) > 1e-4
    without = reward_model(model=llama, device="cpu", after="")([PROMPTS[0]], [thinking])[0]
    assert abs(plain - without) > 1e-4


def test_without_the_chat_template(llama):
    rewards = reward_model(model=llama, device="cpu", chat=False)(PROMPTS, ANSWERS)
    expected = row_logits(llama, joined)[:, 0]
    torch.testing.assert_close(torch.tensor(rewards), expected, atol=1e-5, rtol=1e-5)


def test_the_share_of_truncated_rows_is_logged(llama):
    """In bytes: <|start|>, user, a newline, the prompt, <|end|>, then the same for the assistant."""
    length = 1 + 5 + 20 + 1 + 1 + 10 + 5 + 1
    scorer = Scorer([named(make_reward("reward_model", {"model": llama, "device": "cpu", "max_length": length}))])
    scores = scorer.score(["p" * 20, "q" * 21], ["x" * 5, "x" * 5], {})
    assert scorer.functions[0].name == "reward_model"
    assert scores.metrics == {"reward_model/truncated": 0.5}
    assert scores.rewards.isfinite().all()


def test_a_conversation_loses_its_beginning_except_the_first_token(llama):
    tokenizer = tiny_tokenizer()
    ids = chat(tokenizer, "p" * 50, "x" * 20)["input_ids"][0].tolist()
    kept = torch.tensor([[257, *ids[-29:]]])  # <|start|> begins every text
    with torch.no_grad():
        expected = load(llama)(input_ids=kept).logits[0, 0]
    rewards = reward_model(model=llama, device="cpu", max_length=30)(["p" * 50], ["x" * 20])
    assert rewards[0] == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize(
    ("prompt", "answer", "kept"),
    [
        ("a b c d e f g", "x y z", ("e f g", "x y z")),  # 9 tokens with [CLS] and two [SEP]: the prompt is truncated
        ("a b", "q r s t u v w x y z", None),
    ],
)
def test_a_pair_loses_the_beginning_of_its_prompt(bert, prompt, answer, kept):
    logged = {}
    reward = reward_model(model=bert, device="cpu", max_length=9, label=0)
    rewards = reward([prompt], [answer], log_metric=logged.__setitem__)
    assert logged == {"reward_model/truncated": 1.0}
    if kept is None:  # an answer that is too long by itself loses its beginning, too
        assert rewards != reward([prompt], [answer.replace("z", "q")])
        assert rewards == reward([prompt], ["a b c " + answer])
    else:
        assert rewards == pytest.approx(reward([kept[0]], [kept[1]]), abs=1e-6)


def test_a_text_longer_than_the_context_of_the_model(gpt2, bert):
    assert len(reward_model(model=gpt2, device="cpu", max_length=100_000)(["a" * 1000], ["b" * 10])) == 1
    assert len(reward_model(model=bert, device="cpu", label=0)(["a " * 1000], ["b " * 10])) == 1


def test_nothing_to_score(llama):
    assert reward_model(model=llama, device="cpu")([], []) == []


def test_loading_leaves_the_random_state_alone(llama):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    reward_model(model=llama, device="cpu")(PROMPTS, ANSWERS)
    assert torch.equal(before, torch.get_rng_state())


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_language_model_is_not_a_reward_model(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"is not a reward model: .*score\.weight, .* a base language model"):
        reward_model(model=str(tmp_path), device="cpu")


def test_missing_and_other_folders(tmp_path):
    for missing in (str(tmp_path / "none"), "./none", "none", "a/b/c", "~/none"):
        with pytest.raises(ConfigError, match=r"there is no folder .*; a model on the hub is written owner/name"):
            reward_model(model=missing)
    with pytest.raises(ConfigError, match=r"has no config\.json, so it is not the folder of a reward model"):
        reward_model(model=str(tmp_path))
    with pytest.raises(ConfigError, match="model must be a folder or owner/name on the hub, got 5"):
        reward_model(model=5)


def test_damaged_weights(llama, tmp_path):
    for file in Path(llama).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    tensors["score.weight"] = tensors["score.weight"] * torch.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"scores a sample with \[nan\]"):
        reward_model(model=str(tmp_path), device="cpu")
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"the reward model .* cannot be loaded: "):
        reward_model(model=str(tmp_path), device="cpu")


def test_a_template_that_refuses_a_role(llama, tmp_path):
    for file in Path(llama).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    template = tmp_path / "chat_template.jinja"
    strict = "{%- if messages[0]['role'] == 'system' -%}{{- raise_exception('No system role') -}}{%- endif -%}"
    template.write_text(strict + template.read_text())
    reward = reward_model(model=str(tmp_path), device="cpu")
    with pytest.raises(InputError, match="chat template refuses the roles system, user, assistant: No system role"):
        reward([[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]], ["a"])
    template.write_text("{{- raise_exception('Never') -}}")
    with pytest.raises(ConfigError, match="chat template refuses the roles user, assistant: Never"):
        reward_model(model=str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bert", {}, r"has 3 outputs, so label must choose one: a number from 0 to 2 or one of 'bad', 'fair', "),
        ("bert", {"label": 3}, "so label cannot be 3: a number from 0 to 2"),
        ("bert", {"label": "great"}, "so label cannot be 'great'"),
        ("llama", {"label": 1}, "has 1 output, so label cannot be 1: a number from 0 to 0 or one of 'LABEL_0'"),
        ("bert", {"label": 0, "chat": True}, "chat is true, but the tokenizer of .* has no chat template"),
        ("llama", {"chat": "yes"}, "chat must be true, false or left out, got 'yes'"),
        ("llama", {"scale": "softmax"}, "unknown scale 'softmax'"),
        ("llama", {"dtype": "int8"}, "unknown dtype 'int8'"),
        ("llama", {"device": "gpu"}, "device 'gpu' cannot be used"),
        ("llama", {"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ("llama", {"max_length": True}, "max_length must be an integer"),
        ("bert", {"label": 0, "max_length": 4}, "max_length is 4, but .* needs at least 5"),
        ("llama", {"after": 1}, "after must be the text that an answer follows"),
    ],
)
def test_invalid_options(request, name, options, message):
    with pytest.raises(ConfigError, match=message):
        reward_model(model=request.getfixturevalue(name), **{"device": "cpu", **options})


def test_threads_that_score_at_the_same_time_get_the_scores_of_one(bert):
    """Asynchronous rollouts score several groups at once; some of these pairs are truncated, others are not."""
    score = reward_model(model=bert, max_length=16, label="good")
    calls = [(["word " * (3 + 9 * (number % 3))] * 4, ["an answer " * (1 + number)] * 4) for number in range(12)]
    expected = [score(*call) for call in calls]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda call: score(*call), calls * 3)) == expected * 3
