"""The model card of an exported policy, in the form that the hub shows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCardData

from groupwise import __version__
from groupwise.config import Recipe
from groupwise.evaluate import REWARD
from groupwise.model.catalogue import CATALOGUE
from groupwise.rundir import package_versions
from groupwise.text import code_span, escape_markdown, fixed, markdown_table, one_line, plural
from groupwise.training.components import RunComponents
from groupwise.training.preference import LOGP_ACCURACY
from groupwise.training.state import TrainState
from groupwise.training.store.run_folder import PACKAGES, differences
from groupwise.training.update.objective import active_terms

HUB_LICENCES = {"Gemma terms": "gemma"}  # other licences are their SPDX name in lower case


def model_card(components: RunComponents, state: TrainState, changed_evaluation: Sequence[str] = ()) -> str:
    """What the model is, how it was trained, and what was measured.

    changed_evaluation: the settings in which the two evaluations of the table differ.
    """
    recipe = components.recipe
    tags = [term.tag for term in active_terms(recipe, components.driven) if term.tag is not None]
    metadata = ModelCardData(
        library_name="transformers", tags=["groupwise", *dict.fromkeys(tags)], **base_model(recipe.model.source)
    )
    trained = "supervised steps" if components.supervised else f"steps of {code_span(recipe.algorithm)}"
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {escape_markdown(recipe.run.name or components.task.name)}",
        f"{code_span(recipe.model.source)} after {state.exported_step} {trained} on {_training_data(components)}, "
        f"trained with groupwise {__version__}.",
    ]
    if components.metric is not None and state.last:
        header = ["held out", state.first_label, state.measured_label]
        rows = [(escape_markdown(name), *figures) for name, *figures in held_out_rows(components, state)]
        parts.append(markdown_table(header, rows, left=range(3)))
        if changed_evaluation:
            parts.append(
                "Do not compare the two columns: the run was resumed with another "
                + ", ".join(map(code_span, changed_evaluation))
                + "."
            )
        if state.evaluations > 1:
            parts.append(
                f"The exported policy is the best of {state.evaluations} evaluations on these rows, so its figure is "
                "optimistic; measure it on other rows before you report it."
            )
    changed = differences(Recipe().recorded(), recipe.recorded())
    parts += [
        "Settings that differ from the defaults:",
        "\n".join(f"- {escape_markdown(name)}: {code_span(repr(value))}" for name, _, value in changed),
        "Versions: " + ", ".join(f"{name} {version}" for name, version in package_versions(PACKAGES).items()) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def base_model(source: str) -> dict[str, Any]:
    """The hub id of the model that was trained and its licence, as far as they are known."""
    if os.path.exists(os.path.expanduser(source)):
        return {}
    if (entry := CATALOGUE.get(source)) is not None and entry.hub_id is not None:
        return {"base_model": entry.hub_id, "license": HUB_LICENCES.get(entry.licence, entry.licence.lower())}
    return {"base_model": one_line(source)} if "/" in source else {}


def held_out_rows(components: RunComponents, state: TrainState) -> list[tuple[str, str, str]]:
    """Name, first and exported value of each held-out metric, with intervals."""
    names = components.measured_metrics + ([LOGP_ACCURACY] if components.pairs.held_out else [])
    shares = {*names} if components.task.grades else {*names} - {REWARD}

    def shown(metrics: Mapping[str, float], name: str) -> str:
        if name not in metrics:
            return "–"
        value, low, high = (metrics[key] for key in (name, f"{name}_low", f"{name}_high"))
        if name in shares:
            return f"{value:.1%} [{low:.1%}, {high:.1%}]"
        return f"{fixed(value)} [{fixed(low)}, {fixed(high)}]"

    return [(name, shown(state.first, name), shown(state.measured, name)) for name in names]


def _training_data(components: RunComponents) -> str:
    """The task, the pairs of a data set, or both."""
    sources = []
    if components.samples or components.supervised:
        sources.append(f"the task {code_span(components.task.name)}")
    if components.pairs.train and not components.supervised and components.learns_from_pairs:
        sources.append(plural(len(components.pairs.train), "preference pair"))
    return " and ".join(sources)
