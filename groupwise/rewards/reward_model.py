"""A reward model: a sequence classifier that was trained to tell good answers from bad ones.

Inputs are padded on the right, so that positions count from the first real token. A decoder's score is read at the last
real token, which transformers finds with the padding token of the model's config. Many models have none; then a token
that occurs in no row of the batch is the padding, and a row's score is the same as when it is scored alone.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.chat_template import TemplateError, render_chats
from groupwise.errors import ConfigError, InputError, check_choice, check_integer
from groupwise.model.checks import check_model_folder
from groupwise.paths import kind_of
from groupwise.rewards.options import check_after
from groupwise.rewards.text import THINKING_ENDS, answer_of, prompt_messages, prompt_text
from groupwise.text import error_reason, excerpt

SCALES = ("raw", "sigmoid")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LONGEST = 10**6  # tokenizers without a limit claim 10^30
SAMPLE = ("What is the capital of France?", "Paris.")

Encoding = dict[str, list[int]]


def reward_model(
    *,
    model: str,
    device: str = "auto",
    dtype: str = "auto",
    batch_size: int = 16,
    max_length: int = 2048,
    chat: bool | None = None,
    label: int | str | None = None,
    scale: str = "raw",
    after: str | None = THINKING_ENDS,
    trust_remote_code: bool = False,
) -> Callable[..., list[float]]:
    """A reward from a sequence classifier of transformers: a folder, or owner/name on the hub. It is loaded here.

    A model with one output gives that number ("raw") or its sigmoid. With several outputs, ``label`` chooses one by its
    index or its name: the reward is its log-probability ("raw") or probability ("sigmoid"). For multi-label and
    regression models it is the output itself or its sigmoid.

    Prompt and answer go through the tokenizer's chat template if it has one (``chat`` overrides this), are a pair of
    texts if it has a separator, or else one text. Only the text after the last ``after`` of an answer is scored. A text
    longer than ``max_length`` tokens or the model's context loses its beginning; reward_model/truncated is their share.

    ``device`` "auto" is a GPU if there is one, and ``dtype`` "auto" float32 on the CPU, elsewhere that of the weights.
    """
    check_choice("scale", scale, SCALES, ConfigError)
    check_choice("dtype", dtype, DTYPES, ConfigError)
    check_after(after)
    check_integer("batch_size", batch_size, 1, ConfigError)
    check_integer("max_length", max_length, 1, ConfigError)
    source = _check_source(model)
    tokenizer, classifier = load_classifier(source, _check_device(device), dtype, trust_remote_code)
    encoder = _PairEncoder(tokenizer, classifier, chat, max_length, source)
    column = _output_column(classifier.config, label, source)
    _check_sample(classifier, encoder, source)
    one_at_a_time = threading.Lock()  # a call changes the tokenizer's truncation and the classifier's padding token

    def reward_model(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float]:
        with one_at_a_time:
            rows = [
                encoder.encode(prompt, answer_of(completion, after))
                for prompt, completion in zip(prompts, completions, strict=True)
            ]
            logits = _logits(classifier, [encoding for encoding, _ in rows], batch_size)
        if log_metric is not None and rows:
            log_metric("reward_model/truncated", sum(cut for _, cut in rows) / len(rows))
        return _scores(logits, classifier.config, column, scale).tolist()

    return reward_model


class _PairEncoder:
    """Turns a prompt and an answer into the classifier's input."""

    def __init__(self, tokenizer: Any, classifier: Any, chat: bool | None, max_length: int, source: str) -> None:
        if chat is not None and not isinstance(chat, bool):
            raise ConfigError(f"chat must be true, false or left out, got {excerpt(chat)}")
        if chat and not tokenizer.chat_template:
            raise ConfigError(f"chat is true, but the tokenizer of {source} has no chat template")
        self.tokenizer = tokenizer
        self.chat = bool(tokenizer.chat_template) if chat is None else chat
        self.pair = not self.chat and tokenizer.sep_token is not None
        self.accepted = set(inspect.signature(classifier.forward).parameters)
        window = getattr(classifier.config, "max_position_embeddings", None)
        limits = (max_length, tokenizer.model_max_length, window)
        self.limit = min(limit for limit in limits if isinstance(limit, int) and 0 < limit < LONGEST)
        least = tokenizer.num_special_tokens_to_add(pair=self.pair) + 2
        if self.limit < least:
            raise ConfigError(f"max_length is {self.limit}, but {source} needs at least {least}")

    def encode(self, prompt: Any, answer: str) -> tuple[Encoding, bool]:
        """The tokens of a row, and whether it was truncated."""
        if self.pair:
            encoding, cut = self._pair(prompt_text(prompt), answer)
        else:
            text = self._rendered(prompt, answer) if self.chat else f"{prompt_text(prompt)}\n\n{answer}"
            encoding, cut = self._single(text)
        return {name: list(values) for name, values in encoding.items() if name in self.accepted}, cut

    def _rendered(self, prompt: Any, answer: str) -> str:
        messages = [*prompt_messages(prompt), {"role": "assistant", "content": answer}]
        try:
            return render_chats(self.tokenizer, [messages])[0]
        except TemplateError as error:  # many refuse some roles or an order of roles
            if error.is_limit:
                raise InputError(
                    f"the reward model's chat template {error}, so it was stopped; set chat = false"
                ) from error
            roles = ", ".join(message["role"] for message in messages)
            raise InputError(f"the reward model's chat template refuses the roles {roles}: {error}") from error

    def _single(self, text: str) -> tuple[Encoding, bool]:
        """Encode one text. A chat template adds special tokens itself; truncation keeps the first special token."""
        encoding = self.tokenizer(text, add_special_tokens=not self.chat, truncation=False, verbose=False)
        number = len(encoding["input_ids"])
        if number <= self.limit:
            return encoding, False
        start = 1 if encoding["input_ids"][0] == self.tokenizer.bos_token_id else 0
        kept = [*range(start), *range(number - self.limit + start, number)]
        return {name: [values[position] for position in kept] for name, values in encoding.items()}, True

    def _pair(self, first: str, second: str) -> tuple[Encoding, bool]:
        encoding = self.tokenizer(first, second, truncation=False, verbose=False)
        excess = len(encoding["input_ids"]) - self.limit
        if excess <= 0:
            return encoding, False
        first_ids = self.tokenizer(first, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        self.tokenizer.truncation_side = "left"
        # The answer is truncated only if it is too long by itself.
        strategy = "only_first" if len(first_ids) > excess else "longest_first"
        return self.tokenizer(first, second, truncation=strategy, max_length=self.limit, verbose=False), True


def _logits(classifier: Any, rows: Sequence[Encoding], batch_size: int) -> Tensor:
    """The classifier's outputs ``(B, L)`` in float32 on the CPU; rows of similar length share a batch."""
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]["input_ids"]))
    logits = torch.empty(len(rows), classifier.config.num_labels)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        logits[batch] = _forward(classifier, [rows[row] for row in batch])
    return logits


def _forward(classifier: Any, rows: Sequence[Encoding]) -> Tensor:
    config = classifier.config.get_text_config()
    original = config.pad_token_id
    used = {token for row in rows for token in row["input_ids"]}
    padding = next(token for token in range(len(used) + 1) if token not in used) if original is None else original
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {
        name: torch.tensor(
            [row[name] + [padding if name == "input_ids" else 0] * (longest - len(row[name])) for row in rows],
            device=classifier.device,
        )
        for name in rows[0]
    }
    config.pad_token_id = padding
    try:
        with torch.inference_mode():
            logits: Tensor = classifier(**batch).logits
    finally:
        config.pad_token_id = original
    return logits.float().cpu()


def _scores(logits: Tensor, config: Any, column: int, scale: str) -> Tensor:
    kind = getattr(config, "problem_type", None)
    if config.num_labels > 1 and kind not in ("regression", "multi_label_classification"):
        logps = logits.log_softmax(-1)[:, column]
        return logps.exp() if scale == "sigmoid" else logps
    return logits[:, column].sigmoid() if scale == "sigmoid" else logits[:, column]


def _output_column(config: Any, label: object, source: str) -> int:
    """The index of the output that is the reward."""
    labels = getattr(config, "id2label", None) or {}
    names = [str(labels.get(number, number)) for number in range(config.num_labels)]
    if label is None and len(names) == 1:
        return 0
    if isinstance(label, str) and label in names:
        return names.index(label)
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
        return label
    problem = "label must choose one" if label is None else f"label cannot be {excerpt(label)}"
    raise ConfigError(
        f"{source} has {len(names)} output{'s' if len(names) > 1 else ''}, so {problem}: a number from 0 to "
        f"{len(names) - 1} or one of {', '.join(map(repr, names))}"
    )


def _check_source(model: object) -> str:
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model must be a folder or owner/name on the hub, got {excerpt(model)}")
    path = os.path.expanduser(model)
    if kind_of(path, ConfigError) is not None:
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ConfigError(f"{path} has no config.json, so it is not the folder of a reward model")
        return path
    if model.count("/") != 1 or model.startswith(("/", ".", "~")):  # only owner/name is ever requested from the hub
        raise ConfigError(f"there is no folder {path}; a model on the hub is written owner/name")
    return model


def _check_device(device: Any) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(1, device=device).device
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = error_reason(error)
        raise ConfigError(f"device {device!r} cannot be used: {reason}; leave it out, or use 'cpu'") from error


def load_classifier(source: str, device: torch.device, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """The tokenizer and the classifier, in eval mode on its device."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    bars: Any = logging  # its functions have no types
    enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    precision = "float32" if dtype == "auto" and device.type == "cpu" else dtype
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": os.path.isdir(source)}
    try:
        if os.path.isdir(source) and not trust_remote_code:
            check_model_folder(Path(source), torch.float32 if precision == "float32" else torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            source, dtype=precision, use_safetensors=True, output_loading_info=True, **options
        )
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # transformers, the hub and remote code raise anything, and tokenizers panics
        reason = f"{type(error).__name__}: {error_reason(error)}"
        raise ConfigError(f"the reward model {source} cannot be loaded: {reason}") from error
    finally:
        if enabled:
            bars.enable_progress_bar()
    classifier, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"{source} is not a reward model: its weights lack {', '.join(missing[:3])}, which would be random; it may "
            "be a base language model"
        )
    classifier.config.use_cache = False
    return tokenizer, classifier.to(device).eval()


def _check_sample(classifier: Any, encoder: _PairEncoder, source: str) -> None:
    """Score a sample, so that a model that cannot be used is refused before the run."""
    try:
        logits = _logits(classifier, [encoder.encode(*SAMPLE)[0]] * 2, 2)
    except InputError as error:
        raise ConfigError(f"{source}: {error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error_reason(error)}"
        raise ConfigError(f"{source} cannot score a sample: {reason}") from error
    if not bool(logits.isfinite().all()):
        raise ConfigError(f"{source} scores a sample with {logits[0].tolist()}; another dtype may help")
