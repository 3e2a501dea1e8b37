"""Tiny local models and data sets under the names that scripts have, and running a script with one import changed."""

from __future__ import annotations

import contextlib
import copy
import io
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from groupwise.model.tiny import tiny_config, tiny_model, tiny_tokenizer
from tests.conversations.families import BY_NAME

SCRIPTS = Path(__file__).parent / "scripts"
POLICY, REWARD_MODEL = "Qwen/Qwen3-0.6B", "Skywork/Skywork-Reward-V2-Qwen3-0.6B"
TOOL_POLICY = "Qwen/Qwen2.5-0.5B-Instruct"  # with a chat template for tools
TEXTS = [f"Say number {number}: " for number in range(8)]
DATA = {
    "trl-lib/tldr": {"prompt": TEXTS},
    "trl-lib/DeepMath-103K": {"prompt": [[{"role": "user", "content": text}] for text in TEXTS]},
    "openai/gsm8k": {"question": TEXTS, "answer": TEXTS},
}


def tool_tokenizer() -> Any:
    """A small tokenizer with a chat template for tools: Qwen2.5's as TRL knows it, where TRL is installed."""
    tokenizer = copy.deepcopy(BY_NAME["qwen2_5"].tokenizer())  # TRL changes it
    tokenizer.pad_token = "<|endoftext|>"
    if find_spec("trl") is not None:
        tokenizer.chat_template = (files("trl") / "chat_templates" / "qwen2_5.jinja").read_text()
    return tokenizer


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny policy and a reward model by the names of hub models."""
    import torch
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("hub")
    tiny_model().save_pretrained(folder / POLICY)
    torch.manual_seed(0)
    config = tiny_config()
    config.num_labels, config.pad_token_id = 1, tiny_tokenizer().pad_token_id
    LlamaForSequenceClassification(config).save_pretrained(folder / REWARD_MODEL)
    for name in (POLICY, REWARD_MODEL):
        tiny_tokenizer().save_pretrained(folder / name)
    tokenizer = tool_tokenizer()
    tokenizer.save_pretrained(folder / TOOL_POLICY)
    config = tiny_config()
    config.vocab_size, config.bos_token_id = len(tokenizer), None
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    LlamaForCausalLM(config).save_pretrained(folder / TOOL_POLICY)
    return folder


@pytest.fixture
def workplace(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder in which the models can be loaded by their names, and `load_dataset` needs no network."""
    for part in models.iterdir():
        (tmp_path / part.name).symlink_to(part)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", load_local)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    return tmp_path


def load_local(name: str, *_: Any, streaming: bool = False, **__: Any) -> Any:
    data = Dataset.from_dict(DATA[name])
    return data.to_iterable_dataset() if streaming else data


def run_script(name: str, library: str = "groupwise.trl", **changes: str) -> dict[str, Any]:
    """Run a script with its import of trl changed to that of ``library``; what it has defined.

    changes: other texts for those that only hold on another machine, such as the address of a server.
    """
    text = (SCRIPTS / f"{name}.py").read_text()
    for before, after in {"from trl import": f"from {library} import", **changes}.items():
        assert before in text
        text = text.replace(before, after)
    text = text.replace("bf16=False", "bf16=False, report_to='none', disable_tqdm=True, use_cpu=True")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(text, f"{name}.py", "exec"), namespace)
    return namespace


def log_keys(trainer: Any) -> list[list[str]]:
    """The names of the metrics of each log."""
    return [sorted(entry) for entry in trainer.state.log_history]
