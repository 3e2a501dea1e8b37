"""The optional packages that a recipe needs, asked for before its rows are read and its model is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from groupwise.config import Recipe
from groupwise.data.read import is_hub_id
from groupwise.errors import CheckpointError, GroupwiseError, check_installed
from groupwise.model.checks import read_settings
from groupwise.model.source import ADAPTER_CONFIG, is_adapter
from groupwise.model.weights import CATALOGUE, cached

STATIC_EMBEDDER = "wordllama"
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
    model = model_needs(recipe.model.source) if loads_model else []
    check_installed([*model, *_inputs(recipe, reads_rows), *(_training(recipe) if training else [])])


def recipe_needs(recipe: Recipe) -> list[Need]:
    """Everything that training with a recipe needs, installed or not, on a machine without fetched models."""
    return [*model_needs(recipe.model.source, fetched=False), *_inputs(recipe, True), *_training(recipe)]


def model_needs(source: str, *, fetched: bool = True) -> list[Need]:
    """What loading a model needs. ``fetched``: a model of the catalogue may have been fetched already."""
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        return _adapter_needs(Path(path), source)
    is_gguf = path.endswith(".gguf") and os.path.isfile(path)
    entry = None if os.path.exists(path) else CATALOGUE.get(source)
    if is_gguf or (entry is not None and entry.kind == "gguf" and not (fetched and cached(entry))):
        feature = f"reading {source}" if is_gguf else f"the model {source}, which is converted from a GGUF file,"
        return [Need(feature, package, "gguf") for package in ("gguf", "accelerate")]
    return []


def _adapter_needs(folder: Path, source: str) -> list[Need]:
    """What loading a folder needs: nothing, unless it holds a LoRA adapter."""
    if not is_adapter(folder):
        return []
    try:
        base = read_settings(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    except CheckpointError:
        base = None  # loading it says what is wrong
    is_folder = not isinstance(base, str) or os.path.isdir(base)  # a base is never an adapter
    return [Need(f"the LoRA adapter {source}", "peft", "lora"), *([] if is_folder else model_needs(str(base)))]


def _inputs(recipe: Recipe, reads_rows: bool) -> Iterator[Need]:
    """What the adapter, the rows, the pairs and the rewards need."""
    if recipe.model.lora is not None:
        yield Need("LoRA (model.lora)", "peft", "lora")
    # A task in Python may read data.train in its own way.
    for source, name in data_sources(recipe, rows=reads_rows and ":" not in recipe.task).items():
        if is_hub_id(source):
            yield Need(f"there is no file or folder {source} ({name}); reading it from the hub", "datasets", "hub")
    if recipe.sampling.generator == "vllm" and (not recipe.vllm.servers or recipe.vllm.weights == "nccl"):
        reason = "vllm.weights = 'nccl'" if recipe.vllm.servers else "sampling.generator = 'vllm' without vllm.servers"
        yield Need(reason, "vllm", "vllm")
    for entry in recipe.rewards:
        if entry.function in REWARDS:
            yield Need(f"the reward {entry.function}", *REWARDS[entry.function])


def data_sources(recipe: Recipe, *, rows: bool) -> dict[str, str]:
    """The data sets of pairs, and with ``rows`` also those of rows, each with the setting that names it first."""
    names = ["preference.train", "preference.held_out", *(["data.train", "data.held_out"] if rows else [])]
    named_by: dict[str, str] = {}
    for name in names:
        sources = recipe.get(name) or []
        for source in [sources] if isinstance(sources, str) else sources:
            named_by.setdefault(source, name)
    return named_by


def groups_by_similarity(recipe: Recipe) -> bool:
    """Whether a run clusters similar completions, for the advantages or only to log their diversity."""
    return recipe.train.steps != 0 and (recipe.advantages.grouping == "similarity" or recipe.grouping.log_diversity)


def _training(recipe: Recipe) -> Iterator[Need]:
    grouping, run = recipe.grouping, recipe.run
    if groups_by_similarity(recipe):
        if _needs_sentence_transformers(grouping.embedder):
            feature = f"the embedder {grouping.embedder} (grouping.embedder; {STATIC_EMBEDDER!r} needs no extra)"
            yield Need(feature, "sentence-transformers", "embed")
        if grouping.workers:
            yield Need(f"grouping.workers = {grouping.workers}", "ray", "ray")
    if recipe.distillation.is_model and recipe.distillation.teacher is not None:
        yield from model_needs(recipe.distillation.teacher)
    if run.wandb is not None:
        yield Need("reporting to Weights & Biases (run.wandb)", "wandb", "wandb")
    if run.tensorboard:
        yield Need("writing TensorBoard events (run.tensorboard)", "tensorboardX", "tensorboard")


def _needs_sentence_transformers(embedder: str) -> bool:
    if embedder in CATALOGUE and not os.path.exists(embedder):
        return embedder != STATIC_EMBEDDER
    from groupwise.grouping.embed import needs_sentence_transformers

    try:
        return needs_sentence_transformers(embedder)
    except GroupwiseError:
        return False  # a wrong name is reported where the embedder is checked
