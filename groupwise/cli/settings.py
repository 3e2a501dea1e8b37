"""The settings of a recipe on the command line: ``--section.key VALUE``, and their part of ``--help``."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from typing import Any

from groupwise.errors import ConfigError

WIDTH = 112
SAME = {"model.name": "model.source"}  # what else a setting may be called on the command line
TABLES = ("rewards", "phases", "ramps", "rules")

# What a list of tables looks like says more than a sentence about it.
EXAMPLES = """
  [[rewards]], as many as you like; a reward gives every answer a number, and their weighted sum is what is learned:

      [[rewards]]
      function = "rewards.py:is_short"    # {function}
      weight = 0.5                        # {weight}
      name = "short"                      # {name}

      [[rewards]]
      function = "length_band"            # or judge, reward_model, repetition, keywords
      options = {{low = 80, high = 200}}    # {options}

  [[phases]], one after another; a phase lasts some steps or tokens, the last one may last to the end:

      [[phases]]
      name = "warm-up"
      steps = 100
      temperature = 0.7
      kl_coef = 0.02

      [[phases]]
      name = "main"
      temperature = 1.0

  [ramps]; a setting that moves from one value to another, or through several points:

      [ramps]
      temperature = {{ from = 1.0, to = 0.7, steps = 200 }}    # also tokens = …, start = …, shape = "cosine"
      kl_coef = {{ at = [[0, 0.05], [100, 0.01]] }}

  [[rules]]; a setting that changes when the mean of a metric over some steps is below or above a number:

      [[rules]]
      when = "accuracy < 0.15"
      over = 10
      then = "learning_rate * 0.5"
      at_least = 1e-7                     # also at_most, cooldown, times

  Phases, ramps and rules may drive these settings, by the last part of their name where that is enough:

{scheduled}
"""


def split_settings(words: Sequence[str], options: Collection[str]) -> tuple[list[str], list[str]]:
    """The command's own words and the settings among them, which may stand in front of a recipe as well as behind it.

    A word with two dashes that is none of the command's ``options`` is a setting; the word behind it is its value.
    """
    own: list[str] = []
    settings: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or name in ("--", *options):
            own.append(word)
            continue
        settings.append(word)
        if not equals and waiting and not waiting[0].startswith("--"):
            settings.append(waiting.pop(0))
    return own, settings


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """``--section.key value`` and ``--section.key=value`` as dotted settings; a switch without a value means true."""
    from groupwise.config import parse_override

    found: dict[str, Any] = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"{word!r} is not understood; settings are given as --section.key VALUE")
        name, equals, text = word[2:].partition("=")
        if not equals:
            text = waiting.pop(0) if waiting and not waiting[0].startswith("--") else "true"
        name = name.replace("-", "_")
        name = SAME.get(name, name)
        if name in found:
            raise ConfigError(f"--{name} is given twice")
        found[name] = parse_override(name, text)
    return found


def settings_help() -> str:
    """Every setting with its default and its sentence, section by section, and an example of each list of tables."""
    from groupwise.config import Recipe, RewardSection, scheduled_names, setting_names
    from groupwise.config.fields import choices_of

    sections: dict[str, list[str]] = {}
    for name, field in setting_names():
        if name in TABLES:
            continue
        facts = [f"one of {', '.join(choices)}"] if (choices := choices_of(field)) else []
        default = field.get_default(call_default_factory=True)
        facts += [f"default: {_shown(default)}"] if default not in (None, [], {}) else []
        text = f"{field.description} ({'; '.join(facts)})" if facts else str(field.description)
        indent = " " * 6
        lines = textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        sections.setdefault(name.rpartition(".")[0], []).append(f"  --{name}\n{lines}\n")
    parts = [
        "\nsettings; in a recipe they are written [section] key = value, here --section.key VALUE; the VALUE none\n"
        "switches one off:\n"
    ]
    for section, entries in sections.items():
        parts.append(f"\n  [{section}]\n" if section else "\n")
        parts += entries
    scheduled = textwrap.fill(
        ", ".join(scheduled_names(Recipe())), WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
    )
    own = {key: field.description for key, field in RewardSection.model_fields.items()}
    return "".join(parts) + EXAMPLES.format(scheduled=scheduled, **own)


def _shown(default: Any) -> str:
    """A default as a recipe would have it."""
    if isinstance(default, bool):
        return "true" if default else "false"
    return f"{default:g}" if isinstance(default, float) else str(default)
