"""The rewards of a `GRPOTrainer`: functions, async functions, sequence classifiers and their ids, with TRL's names."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from groupwise.chat_template import render_chats
from groupwise.errors import ConfigError
from groupwise.rewards import RewardFunction
from groupwise.rewards.reward_model import load_classifier
from groupwise.text import excerpt

BATCH = 16  # texts that a reward model scores at once


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
    reward_funcs: Any, processing_classes: Any, args: Any, device: torch.device
) -> tuple[list[Any], list[Any]]:
    """The rewards with each model id loaded, and a tokenizer for each model."""
    rewards = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    if reward_funcs is None or not rewards:
        raise ConfigError("reward_funcs is missing: give a function, a reward model, or a list of these")
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
    rewards: Sequence[Any], tokenizers: Sequence[Any], weights: Sequence[float] | None, template_kwargs: dict[str, Any]
) -> list[RewardFunction]:
    """The loaded rewards with names and weights. Of two with one name, the second gets a number."""
    if weights is not None and len(weights) != len(rewards):
        raise ConfigError(
            f"reward_weights has {len(weights)} numbers for {len(rewards)} reward_funcs, and these must match: give "
            "one for each"
        )
    functions: list[RewardFunction] = []
    used: Counter[str] = Counter()
    for number, (reward, tokenizer) in enumerate(zip(rewards, tokenizers, strict=True)):
        name = reward_name(reward)
        used[name] += 1
        unique = name if used[name] == 1 else f"{name}_{used[name]}"
        function = ModelReward(reward, tokenizer, unique, template_kwargs) if _is_model(reward) else reward
        functions.append(RewardFunction(unique, function, 1.0 if weights is None else float(weights[number])))
    return functions


def reward_name(reward: Any) -> str:
    """As TRL names a reward in its metrics: a function's name, a class's, or the last part of a model's id."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    if _is_model(reward):
        return str(getattr(reward.config, "_name_or_path", "")).rstrip("/").split("/")[-1] or type(reward).__name__
    return str(getattr(reward, "__name__", type(reward).__name__))


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
