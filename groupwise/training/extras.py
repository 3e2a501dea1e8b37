"""The optional packages that a recipe needs, asked for before its rows are read and its model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from groupwise.config import Recipe
from groupwise.data.read import is_hub_id
from groupwise.errors import CheckpointError, GroupwiseError, check_installed
from groupwise.grouping.embed import needs_sentence_transformers
from groupwise.model.lora import ADAPTER_CONFIG, read_settings
from groupwise.model.source import is_adapter
from groupwise.model.weights import CATALOGUE, cached
from groupwise.tasks import TASKS
from groupwise.tasks.rows import listed

REWARDS = {"judge": ("openai", "judge"), "math_equal": ("math-verify", "math")}  # the rest need no extra


class Need(NamedTuple):
    """A feature of a recipe, the package that it needs, and the extra of groupwise that installs it."""

    feature: str
    package: str
    extra: str


def check_extras(recipe: Recipe, *, training: bool = True, loads_model: bool = True, reads_rows: bool = True) -> None:
    """Raise one error for all missing packages.

    ``training``: False to evaluate only. ``loads_model``, ``reads_rows``: False if Python code gives a loaded model,
    or the rows.
    """
    needs = [*_rewards(recipe)]
    if loads_model:
        needs += model_needs(recipe.model.source)
    if recipe.model.lora is not None:
        needs.append(Need("LoRA (model.lora)", "peft", "lora"))
    needs += _hub_data(recipe, reads_rows)
    if training:
        needs += _training(recipe)
    check_installed(needs)


def recipe_needs(recipe: Recipe) -> list[Need]:
    """Everything that training with a recipe needs, installed or not, on a machine without fetched models."""
    lora = [Need("LoRA (model.lora)", "peft", "lora")] if recipe.model.lora is not None else []
    model = model_needs(recipe.model.source, fetched=False)
    return [*model, *lora, *_hub_data(recipe), *_rewards(recipe), *_training(recipe)]


def model_needs(source: str, *, fetched: bool = True) -> list[Need]:
    """What loading a model needs. ``fetched``: a model of the catalogue may have been fetched already."""
    path = Path(source).expanduser()
    try:
        if is_adapter(path):
            base = str(read_settings(path / ADAPTER_CONFIG).get("base_model_name_or_path", ""))
            return [Need(f"the LoRA adapter {source}", "peft", "lora"), *(model_needs(base) if base != source else [])]
        is_gguf = path.suffix == ".gguf" and path.is_file()
    except (CheckpointError, OSError):
        return []  # loading it says what is wrong
    entry = None if path.exists() else CATALOGUE.get(source)
    if is_gguf or (entry is not None and entry.kind == "gguf" and not (fetched and cached(entry))):
        feature = f"reading {source}" if is_gguf else f"the model {source}, which is converted from a GGUF file,"
        return [Need(feature, package, "gguf") for package in ("gguf", "accelerate")]
    return []


def _hub_data(recipe: Recipe, reads_rows: bool = True) -> Iterator[Need]:
    names = ["preference.train", "preference.held_out"]
    if reads_rows and recipe.task in TASKS:  # another task may read data.train in its own way
        names += ["data.train", "data.held_out"]
    for name in names:
        for source in filter(is_hub_id, listed(recipe.get(name))):
            yield Need(f"there is no file or folder {source} ({name}); reading it from the hub", "datasets", "hub")


def _rewards(recipe: Recipe) -> Iterator[Need]:
    for entry in recipe.rewards:
        if entry.function in REWARDS:
            yield Need(f"the reward {entry.function}", *REWARDS[entry.function])


def _training(recipe: Recipe) -> Iterator[Need]:
    grouping, run = recipe.grouping, recipe.run
    if recipe.train.steps != 0 and (recipe.advantages.grouping == "similarity" or grouping.log_diversity):
        try:
            if needs_sentence_transformers(grouping.embedder):
                feature = f"the embedder {grouping.embedder} (grouping.embedder; 'wordllama' needs no extra)"
                yield Need(feature, "sentence-transformers", "embed")
        except GroupwiseError:
            pass  # a wrong name is reported where the embedder is checked
        if grouping.workers:
            yield Need(f"grouping.workers = {grouping.workers}", "ray", "ray")
    if run.wandb is not None:
        yield Need("reporting to Weights & Biases (run.wandb)", "wandb", "wandb")
    if run.tensorboard:
        yield Need("writing TensorBoard events (run.tensorboard)", "tensorboardX", "tensorboard")
