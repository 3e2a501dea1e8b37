"""A trained model as transformers saves it: a folder that ``from_pretrained`` loads, its card, and the hub."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.distributed.ranks import Ranks
from groupwise.errors import ConfigError
from groupwise.integrations.trl.config import repository_of
from groupwise.integrations.trl.folder import EARLIER, RUN_FILES
from groupwise.model.export import collect_weights, export_model
from groupwise.model.lora import is_lora
from groupwise.model.sharded_masters import FsdpMasters
from groupwise.rundir import write_bytes
from groupwise.rundir.files import MANIFEST
from groupwise.text import error_reason, fixed

CARD = "README.md"
TAGS = ("groupwise", "grpo", "trl")


def save_into(folder: Path, model: Any, tokenizer: Any, masters: Any, dtype: torch.dtype, ranks: Ranks) -> None:
    """Write the model, or only its adapter, and the tokenizer into a folder that may exist; rank 0 writes.

    ``masters`` are the float32 weights of training, or None before it.
    """
    options: dict[str, Any] = {"tokenizer": tokenizer, "dtype": dtype}
    if isinstance(masters, FsdpMasters) and not is_lora(model):
        options["weights"] = collect_weights(model, dtype, ranks)
    else:
        values: Mapping[str, Tensor] | None = None if masters is None else masters.state_dict()
        options |= {"masters": values, "merge": not is_lora(model)}

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as place:
            complete = export_model(model, Path(place) / "model", **options)
            for path in sorted(complete.iterdir()):
                if path.name != MANIFEST:
                    os.replace(path, folder / path.name) if path.is_file() else _replace_folder(
                        path, folder / path.name
                    )

    ranks.on_main("saving the model", write)


def _replace_folder(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.move(source, target)


def write_card(
    folder: Path,
    model: Any,
    *,
    model_name: str | None,
    dataset_name: str | None,
    tags: str | Sequence[str] | None,
    reward_names: Sequence[str],
    log_history: Sequence[Mapping[str, Any]],
) -> None:
    """A model card: what the model was trained from and with, and the last rewards."""
    from huggingface_hub import ModelCard, ModelCardData

    base = str(getattr(model.config, "_name_or_path", "") or "")
    given = [tags] if isinstance(tags, str) else list(tags or ())
    name = model_name or folder.resolve().name
    data = ModelCardData(
        base_model=base if base and not os.path.isdir(base) else None,
        datasets=dataset_name,
        library_name="peft" if is_lora(model) else "transformers",
        model_name=name,
        tags=[*dict.fromkeys((*given, *TAGS))],
    )
    rewards = [(entry["step"], entry["reward"]) for entry in log_history if entry.get("reward") is not None]
    started = f"It started from {base}. " if base else ""
    measured = (
        f"The mean reward was {fixed(rewards[0][1], '.3f')} at update {rewards[0][0]} and "
        f"{fixed(rewards[-1][1], '.3f')} at update {rewards[-1][0]}.\n"
        if rewards
        else ""
    )
    text = (
        f"# {name}\n\n{started}It was trained with group-relative policy optimization (GRPO, arXiv 2402.03300) by "
        f"groupwise, with the rewards {', '.join(f'`{reward}`' for reward in reward_names)}. {measured}"
    )
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")
    write_bytes(folder / CARD, str(card).encode("utf-8", "backslashreplace"))


def make_repository(args: Any, token: str | None = None) -> str:
    """Create the repository on the hub if it does not exist, and return its complete name, ``owner/name``."""
    from huggingface_hub import HfApi

    name = repository_of(args)
    api: Any = HfApi(token=token or args.hub_token)
    try:
        return str(api.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id)
    except Exception as error:  # the hub's library raises many kinds
        raise ConfigError(
            f"push_to_hub: the repository {name} cannot be made on the hub: {error_reason(error)}; log in with "
            "`hf auth login`, or set push_to_hub to False"
        ) from error


def upload(
    folder: Path, repository: str, *, commit_message: str, token: str | None, blocking: bool, revision: str | None
) -> Any:
    """Upload what was saved in ``output_dir``, without checkpoints and the records of runs."""
    from huggingface_hub import HfApi

    api: Any = HfApi(token=token)
    try:
        return api.upload_folder(
            repo_id=repository,
            folder_path=str(folder),
            commit_message=commit_message,
            run_as_future=not blocking,
            revision=revision,
            ignore_patterns=[
                *("_*", ".*", "checkpoint-*/*", f"{EARLIER}-*/*"),
                *(pattern for name in RUN_FILES for pattern in (name, f"{name}/*")),
            ],
        )
    except Exception as error:  # the hub's library raises many kinds
        raise ConfigError(
            f"the model could not be pushed to {repository}: {error_reason(error)}; it is saved in {folder}"
        ) from error
