"""Plug-ins by name, registered as entry points. Those of groupwise itself are registered in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from groupwise.errors import ConfigError, check_choice
from groupwise.text import error_reason

GENERATORS = "groupwise.generators"
BUILTIN_GENERATORS = {  # as in pyproject.toml
    "engine": "groupwise.generate.engine:make_engine",
    "vllm": "groupwise.integrations.vllm.plugin:make_vllm",
}
BUILTIN_TASKS = {  # as in pyproject.toml
    "rows": "groupwise.tasks.rows:rows_task",
    "quiz": "groupwise.tasks.quiz:quiz_task",
    "game": "groupwise.tasks.game:game_task",
    "gsm8k": "groupwise.tasks.gsm8k:gsm8k_task",
    "usmle": "groupwise.usmle.task:USMLE",
}


def plugin_names(group: str, builtin: Mapping[str, str]) -> list[str]:
    """The names in a group of entry points, ours first."""
    return list(_entry_points(group, builtin))


def load_plugin(group: str, builtin: Mapping[str, str], name: str, what: str) -> Any:
    """The object registered under ``name``.

    ``builtin`` repeats the entries of pyproject.toml, for a source tree that is on the path but not installed.
    """
    entries = _entry_points(group, builtin)
    check_choice(what, name, entries, ConfigError)
    try:
        return entries[name].load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too
        raise ConfigError(
            f"the {what} {name!r} cannot be loaded from {entries[name].value}: {type(error).__name__}: "
            f"{error_reason(error)}"
        ) from error


def _entry_points(group: str, builtin: Mapping[str, str]) -> dict[str, EntryPoint]:
    entries = {name: EntryPoint(name, value, group) for name, value in builtin.items()}
    for entry in entry_points(group=group):
        entries.setdefault(entry.name, entry)
    return entries
