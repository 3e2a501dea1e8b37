"""What a run is started with, as hashes: its rows, its tokenizer, weights that are not trained, and source files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.errors import CheckpointError
from groupwise.paths import user_path
from groupwise.rundir.files import file_sha256
from groupwise.text import error_reason, plural
from groupwise.training.components import RunComponents
from groupwise.training.extras import groups_by_similarity
from groupwise.training.store.run_folder import FROZEN, NONE, SOURCES, TRAINING_PAIRS, TRAINING_ROWS
from groupwise.user_code import source_hashes

HASH_LENGTH = 16  # hexadecimal digits


def describe_inputs(components: RunComponents) -> dict[str, Any]:
    """The model, the task, the rewards, and hashes. Trained weights are not among them: a checkpoint has those."""
    recipe, pairs = components.recipe, components.pairs
    functions = () if components.scorer is None else components.scorer.functions
    reward_models = [entry.options.get("model") for entry in recipe.rewards if entry.function == "reward_model"]
    embedder = [recipe.grouping.embedder] if groups_by_similarity(recipe) else []
    return {
        "model": recipe.model.source,
        "task": components.task.name,
        "rewards": [function.name for function in functions],
        TRAINING_ROWS: hash_rows(components.train.rows),
        "held-out rows": hash_rows(components.held_out.rows),
        TRAINING_PAIRS: hash_rows([pair.prompt, *map(list, pair[1:])] for pair in pairs.train),
        "held-out pairs": hash_rows([pair.prompt, *map(list, pair[1:])] for pair in pairs.held_out),
        "tokenizer": _hash_tokenizer(components.tokenizer),
        FROZEN: _hash_frozen(components.model),
        "reward models": _hash_folders(reward_models),
        "teacher": _teacher(components),
        "embedder": _hash_folders(embedder),
        SOURCES: _sources(components),
    }


def hash_rows(rows: Iterable[Any]) -> str:
    """A hash of rows; objects that are not JSON count by their type, as their text may differ from run to run."""
    digest, count = hashlib.sha256(), 0
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode() + b"\n")
        count += 1
    return f"{count}, {digest.hexdigest()[:HASH_LENGTH]}" if count else NONE


def _hash_tokenizer(tokenizer: Any) -> str:
    """The vocabulary, the chat template and the special tokens, which decide what a prompt is as ids.

    A serialised tokenizer would change with the version of its library.
    """
    facts = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template, tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:HASH_LENGTH]


def _hash_frozen(model: nn.Module) -> str:
    """The weights that are not trained, such as the base of an adapter: a resumed run reads them from their source.

    All of their bytes are hashed, at about a second per GB: names, sizes and times stay the same when a file is
    replaced by another one of the same shape. They are hashed in bfloat16, so that a run may go on in another dtype.
    """
    frozen = sorted((name, weight) for name, weight in model.named_parameters() if not weight.requires_grad)

    def digest(entry: tuple[str, Tensor]) -> bytes:
        name, weight = entry
        values = weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().data
        return hashlib.sha256(f"{name} {list(weight.shape)} ".encode() + hashlib.sha256(values).digest()).digest()

    with ThreadPoolExecutor(4) as threads:  # hashing releases the interpreter's lock
        total = hashlib.sha256(b"".join(threads.map(digest, frozen)))
    return f"{plural(len(frozen), 'tensor')}, {total.hexdigest()[:HASH_LENGTH]}" if frozen else NONE


def _hash_folders(sources: Iterable[Any]) -> str:
    """The files of local model folders. What has a name is fetched by hash, and what is on the hub has a revision."""
    folders = [user_path(source) for source in sources if isinstance(source, str)]
    folders = [folder for folder in folders if os.path.isdir(folder)]
    digest = hashlib.sha256()
    try:
        for folder in folders:
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                digest.update(f"{path.relative_to(folder).as_posix()} {file_sha256(path)}\n".encode())
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error_reason(error)}") from error
    return digest.hexdigest()[:HASH_LENGTH] if folders else NONE


def _teacher(components: RunComponents) -> str:
    """The files of a teacher in a folder, or the name of another one; a server may move, but not have another model."""
    settings, teacher = components.recipe.distillation, components.teacher
    if teacher is not None and teacher.server is not None:
        return f"{teacher.server.model}, on a server"
    if not settings.is_model:
        return NONE
    name = f"{settings.teacher}, {settings.revision}" if settings.revision else str(settings.teacher)
    hashed = _hash_folders([settings.teacher])
    return name if hashed == NONE else hashed


def _sources(components: RunComponents) -> dict[str, dict[str, str]]:
    """The source files of each function that is not groupwise's own, by their names in the folder of the first one."""
    sources: dict[str, dict[str, str]] = {}
    for role, function in _functions(components):
        hashes = source_hashes(function)
        folder = os.path.dirname(next(iter(hashes), ""))
        files = {os.path.relpath(path, folder) if folder else path: value for path, value in hashes.items()}
        if files:
            sources[role] = {Path(file).as_posix(): value for file, value in files.items()}
    return sources


def _functions(components: RunComponents) -> Iterator[tuple[str, str | Callable[..., Any]]]:
    """What a run calls, by its role: the name of a function that was loaded by its name, or the function itself."""
    recipe, task = components.recipe, components.task
    yield "task", recipe.task
    yield from ((f"grade {name!r}", grade) for name, grade in task.grades.items())
    functions = [] if components.scorer is None else components.scorer.functions
    given = [None] * len(task.rewards) + [entry.function if ":" in entry.function else None for entry in recipe.rewards]
    for reward, name in zip(functions, [*given, *[None] * len(functions)], strict=False):
        yield f"reward {reward.name!r}", name or reward.function
    if components.environment is not None:
        yield from components.environment.sources
    yield "loss", recipe.loss.name if ":" in recipe.loss.name else components.loss.token_loss
    for setting, function in (("function", components.advantage), ("grouping", components.grouping)):
        spec = getattr(recipe.advantages, setting)
        if function is not None:
            yield f"advantages.{setting}", spec if ":" in spec else function
