"""The settings of a recipe on the command line: ``--section.key VALUE``, and their part of ``--help``."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from typing import Any

from groupwise.errors import ConfigError

WIDTH = 112
TABLES = ("rewards", "phases", "ramps", "rules")  # explained by the examples below

INTRODUCTION = """
settings; in a recipe they are written [section] key = value, here --section.key VALUE; the VALUE none switches one off:
"""
EXAMPLES = """
  [[rewards]], any number of them; each gives every completion a number, and their weighted sum is the reward:

      [[rewards]]
      function = "rewards.py:is_short"    # {function}
      weight = 0.5                        # {weight}
      name = "short"                      # {name}

      [[rewards]]
      function = "length_band"            # or judge, reward_model, repetition, keywords
      options = {{low = 80, high = 200}}    # {options}

  [[phases]], one after another; a phase lasts a number of steps or tokens, the last one to the end if it has neither:

      [[phases]]
      name = "warm-up"
      steps = 100
      temperature = 0.7
      kl_coef = 0.02

      [[phases]]
      name = "main"
      temperature = 1.0

  [ramps]; a setting is interpolated from one value to another, or through several points:

      [ramps]
      temperature = {{ from = 1.0, to = 0.7, steps = 200 }}    # also tokens = …, start = …, shape = "cosine"
      kl_coef = {{ at = [[0, 0.05], [100, 0.01]] }}

  [[rules]]; a setting changes when the mean of a metric over some steps is below or above a threshold:

      [[rules]]
      when = "accuracy < 0.15"
      over = 10
      then = "learning_rate * 0.5"
      at_least = 1e-7                     # also at_most, cooldown, times

  Phases, ramps and rules can change these settings; the last part of a name is enough if it is unique:

{scheduled}
"""


def split_settings(words: Sequence[str], options: Collection[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split the words of a command into its own and the settings, (name, text), before or after the recipe.

    A word with two dashes that is not one of the command's ``options`` is a setting: ``--section.key=value``, or
    ``--section.key`` with its value as the next word; without a value it is true.
    """
    command: list[str] = []
    settings: list[tuple[str, str]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if not name.startswith("--") or name in ("--", *options):
            command.append(word)
            continue
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        settings.append((name[2:].replace("-", "_"), text))
    return command, settings


def parse_settings(settings: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The values of settings that are given as texts."""
    from groupwise.config import parse_override

    values: dict[str, Any] = {}
    for name, text in settings:
        if name in values:
            raise ConfigError(f"--{name} is given twice")
        values[name] = parse_override(name, text)
    return values


def settings_help() -> str:
    """Every setting with its default and description, by section, and an example of each list of tables."""
    from groupwise.config import Recipe, RewardSection, scheduled_names, setting_names
    from groupwise.config.fields import choices_of

    def wrap(text: str) -> str:
        return textwrap.fill(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)

    sections: dict[str, str] = {}
    for name, field in setting_names():
        if name in TABLES:
            continue
        section = name.rpartition(".")[0]
        facts = [f"one of {', '.join(choices)}"] if (choices := choices_of(field)) else []
        default = field.get_default(call_default_factory=True)
        facts += [f"default: {_shown(default)}"] if default not in (None, [], {}) else []
        description = f"{field.description} ({'; '.join(facts)})" if facts else str(field.description)
        sections.setdefault(section, f"\n  [{section}]\n" if section else "\n")
        sections[section] += f"  --{name}\n{wrap(description)}\n"
    reward = {key: field.description for key, field in RewardSection.model_fields.items()}
    examples = EXAMPLES.format(scheduled=wrap(", ".join(scheduled_names(Recipe()))), **reward)
    return "".join([INTRODUCTION, *sections.values(), examples])


def _shown(default: Any) -> str:
    """A default as a recipe would write it."""
    if isinstance(default, bool):
        return "true" if default else "false"
    return f"{default:g}" if isinstance(default, float) else str(default)
