"""A reward model: a classifier of texts that was trained to tell good answers from bad ones.

Its inputs are padded on the right, which is right for encoders and decoders alike: positions count from the first real
token. A decoder's score is read at its last real token, which transformers finds by the padding token of the model's
settings. Models without one are common; they get a token as padding that no row of the batch has, so that the last real
token is found whatever it is, as it is when a row is scored alone.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import ConfigError, InputError, check_choice
from groupwise.rewards.text import excerpt
from groupwise.rewards.writing import THINKING_ENDS, answer_of, check_mark, prompt_messages, prompt_text

SCALES = ("raw", "sigmoid")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LONGEST = 10**6  # tokenizers without a limit say that theirs is 10^30
SAMPLE = ("What is the capital of France?", "Paris.")

Encoding = dict[str, list[int]]
Log = Callable[[str, float], None]


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

    A model with one output gives that number ("raw") or its sigmoid. With several outputs ``label`` says which one
    counts, by its number or its name in the model's settings: its log-probability ("raw") or probability ("sigmoid");
    a model whose outputs do not exclude each other (multi-label, regression) gives the output itself or its sigmoid.

    Prompt and answer go through the tokenizer's chat template if it has one (``chat`` says yes or no); otherwise they
    are a pair of texts where the tokenizer has a separator, and one text with an empty line between them where it has
    not. Only what follows the last ``after`` of an answer is scored. What is longer than ``max_length`` tokens, or than
    the model can read, loses its beginning, the prompt's first; reward_model/truncated is the share of such rows.

    ``device`` "auto" is the first CUDA device, if there is one, where the model needs its share of the memory.
    ``dtype`` "auto" is float32 on the CPU, and elsewhere what the weights are saved in.
    """
    check_choice("scale", scale, SCALES, ConfigError)
    check_choice("dtype", dtype, ("auto", *DTYPES), ConfigError)
    check_mark(after)
    for name, value in (("batch_size", batch_size), ("max_length", max_length)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, got {excerpt(value)}")
    place = _checked_source(model)
    target = _device(device)
    tokenizer, classifier = _load(place, target, dtype, trust_remote_code)
    reader = _Reader(tokenizer, classifier, chat, max_length, place)
    column = _column(classifier.config, label, place)
    _try(classifier, reader, place)

    def reward_model(
        prompts: Sequence[Any], completions: Sequence[Any], log_metric: Log | None = None, **_: Any
    ) -> list[float]:
        rows = [
            reader.encode(prompt, answer_of(completion, after))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        if log_metric is not None and rows:
            log_metric("reward_model/truncated", sum(cut for _, cut in rows) / len(rows))
        logits = _logits(classifier, [encoding for encoding, _ in rows], batch_size)
        return _scores(logits, classifier.config, column, scale).tolist()

    return reward_model


class _Reader:
    """Turns a prompt and an answer into what the classifier reads."""

    def __init__(self, tokenizer: Any, classifier: Any, chat: bool | None, max_length: int, place: str) -> None:
        if chat is not None and not isinstance(chat, bool):
            raise ConfigError(f"chat must be true, false or left out, got {excerpt(chat)}")
        if chat and not tokenizer.chat_template:
            raise ConfigError(f"chat is true, but the tokenizer of {place} has no chat template")
        self.tokenizer = tokenizer
        self.chat = bool(tokenizer.chat_template) if chat is None else chat
        self.pair = not self.chat and tokenizer.sep_token is not None
        self.taken = set(inspect.signature(classifier.forward).parameters)
        window = getattr(classifier.config, "max_position_embeddings", None)
        limits = (max_length, tokenizer.model_max_length, window)
        self.limit = min(limit for limit in limits if isinstance(limit, int) and 0 < limit < LONGEST)
        least = tokenizer.num_special_tokens_to_add(pair=self.pair) + 2
        if self.limit < least:
            raise ConfigError(f"max_length is {self.limit}, but {place} needs at least {least}")

    def encode(self, prompt: Any, answer: str) -> tuple[Encoding, bool]:
        """The tokens of a row, and whether some of them had to be left out."""
        if self.pair:
            encoding, cut = self._pair(prompt_text(prompt), answer)
        else:
            text = self._rendered(prompt, answer) if self.chat else f"{prompt_text(prompt)}\n\n{answer}"
            encoding, cut = self._single(text)
        return {name: list(values) for name, values in encoding.items() if name in self.taken}, cut

    def _rendered(self, prompt: Any, answer: str) -> str:
        messages = [*prompt_messages(prompt), {"role": "assistant", "content": answer}]
        try:
            rendered: str = self.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # whatever a template raises: many refuse roles or an order of them
            roles = ", ".join(message["role"] for message in messages)
            raise InputError(f"the reward model's chat template refuses the roles {roles}: {error}") from error
        return rendered

    def _single(self, text: str) -> tuple[Encoding, bool]:
        """A template writes special tokens itself; the token that begins every text is kept where the rest is cut."""
        encoding = self.tokenizer(text, add_special_tokens=not self.chat, truncation=False, verbose=False)
        number = len(encoding["input_ids"])
        if number <= self.limit:
            return encoding, False
        start = 1 if encoding["input_ids"][0] == self.tokenizer.bos_token_id else 0
        kept = [*range(start), *range(number - self.limit + start, number)]
        return {name: [values[each] for each in kept] for name, values in encoding.items()}, True

    def _pair(self, first: str, second: str) -> tuple[Encoding, bool]:
        whole = self.tokenizer(first, second, truncation=False, verbose=False)
        number = len(whole["input_ids"])
        if number <= self.limit:
            return whole, False
        over = number - self.limit
        of_first = len(self.tokenizer(first, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])
        self.tokenizer.truncation_side = "left"
        how = "only_first" if of_first > over else "longest_first"  # the answer is cut only if it is too long itself
        return self.tokenizer(first, second, truncation=how, max_length=self.limit, verbose=False), True


def _logits(classifier: Any, rows: Sequence[Encoding], batch_size: int) -> Tensor:
    """The outputs of the classifier ``(B, L)`` in float32 on the CPU; rows of about the same length share a batch."""
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]["input_ids"]))
    found = torch.empty(len(rows), classifier.config.num_labels)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        found[chosen] = _forward(classifier, [rows[row] for row in chosen])
    return found


def _forward(classifier: Any, rows: Sequence[Encoding]) -> Tensor:
    config = classifier.config.get_text_config()
    own = config.pad_token_id
    used = {token for row in rows for token in row["input_ids"]}
    padding = next(token for token in range(len(used) + 1) if token not in used) if own is None else own
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
        config.pad_token_id = own
    return logits.float().cpu()


def _scores(logits: Tensor, config: Any, column: int, scale: str) -> Tensor:
    kind = getattr(config, "problem_type", None)
    if config.num_labels > 1 and kind not in ("regression", "multi_label_classification"):
        chances = logits.log_softmax(-1)[:, column]
        return chances.exp() if scale == "sigmoid" else chances
    outputs = logits[:, column]
    return outputs.sigmoid() if scale == "sigmoid" else outputs


def _column(config: Any, label: object, place: str) -> int:
    """Which output counts."""
    known = getattr(config, "id2label", None) or {}
    names = [str(known.get(number, number)) for number in range(config.num_labels)]
    if label is None and len(names) == 1:
        return 0
    if isinstance(label, str) and label in names:
        return names.index(label)
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
        return label
    given = "label must say which counts" if label is None else f"label cannot be {excerpt(label)}"
    raise ConfigError(
        f"{place} has {len(names)} output{'s' if len(names) > 1 else ''}, so {given}: a number from 0 to "
        f"{len(names) - 1} or one of {', '.join(map(repr, names))}"
    )


def _checked_source(model: object) -> str:
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model must be a folder or owner/name on the hub, got {excerpt(model)}")
    path = Path(os.path.expanduser(model))
    if path.exists():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} has no config.json, so it is not the folder of a reward model")
        return str(path)
    if model.count("/") != 1 or model.startswith(("/", ".", "~")):  # only owner/name is ever asked for on a network
        raise ConfigError(f"there is no folder {path}; a model on the hub is written owner/name")
    return model


def _device(device: Any) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device {device!r} cannot be used: {reason}; leave it out, or use 'cpu'") from error
    return found


def _load(place: str, device: torch.device, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """The tokenizer and the classifier, in eval mode on its device."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging as bars_of_transformers

    bars: Any = bars_of_transformers  # its functions have no types
    drawn = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    precision: Any = DTYPES.get(dtype, torch.float32 if device.type == "cpu" else "auto")
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": os.path.isdir(place)}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            place, dtype=precision, use_safetensors=True, output_loading_info=True, **options
        )
    except Exception as error:  # transformers, the hub and remote code raise anything
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"the reward model {place} cannot be loaded: {type(error).__name__}: {reason}") from error
    finally:
        if drawn:
            bars.enable_progress_bar()
    classifier, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"{place} is no reward model: its weights lack {', '.join(missing[:3])}, which would start from random "
            "numbers, and so would the rewards; it may be the language model that one was to be trained from"
        )
    if getattr(classifier.config, "use_cache", None):
        classifier.config.use_cache = False
    return tokenizer, classifier.to(device).eval()


def _try(classifier: Any, reader: _Reader, place: str) -> None:
    """Score one sample, so that a model that cannot be used is known before a run begins."""
    try:
        logits = _logits(classifier, [reader.encode(*SAMPLE)[0]] * 2, 2)
    except InputError as error:
        raise ConfigError(f"{place}: {error}") from error
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{place} cannot score a sample: {type(error).__name__}: {reason}") from error
    if not bool(logits.isfinite().all()):
        raise ConfigError(f"{place} scores a sample with {logits[0].tolist()}; another dtype may help")
