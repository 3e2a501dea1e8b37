"""The rewards of a `GRPOTrainer`: functions, async functions, sequence classifiers and their ids, with TRL's names."""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from decimal import Decimal
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from groupwise.chat_template import render_chats
from groupwise.errors import ConfigError, RewardError
from groupwise.rewards import RewardFunction
from groupwise.rewards.contract import RowReward
from groupwise.rewards.reward_model import load_classifier
from groupwise.text import excerpt

log = logging.getLogger("groupwise")

BATCH = 16  # texts that a reward model scores at once


class InvalidRewardError(RewardError, ValueError, TypeError):
    """A reward lacks an argument, or did not return one number per completion. TRL raises a ValueError or TypeError."""


@contextmanager
def reward_errors_as_in_trl() -> Iterator[None]:
    """Raise a reward function's own error, as TRL does, for the ``except`` of a script; a note says where it was.

    If the function raised nothing, what is wrong with its result is an `InvalidRewardError`.
    """
    try:
        yield
    except RewardError as error:
        own = error.__cause__
        if own is None:
            raise InvalidRewardError(str(error)) from None
        own.add_note(f"groupwise: {error}")
        context = own.__context__
        try:
            raise own
        finally:
            own.__context__ = context  # without the error above, which the note repeats


class RewardWeights:
    """``trainer.reward_weights``, which a script or a callback may change while the run trains."""

    def __init__(self, given: Sequence[Any] | None, count: int, environments: int = 0) -> None:
        """``count`` of reward functions, to which the rewards of ``environments`` are added with a weight of 1."""
        if given is not None and len(given) != count:
            raise ConfigError(
                f"reward_weights has {len(given)} numbers for {count} reward_funcs, and these must match: give one for "
                "each"
            )
        self._count = count + environments
        self._given = [1.0] * count if given is None else [_weight(value) for value in given]
        self._given += [1.0] * environments
        self._tensor = torch.tensor(self._given, dtype=torch.float32)

    @property
    def tensor(self) -> Tensor:
        return self._tensor

    @tensor.setter
    def tensor(self, values: Any) -> None:
        tensor = torch.as_tensor(values, dtype=torch.float32)
        if tensor.shape != (self._count,):
            raise ConfigError(
                f"reward_weights has the shape {tuple(tensor.shape)}; expected ({self._count},), one number for each "
                "of reward_funcs"
            )
        self._tensor = tensor

    def of(self, number: int) -> float:
        """The current weight of a reward; the number that was given, if it was not changed, rather than its float32."""
        now = self._tensor[number]
        given = self._given[number]
        return given if bool(now == torch.tensor(given, dtype=now.dtype)) else _weight(now.item())


class TrlReward(RewardFunction):
    """A reward with TRL's rules for what it returns, and a weight that can change."""

    metric_name: str  # of the means that are logged: rewards with one name share them
    _weights: RewardWeights
    _place: int
    _noticed: set[str]

    def __init__(
        self, name: str, function: Callable[..., Any], metric_name: str, weights: RewardWeights, place: int
    ) -> None:
        values = {"name": name, "function": function, "metric_name": metric_name}
        for attribute, value in {**values, "_weights": weights, "_place": place, "_noticed": set()}.items():
            object.__setattr__(self, attribute, value)  # the class is frozen

    @property
    def weight(self) -> float:
        return self._weights.of(self._place)

    @property
    def remedy(self) -> str:
        return "return None for completions that it does not score"

    def check(self, result: Any, rows: int) -> list[RowReward]:
        """As in TRL, a tensor may be a column, and NaN is None."""
        if isinstance(result, Tensor):
            result = result.detach()
        if hasattr(result, "reshape") and tuple(getattr(result, "shape", ())) == (rows, 1):
            result = result.reshape(rows)
        if hasattr(result, "shape") and tuple(result.shape) == (rows,) and hasattr(result, "tolist"):
            result = result.tolist()
        if isinstance(result, Iterable) and not isinstance(result, (str, bytes, Mapping, Set, Tensor)):
            values = map(self._number, result)
            result = list(values) if hasattr(result, "__len__") else values
        return super().check(result, rows)

    def _number(self, value: Any) -> Any:
        """One number of a result: of a tensor with one element or a decimal the number, and None for NaN."""
        elements = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 0)
        if elements == 1 and hasattr(value, "item"):
            value = value.item()
        if isinstance(value, Decimal):
            value = float(value)
        if not isinstance(value, Real) or not math.isnan(value):
            return value
        if not self._noticed:
            self._noticed.add("NaN")
            log.warning(
                "reward %r returned NaN, which is None here, as in TRL: not a reward of that completion", self.name
            )
        return None


class ModelReward:
    """A sequence classifier as a reward, scored as in TRL: the first output for prompt and completion as one text, or
    for their messages in the reward model's chat template."""

    def __init__(self, classifier: Any, tokenizer: Any, name: str, template_kwargs: dict[str, Any]) -> None:
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        classifier.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        self.classifier, self.tokenizer, self.__name__ = classifier, tokenizer, name
        self.template_kwargs = template_kwargs

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        if isinstance(prompts[0], str):
            texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        else:
            chats = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
            texts = render_chats(self.tokenizer, chats, **self.template_kwargs)
        scores: list[float] = []
        for start in range(0, len(texts), BATCH):
            inputs = self.tokenizer(
                text=texts[start : start + BATCH],
                return_tensors="pt",
                padding=True,
                padding_side="right",
                add_special_tokens=False,
            ).to(self.classifier.device)
            with torch.inference_mode():
                scores += self.classifier(**inputs).logits[:, 0].float().tolist()
        return scores


def load_reward_models(
    reward_funcs: Any, processing_classes: Any, args: Any, device: torch.device, *, needed: bool = True
) -> tuple[list[Any], list[Any]]:
    """The rewards with each model id loaded, and a tokenizer for each model."""
    rewards = [] if reward_funcs is None else reward_funcs
    rewards = list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]
    if needed and not rewards:
        raise ConfigError(
            "reward_funcs is missing: give a function, a reward model, or a list of these; or an environment_factory "
            "whose environment has a method get_reward()"
        )
    tokenizers = processing_classes if isinstance(processing_classes, (list, tuple)) else [processing_classes]
    tokenizers = [None] * len(rewards) if processing_classes is None else list(tokenizers)
    if len(tokenizers) != len(rewards):
        raise ConfigError(
            f"reward_processing_classes has {len(tokenizers)} tokenizers for {len(rewards)} reward_funcs, and their "
            "numbers must match: give one for each, None for a function"
        )
    for number, reward in enumerate(rewards):
        if isinstance(reward, str):
            rewards[number], tokenizers[number] = _load(reward, tokenizers[number], args, device)
        elif _is_model(reward):
            tokenizers[number] = tokenizers[number] or _tokenizer_of(reward, args)
            reward.to(device).eval()
        elif not callable(reward):
            raise ConfigError(
                f"reward_funcs has {excerpt(reward)} ({type(reward).__name__}); a reward is a function, a sequence "
                "classification model, or its id"
            )
    return rewards, tokenizers


def make_rewards(
    rewards: Sequence[Any], tokenizers: Sequence[Any], weights: RewardWeights, template_kwargs: dict[str, Any]
) -> list[RewardFunction]:
    """The loaded rewards with names. Of two with one name, the second gets a number, and their metrics are one."""
    functions: list[RewardFunction] = []
    used: Counter[str] = Counter()
    for number, (reward, tokenizer) in enumerate(zip(rewards, tokenizers, strict=True)):
        name = reward_name(reward)
        used[name] += 1
        unique = name if used[name] == 1 else f"{name}_{used[name]}"
        function = ModelReward(reward, tokenizer, unique, template_kwargs) if _is_model(reward) else reward
        functions.append(TrlReward(unique, function, name, weights, number))
    return functions


def reward_name(reward: Any) -> str:
    """As TRL names a reward in its metrics: a function's name, a class's, or the last part of a model's id."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    if _is_model(reward):
        return str(getattr(reward.config, "_name_or_path", "")).rstrip("/").split("/")[-1] or type(reward).__name__
    return str(getattr(reward, "__name__", type(reward).__name__))


def _weight(value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, (str, bytes)) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"reward_weights has {excerpt(value)}; a weight is a finite number")
    return number


def _is_model(reward: Callable[..., Any] | Any) -> bool:
    return isinstance(reward, torch.nn.Module)


def _load(source: str, tokenizer: Any, args: Any, device: torch.device) -> tuple[Any, Any]:
    own_tokenizer, classifier = load_classifier(source, device, "auto", args.trust_remote_code)
    if classifier.config.num_labels != 1:
        raise ConfigError(
            f"the reward model {source} has {classifier.config.num_labels} outputs, and reward_funcs takes models with "
            "one; load it yourself and score with a function"
        )
    return classifier, tokenizer or own_tokenizer


def _tokenizer_of(model: Any, args: Any) -> Any:
    from transformers import AutoTokenizer

    source = getattr(model.config, "_name_or_path", "")
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=args.trust_remote_code)
    except Exception as error:  # the hub and the tokenizers package raise anything
        raise ConfigError(
            f"the tokenizer of the reward model {source or type(model).__name__} cannot be loaded; pass it in "
            f"reward_processing_classes ({type(error).__name__})"
        ) from error
