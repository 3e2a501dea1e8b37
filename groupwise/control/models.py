"""Saved models: the state dict of an agent, and in a JSON file beside it its configuration; agents made from them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.control.algorithms import GRPOAgent, PPOAgent, make_agent
from groupwise.control.environments import shape_of
from groupwise.control.settings import Config, config_of
from groupwise.errors import CheckpointError, nearest_file
from groupwise.paths import FILE, is_folder, kind_of
from groupwise.rundir import read_json, write_bytes, write_json
from groupwise.text import one_line

BEST_FILE, STATE_FILE, MODEL_FORMAT = "best_model.pt", "state.pt", 1


def write_model(path: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write the weights, and what ``about`` says about them to a JSON file of the same name."""
    write_torch(path, weights)
    write_json(path.with_suffix(".json"), about)


def write_torch(path: Path, value: Mapping[str, Any]) -> None:
    content = io.BytesIO()
    torch.save(dict(value), content)
    write_bytes(path, content.getvalue())


def read_model(path: Path) -> dict[str, Any]:
    """A saved model or checkpoint with its "config" and "weights".

    Models of earlier versions had their configuration in the same file, as a checkpoint still has. Only tensors and
    plain values are loaded, so an untrusted file cannot run code.
    """
    kind = kind_of(path, CheckpointError)
    if kind not in (FILE, None):
        raise CheckpointError(f"{path} is a {kind}: give the folder of a run or a saved model")
    if kind is None and path.name not in (BEST_FILE, STATE_FILE):
        near = nearest_file(path.name, [entry.name for entry in path.parent.glob("*")])
        hint = f"did you mean {path.parent / near}?" if near else "`groupwise control train --out FOLDER` writes one"
        raise CheckpointError(f"{path} does not exist: give the folder of a run or a saved model; {hint}")
    if kind is None:
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
    if isinstance(model, dict) and model and all(isinstance(weight, Tensor) for weight in model.values()):
        model = _read_about(path) | {"weights": model}
    parts = (model.get(name) for name in ("config", "weights")) if isinstance(model, dict) else (None,)
    if not all(isinstance(part, dict) for part in parts) or model.get("format") != MODEL_FORMAT:
        raise CheckpointError(f"{path} is not a model of format {MODEL_FORMAT}, which this groupwise needs")
    return dict(model)


def _read_about(path: Path) -> dict[str, Any]:
    """The JSON file of a model."""
    file = path.with_suffix(".json")
    if kind_of(file, CheckpointError) is None:
        raise CheckpointError(
            f"{path} is a model without {file.name}, which has its configuration; put that beside it, or load the "
            "weights alone with agent.load_state_dict(torch.load(path, weights_only=True))"
        )
    about = read_json(file)
    if not isinstance(about, dict):
        raise CheckpointError(f"{file} is not the configuration of a model")
    return about


def load_agent(path: Path) -> tuple[Config, GRPOAgent | PPOAgent]:
    """The best agent of a run folder, or the agent of a saved file."""
    model = read_model(path / BEST_FILE if is_folder(path, CheckpointError) else path)
    try:
        config = config_of(**model["config"])
    except TypeError as error:
        raise CheckpointError(f"{path} has no configuration of this groupwise: {one_line(str(error))[:200]}") from error
    agent = make_agent(shape_of(config.environment, config.options), config.settings, config.seed)
    load_weights(agent, model, path)
    return config, agent


def load_weights(agent: GRPOAgent | PPOAgent, model: Mapping[str, Any], path: Path) -> None:
    try:
        agent.load_state_dict(model["weights"])
    except Exception as error:  # of other shapes, or no tensors
        name = model["config"].get("environment")
        reason = one_line(str(error))[:300]
        raise CheckpointError(f"{path} does not fit the installed {name}: {reason}") from error
    if not all(bool(weight.isfinite().all()) for weight in agent.parameters()):
        raise CheckpointError(f"{path} has weights that are NaN or infinite; use another model of the run (models/)")
