"""Saved models: the weights of an agent with its configuration, and the agents made from them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from groupwise.control.algorithms import GRPOAgent, PPOAgent, make_agent
from groupwise.control.environments import shape_of
from groupwise.control.settings import Config, config_of
from groupwise.errors import CheckpointError, nearest_file
from groupwise.rundir import write_bytes
from groupwise.text import one_line

BEST_FILE, STATE_FILE, MODEL_FORMAT = "best_model.pt", "state.pt", 1


def write_model(path: Path, model: Mapping[str, Any]) -> None:
    content = io.BytesIO()
    torch.save(dict(model), content)
    write_bytes(path, content.getvalue())


def read_model(path: Path) -> dict[str, Any]:
    """A saved model. Only tensors and plain values are loaded, so an untrusted file cannot run code."""
    if not path.exists() and path.name not in (BEST_FILE, STATE_FILE):
        near = nearest_file(path.name, [entry.name for entry in path.parent.glob("*")])
        hint = f"did you mean {path.parent / near}?" if near else "`groupwise control train --out FOLDER` writes one"
        raise CheckpointError(f"{path} does not exist: give the folder of a run or a saved model; {hint}")
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; a run writes {BEST_FILE} at its first evaluation, and {STATE_FILE} every "
            "save_every updates and at its end"
        )
    try:
        model = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors
        raise CheckpointError(
            f"{path} is not a model, or is damaged: {one_line(str(error))[:200] or type(error).__name__}"
        ) from error
    parts = (model.get(name) for name in ("config", "weights")) if isinstance(model, dict) else (None,)
    if not all(isinstance(part, dict) for part in parts) or model.get("format") != MODEL_FORMAT:
        raise CheckpointError(f"{path} is not a model of format {MODEL_FORMAT}, which this groupwise needs")
    return dict(model)


def load_agent(path: Path) -> tuple[Config, GRPOAgent | PPOAgent]:
    """The best agent of a run folder, or the agent of a saved file."""
    model = read_model(path / BEST_FILE if path.is_dir() else path)
    config = config_of(**model["config"])
    agent = make_agent(shape_of(config.environment, config.options), config.settings, config.seed)
    load_weights(agent, model, path)
    return config, agent


def load_weights(agent: GRPOAgent | PPOAgent, model: Mapping[str, Any], path: Path) -> None:
    try:
        agent.load_state_dict(model["weights"])
    except RuntimeError as error:
        name = model["config"].get("environment")
        raise CheckpointError(f"{path} does not fit the installed {name}: {error}") from error
