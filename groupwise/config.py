"""The recipe: every setting of a run, typed, with the sentence that ``--help`` shows.

A recipe is TOML. Three layers make it: the algorithm's preset, the file, and what the command line overrides
(``--section.key value``); the later wins, key by key. A key that does not exist is an error that names its nearest
neighbour. A recipe is never changed once it is made: a schedule makes a new one for each step.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from groupwise.algorithms import ALGORITHMS, find_algorithm
from groupwise.core.advantages import BASELINES, COMBINATIONS, SCALES
from groupwise.core.kl import ESTIMATORS
from groupwise.core.losses import DENOMINATORS, LOSSES, RATIOS
from groupwise.core.masks import OFF_POLICY_RULES
from groupwise.errors import ConfigError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class LoraSection(Section):
    rank: Count = 16
    """width of the adapter"""
    alpha: Positive = 32.0
    """how loudly the adapter speaks, relative to its rank"""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """dropout in front of the adapter; any makes on-policy ratios differ from 1"""
    targets: str | list[str] = "all-linear"
    """which layers get an adapter, by the last part of their name"""
    rslora: bool = False
    """scale by alpha / √rank"""


class ModelSection(Section):
    source: str = "tiny"
    """a folder, a .gguf file, a name of `groupwise models list`, "tiny", or a hub id owner/name"""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """what the model computes in; auto is bfloat16 where the device has it in hardware, else float32"""
    device: str = "auto"
    """auto is the first CUDA device where there is one, else the CPU"""
    gradient_checkpointing: bool = True
    """compute activations again in the backward pass instead of keeping them: less memory, a third more time"""
    compile: bool | None = None
    """fuse layers with torch.compile; by default on a GPU in half precision"""
    lora: LoraSection | None = None
    """train a small adapter instead of all weights ([model.lora], needs the extra `lora`)"""
    trust_remote_code: bool = False
    """run Python code that comes with a model"""
    revision: str | None = None
    """the version of a model on the hub"""


class DataSection(Section):
    train: str | None = None
    """rows to train on: .jsonl, .json, .parquet, .csv, a folder of them, or a hub data set owner/name"""
    held_out: str | None = None
    """rows to evaluate on; never trained on"""
    subset: str | None = None
    """the configuration of a hub data set"""
    train_split: str | None = None
    """the split of a hub data set to train on"""
    held_out_split: str | None = None
    """the split of a hub data set to evaluate on"""
    train_rows: Count | None = None
    """use only the first so many rows (for generated tasks: make so many)"""
    held_out_rows: Count | None = None
    """evaluate on only the first so many rows (for generated tasks: make so many)"""
    prompt: str = "prompt"
    """the column that holds the prompt: a text or a list of chat messages"""
    system_prompt: str | None = None
    """a system message in front of every prompt"""
    chat: bool | None = None
    """put a text prompt into the chat template as the user's message; by default if the model has one"""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """passed on to the chat template, e.g. {enable_thinking = false}"""
    max_prompt_length: Count | None = 512
    """the longest prompt, in tokens"""
    too_long: Literal["error", "drop", "cut"] = "error"
    """what becomes of a longer prompt: stop with an error, leave it out, or keep its end"""
    shuffle: bool = True
    """a new order of the rows in every epoch, from the run's seed"""


class RewardSection(Section):
    function: str
    """module:function or file.py:function; a file is looked for beside the recipe first"""
    weight: Finite = 1.0
    """its factor in the sum of all rewards"""
    name: str | None = None
    """the name in metrics and records; by default the function's"""


class ScoringSection(Section):
    timeout: Positive | None = 60.0
    """seconds that one call of a reward function may take"""
    on_error: Literal["stop", "drop"] = "stop"
    """what a failing reward does: stop the run, or drop the sample and count it"""
    overlong_buffer: CountOrNone = 0
    """soft penalty for answers that come within so many tokens of max_new_tokens (DAPO); 0 is none"""
    overlong_weight: NotNegative = 1.0
    """how much an answer of full length loses by that penalty"""


class SamplingSection(Section):
    samples_per_prompt: Count = 8
    """G: how many answers to each prompt are compared"""
    max_new_tokens: Count = 256
    """the longest answer, in tokens"""
    min_new_tokens: CountOrNone = 0
    """the shortest answer: the end cannot be drawn before"""
    temperature: Positive = 1.0
    """divides the logits, in sampling and in training alike"""
    top_k: CountOrNone | None = None
    """sample among the k likeliest tokens only"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """sample among the likeliest tokens that together have this probability"""
    min_p: Share | None = None
    """sample among tokens at least this likely, relative to the likeliest"""
    stop: list[str] = Field(default_factory=list)
    """an answer ends with the first of these texts"""
    max_rows: Count | None = None
    """the most answers generated at once"""


class AdvantagesSection(Section):
    scale: Literal["group", "batch", "none"] = "group"
    """divide by the group's standard deviation, by the whole batch's, or not at all"""
    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """what is subtracted from a reward"""
    eps: NotNegative = 1e-4
    """added to the standard deviation"""
    unbiased: bool = True
    """standard deviation with n − 1 rather than n"""
    combine: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """several rewards: normalise their sum, or sum what was normalised each by itself (GDPO)"""
    function: str | None = None
    """an advantage of one's own, module:function(rewards (B, K), groups (B,), weights) -> (B,)"""
    grouping: str = "prompt"
    """who is compared with whom: "prompt", or module:function(batch) -> one label per sample"""


class LossSection(Section):
    name: str = "dapo"
    """one of {losses}, or module:object that is a groupwise.core.Loss"""
    ratio: Literal["token", "sequence"] | None = None
    """one ratio per token or per answer; by default the loss's own"""
    clip_low: NotNegative = 0.2
    """ε: the ratio is held above 1 − this"""
    clip_high: NotNegative | None = None
    """ε_high: the ratio is held below 1 + this; by default clip_low (for cispo a ceiling, 5)"""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """a ceiling on the ratio where the advantage is negative"""
    denominator: Literal["completion_mask", "policy_mask"] = "completion_mask"
    """what a mean is divided by: all answers, or only what the masks leave (the first document)"""
    kl_coef: NotNegative = 0.0
    """β: weight of the KL to the reference"""
    kl: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """estimator of the KL; unbiased is DeepSeek-V3.2's"""
    entropy_coef: Finite = 0.0
    """bonus on the entropy of the policy"""
    importance_cap: Positive | None = None
    """correct for a difference between sampler and trainer by their ratio, at most this (TIS)"""


class MasksSection(Section):
    truncated: bool = False
    """answers that were cut off by max_new_tokens do not teach"""
    off_policy: Literal["v3.2", "document"] | None = None
    """do not learn from answers that have become unlikely (v3.2), or that left the reference behind (document)"""
    off_policy_threshold: Positive = 0.5
    """how far is too far"""
    validity: bool = False
    """answers that are too short, without an answer that can be found, or repetitive do not teach"""
    min_length: CountOrNone = 10
    """validity: the fewest characters"""
    max_repetition: Share = 0.5
    """validity: the largest share of an answer's word triples that were seen before in it"""
    high_entropy: Annotated[float, Field(gt=0, le=1)] | None = None
    """only this share of tokens, those with the highest entropy, teach"""
    keep_sampling: bool = False
    """renormalise the policy over what top-k, top-p and min-p had left (DeepSeek-V3.2's keep sampling mask)"""


class ReferenceSection(Section):
    refresh_every: CountOrNone = 0
    """every so many steps the reference becomes the policy; 0 is never"""
    mix: Annotated[float, Field(gt=0, le=1)] = 1.0
    """at a refresh the reference moves this share of the way to the policy"""


class OptimizerSection(Section):
    learning_rate: NotNegative = 1e-6
    """of AdamW, on float32 master weights"""
    embedding_learning_rate: NotNegative | None = None
    """for the token embeddings; by default the same"""
    weight_decay: NotNegative = 0.0
    """of matrices; norms and biases have none"""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """decay of the mean gradient"""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """decay of the mean squared gradient"""
    eps: Positive = 1e-8
    """added to the root of the latter"""
    max_grad_norm: Positive | None = 1.0
    """gradients are scaled down to this norm"""
    warmup_steps: CountOrNone = 0
    """steps in which the learning rate rises"""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """how the learning rate falls to its end, after the warm-up"""
    final: Share = 0.0
    """the share of the learning rate that is left at the end"""


class WarmUpSection(Section):
    steps: CountOrNone = 0
    """supervised steps on the task's examples before the first GRPO step, to teach the answer's format"""
    batch_size: Count = 32
    """examples in a step"""
    learning_rate: Positive = 1e-3
    """of AdamW"""


class TrainSection(Section):
    steps: Count | None = None
    """how many steps; if given, it decides rather than epochs"""
    epochs: Positive | None = 3.0
    """how often every row is used"""
    batch_size: Count = 4
    """prompts in a part of the batch"""
    accumulation: Count = 4
    """parts in a step, whose gradients add up: a step has batch_size × accumulation prompts"""
    iterations: Count = 1
    """μ: how often a batch is used"""
    mini_batches: Count = 1
    """updates in one pass over a batch; each is normalised by itself"""
    token_budget: Count | None = None
    """tokens of one forward and backward pass; by default what fits. It does not change the result"""
    refill: CountOrNone = 0
    """how many further rounds of prompts may be sampled to replace groups with equal rewards"""
    skip_equal: bool = True
    """compute nothing for groups with equal rewards, unless a KL or entropy term needs them"""
    not_finite: Literal["stop", "skip"] = "stop"
    """a loss or gradient that is no finite number: stop before the weights move, or skip the update and count it"""
    self_check: Positive = 0.05
    """warn when sampler and trainer differ by more than this in a token's log-prob, on average"""
    term_gradients: CountOrNone = 0
    """every so many steps, also report each objective term's gradient norm and the cosines between them"""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """decides the order of rows, the sampling and an adapter's first values"""


class EvaluateSection(Section):
    every: CountOrNone = 0
    """evaluate on the held-out rows every so many steps; 0 is only at the end"""
    first: bool = True
    """also before the first step"""
    samples: Count = 1
    """answers to each row, averaged"""
    temperature: NotNegative = 0.0
    """of those answers; 0 takes the likeliest token"""
    max_new_tokens: Count | None = None
    """the longest answer; by default as in training"""
    metric: str | None = None
    """which metric chooses the best checkpoint; by default the task's"""
    patience: Count | None = None
    """stop after so many evaluations without a better one"""


class RunSection(Section):
    folder: str | None = None
    """where the run is kept; by default a new folder below runs/"""
    name: str | None = None
    """part of the new folder's name; by default the recipe's"""
    checkpoint_every: CountOrNone = 50
    """steps between checkpoints; 0 is only at the end"""
    keep: Count = 2
    """how many checkpoints are kept, beside the best"""
    resumable: bool = True
    """checkpoints hold masters and optimizer (16 bytes a weight); false keeps the policy alone: no --resume"""
    rollouts: bool = True
    """one Parquet file of prompts, answers and rewards per step"""
    tensorboard: bool = True
    """TensorBoard events, where the package is installed"""
    wandb: str | None = None
    """the Weights & Biases project to report to"""
    picture: bool = True
    """a picture of the curves at the end"""
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """precision of the saved model; by default what it computes in"""
    push_to: str | None = None
    """the hub repository, owner/name, that the finished model is pushed to"""


class Recipe(Section):
    """A whole run."""

    task: str = "rows"
    """"rows" (your data and rewards), "quiz", "gsm8k", or module:function that returns a groupwise.tasks.Task"""
    algorithm: str = "dapo"
    """the preset below everything else: {algorithms}"""
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    rewards: list[RewardSection] = Field(default_factory=list)
    """[[rewards]]: added to the task's own"""
    scoring: ScoringSection = Field(default_factory=ScoringSection)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    advantages: AdvantagesSection = Field(default_factory=AdvantagesSection)
    loss: LossSection = Field(default_factory=LossSection)
    masks: MasksSection = Field(default_factory=MasksSection)
    reference: ReferenceSection = Field(default_factory=ReferenceSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    warm_up: WarmUpSection = Field(default_factory=WarmUpSection)
    train: TrainSection = Field(default_factory=TrainSection)
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)
    run: RunSection = Field(default_factory=RunSection)
    phases: list[dict[str, Any]] = Field(default_factory=list)
    """[[phases]]: settings for a number of steps or tokens, one phase after another"""
    ramps: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """[ramps]: a setting that moves between points"""
    rules: list[dict[str, Any]] = Field(default_factory=list)
    """[[rules]]: a setting that changes when a metric does"""

    def get(self, name: str) -> Any:
        """The value of a dotted setting."""
        value: Any = self
        for part in name.split("."):
            value = getattr(value, part)
        return value

    def with_settings(self, values: Mapping[str, Any]) -> Recipe:
        """A recipe in which these dotted settings have other values, checked like all others."""
        return make_recipe(_nested(values), base=self.model_dump())


# What other libraries call a setting, for the hint only: an unknown key stays an error.
KNOWN_ELSEWHERE = {
    "lr": "optimizer.learning_rate",
    "num_generations": "sampling.samples_per_prompt",
    "num_samples_per_prompt": "sampling.samples_per_prompt",
    "max_completion_length": "sampling.max_new_tokens",
    "beta": "loss.kl_coef",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "loss_type": "loss.name",
    "importance_sampling_level": "loss.ratio",
    "scale_rewards": "advantages.scale",
    "num_iterations": "train.iterations",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "per_device_train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.accumulation",
    "bf16": "model.dtype",
    "output_dir": "run.folder",
    "save_steps": "run.checkpoint_every",
    "eval_steps": "evaluate.every",
}

# The settings that a schedule may drive: read anew in every step. The rest (model, data, run, …) is fixed.
SCHEDULED_SECTIONS = ("sampling", "advantages", "loss", "masks", "reference", "optimizer", "scoring")
SCHEDULED_OF_TRAIN = ("batch_size", "accumulation", "iterations", "mini_batches", "refill", "self_check")
NOT_SCHEDULED = {"sampling.max_rows", "optimizer.warmup_steps", "optimizer.final", "optimizer.beta1", "optimizer.beta2",
                 "optimizer.eps", "scoring.timeout"}  # fmt: skip


def load_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in a TOML file, with dotted ``overrides`` on top."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe {path}{_nearest_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe {path} cannot be read: {error}") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from error
    return make_recipe(_merge(table, _nested(overrides or {})), where=str(path))


def make_recipe(
    table: Mapping[str, Any] | None = None, *, where: str = "the recipe", base: Mapping[str, Any] | None = None
) -> Recipe:
    """A recipe from nested tables such as TOML gives; ``base`` replaces the preset as the layer below."""
    table = dict(table or {})
    if base is None:
        name = table.get("algorithm", Recipe.model_fields["algorithm"].default)
        base = _nested(find_algorithm(name).settings)
    try:
        recipe = Recipe.model_validate(_merge(base, table))
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(where, fault) for fault in error.errors())) from error
    _check(recipe, where)
    return recipe


def parse_override(name: str, text: str) -> Any:
    """The value of ``--section.key TEXT``: TOML where it is that (a number, true, a list), else the text itself."""
    if text.lower() in ("none", "null"):
        return None
    if text in ("True", "False"):
        return text == "True"
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    kind = _kinds(_field(name))
    if float in kind and int not in kind and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return text if str in kind and not isinstance(value, str) and kind <= {str, type(None)} else value


def setting_names() -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted setting with its field, in the order of the sections."""
    yield from _fields(Recipe, "")


def scheduled_names(recipe: Recipe) -> dict[str, Any]:
    """The settings that a schedule may drive, with their values; None where one is off."""
    found: dict[str, Any] = {}
    for name, field in setting_names():
        section, _, key = name.partition(".")
        allowed = section in SCHEDULED_SECTIONS or (section == "train" and key in SCHEDULED_OF_TRAIN)
        if allowed and name not in NOT_SCHEDULED and _kinds(field) & {int, float}:
            found[name] = recipe.get(name)
    return found


def resolve_scheduled(recipe: Recipe, name: str) -> str:
    """The dotted name of a setting that a schedule drives, from a bare name (``temperature``) or the dotted one."""
    known = scheduled_names(recipe)
    matches = [full for full in known if name in (full, full.split(".")[-1])]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"{name!r} could be {' or '.join(matches)}; write the one that is meant")
    everything = {full for full, _ in setting_names()}
    if any(name in (full, full.split(".")[-1]) for full in everything):
        raise ConfigError(f"{name!r} is fixed for a run and cannot be scheduled (possible: {', '.join(known)})")
    raise ConfigError(
        f"unknown setting {name!r} in a schedule{_hint(name, [*known, *(k.split('.')[-1] for k in known)])}"
    )


def _check(recipe: Recipe, where: str) -> None:
    """What concerns more than one setting."""
    if recipe.loss.name not in LOSSES and ":" not in recipe.loss.name:
        raise ConfigError(f"{where}: unknown loss {recipe.loss.name!r}{_hint(recipe.loss.name, LOSSES)} (allowed: "
                          f"{', '.join(LOSSES)}, or module:object)")  # fmt: skip
    if (
        recipe.loss.name in LOSSES
        and recipe.loss.ratio is not None
        and recipe.loss.ratio not in LOSSES[recipe.loss.name].ratios
    ):
        raise ConfigError(
            f"{where}: the loss {recipe.loss.name!r} has no {recipe.loss.ratio} ratio; leave loss.ratio out or use "
            f"{LOSSES[recipe.loss.name].ratios[0]!r}"
        )
    if recipe.train.steps is None and recipe.train.epochs is None:
        raise ConfigError(f"{where}: give train.steps or train.epochs; without either the run would have no end")
    if recipe.sampling.min_new_tokens > recipe.sampling.max_new_tokens:
        raise ConfigError(
            f"{where}: sampling.min_new_tokens {recipe.sampling.min_new_tokens} is more than sampling.max_new_tokens "
            f"{recipe.sampling.max_new_tokens}"
        )
    if (
        recipe.sampling.samples_per_prompt == 1
        and recipe.advantages.baseline != "none"
        and recipe.advantages.grouping == "prompt"
    ):
        raise ConfigError(
            f"{where}: sampling.samples_per_prompt is 1, so no answer has a sibling to be compared with and "
            "nothing can be learned; use at least 2"
        )
    if recipe.masks.keep_sampling and not _filters(recipe):
        raise ConfigError(
            f"{where}: masks.keep_sampling renormalises over what top_k, top_p and min_p leave, but none of them is set"
        )
    prompts = recipe.train.batch_size * recipe.train.accumulation
    if recipe.train.mini_batches > prompts:
        raise ConfigError(
            f"{where}: train.mini_batches {recipe.train.mini_batches} is more than the {prompts} prompts of a step "
            "(train.batch_size × train.accumulation)"
        )


def _filters(recipe: Recipe) -> bool:
    sampling = recipe.sampling
    return bool(sampling.top_k) or sampling.top_p < 1 or bool(sampling.min_p)


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested tables."""
    tables: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, key = name.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{name!r} cannot be set: {section!r} is not a section")
        table[key] = value
    return tables


# Tables whose keys are the user's own: given anew they replace the old ones as a whole.
WHOLE = {"chat_template_kwargs", "ramps"}


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and key not in WHOLE:
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _sentence(where: str, fault: Any) -> str:
    """One of pydantic's findings as a sentence that names the setting."""
    place = [str(part) for part in fault["loc"]]
    name = ".".join(place)
    if fault["type"] == "extra_forbidden":
        section = ".".join(place[:-1])
        allowed = _keys_of(section)
        elsewhere = [full for full, _ in setting_names() if full.split(".")[-1] == place[-1]]
        elsewhere += [KNOWN_ELSEWHERE[place[-1]]] if place[-1] in KNOWN_ELSEWHERE else []
        hint = f"; did you mean {elsewhere[0]!r}?" if elsewhere else _hint(place[-1], allowed)
        there = f" (there are: {', '.join(allowed)})" if not hint else ""
        return f"{where}: unknown {'key' if section else 'section or key'} {name!r}{hint}{there}"
    if fault["type"] == "literal_error":
        allowed = re.findall(r"'([^']*)'", fault["ctx"]["expected"])
        given = fault["input"]
        return f"{where}: {name} cannot be {given!r}{_hint(str(given), allowed)} (allowed: {', '.join(allowed)})"
    if fault["type"] == "missing":
        return f"{where}: {name} is missing"
    message = fault["msg"].replace("Input should be", "it should be")
    return f"{where}: {name} = {fault['input']!r} cannot be used, {message[0].lower() + message[1:]}"


def _hint(given: str, allowed: Sequence[str] | Mapping[str, Any]) -> str:
    nearest = difflib.get_close_matches(given, list(allowed), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _nearest_file(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path()
    nearest = difflib.get_close_matches(path.name, [found.name for found in folder.glob("*.toml")], n=1)
    return f"; did you mean {folder / nearest[0]}?" if nearest else ""


def _keys_of(section: str) -> list[str]:
    model: Any = Recipe
    for part in section.split(".") if section else []:
        if part.isdigit():
            continue
        model = _inner(model.model_fields[part]) or model
    return list(model.model_fields)


def _inner(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, also inside ``X | None`` and ``list[X]``."""
    waiting = [field.annotation]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, Section):
            return kind
        waiting += list(get_args(kind))
    return None


def _fields(model: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for key, field in model.model_fields.items():
        inner = _inner(field)
        if inner is not None and key != "rewards":
            yield from _fields(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", field


def _field(name: str) -> FieldInfo:
    known = dict(setting_names())
    if name not in known:
        last = {full.split(".")[-1]: full for full in known}
        last |= KNOWN_ELSEWHERE
        key = name.split(".")[-1]
        hint = f"; did you mean {last[key]!r}?" if key in last else _hint(name, [*known])
        if not hint and (near := difflib.get_close_matches(name.split(".")[-1], list(last), n=1)):
            hint = f"; did you mean {last[near[0]]!r}?"
        raise ConfigError(f"unknown setting --{name}{hint} (`groupwise train --help` lists all)")
    return known[name]


def _kinds(field: FieldInfo) -> set[Any]:
    """The plain types that a setting may have."""
    found: set[Any] = set()
    waiting: list[Any] = [field.annotation]
    while waiting:
        kind = waiting.pop()
        arguments = get_args(kind)
        if get_origin(kind) is Literal:
            found.update(type(choice) for choice in arguments)
        elif get_origin(kind) in (Union, Annotated) or isinstance(kind, type(int | None)):
            waiting += [argument for argument in arguments if isinstance(argument, type) or get_origin(argument)]
        elif isinstance(kind, type):
            found.add(get_origin(kind) or kind)
    return found


def _fill(model: type[Section], **lists: Sequence[str]) -> None:
    """Put the names that exist into the descriptions."""
    for field in model.model_fields.values():
        for name, values in lists.items():
            if field.description:
                field.description = field.description.replace(f"{{{name}}}", ", ".join(values))


_fill(LossSection, losses=tuple(LOSSES))
_fill(Recipe, algorithms=tuple(ALGORITHMS))

# The choices that are written out above, for the checker of types, are the core's own; a test holds them together.
CHOICES: dict[str, tuple[str, ...]] = {
    "advantages.scale": SCALES,
    "advantages.baseline": BASELINES,
    "advantages.combine": COMBINATIONS,
    "loss.kl": ESTIMATORS,
    "loss.ratio": RATIOS,
    "loss.denominator": DENOMINATORS,
    "masks.off_policy": OFF_POLICY_RULES,
}
