"""The settings of a recipe on the command line: ``--section.key VALUE``, and their part of ``--help``."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from groupwise.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

WIDTH = 112
ALL = "all"
TABLES = ("rewards", "phases", "ramps", "rules")  # explained by the examples below

INTRODUCTION = """
settings; in a recipe they are written [section] key = value, here --section.key VALUE; the VALUE none switches one off:
"""
# The settings in the short help of a command; the default is USUAL_SETTINGS.
USUAL = {
    "eval": (
        *("model.source", "model.device", "model.dtype", "data.held_out", "data.held_out_rows"),
        *("data.max_prompt_length", "evaluate.samples", "evaluate.temperature", "evaluate.max_new_tokens"),
        *("evaluate.metric", "train.seed"),
    )
}
# Shorter than the descriptions, for the list of usual settings.
SHORT = {
    "algorithm": "preset: dapo, grpo, gspo, dpo, …",
    "model.source": "a folder, hub id, or name of a model",
    "model.device": "such as cpu or cuda:1",
    "model.dtype": "dtype of the forward pass",
    "model.lora.rank": "train a LoRA adapter of this rank",
    "data.train": "training rows: a file, folder or hub dataset",
    "data.held_out": "evaluation rows, never trained on",
    "data.held_out_rows": "use only the first N evaluation rows",
    "sampling.samples_per_prompt": "G, completions per prompt",
    "sampling.max_new_tokens": "maximum completion length in tokens",
    "sampling.temperature": "sampling temperature",
    "loss.kl_coef": "β, weight of the KL to the reference model",
    "loss.clip_low": "the ratio is clipped below 1 − this",
    "loss.clip_high": "the ratio is clipped above 1 + this [clip_low]",
    "optimizer.learning_rate": "learning rate of AdamW",
    "train.steps": "number of steps [by epochs or phases]",
    "train.accumulation": "a step: batch_size × accumulation prompts",
    "train.seed": "seed of the row order and the sampling",
    "evaluate.every": "steps between evaluations; 0: at the end",
    "evaluate.max_new_tokens": "maximum completion length [as in training]",
    "evaluate.metric": "the metric to mark [the task's]",
    "run.folder": "folder of the run [a new one below runs/]",
    "run.checkpoint_every": "steps between checkpoints",
}
TABLE_SUMMARIES = {
    "phases": "settings for some steps, tokens or epochs, one after another",
    "ramps": "settings that are interpolated between points",
    "rules": "settings that change when a metric crosses a threshold",
    "task_options": "the task's own settings; `groupwise check RECIPE` shows them",
}
NOTATION = (
    "A recipe has them as [section] key = value, a command as --section.key VALUE.",
    "The VALUE none switches one off; --rewards.0.weight sets the first reward's.",
)
EXAMPLES = {
    "rewards": """
  [[rewards]], any number of them; each gives every completion a number, and their weighted sum is the reward:

      [[rewards]]
      function = "rewards.py:is_short"    # {function}
      weight = 0.5                        # {weight}
      name = "short"                      # {name}

      [[rewards]]
      function = "length_band"            # or judge, reward_model, repetition, keywords
      options = {{low = 80, high = 200}}    # {options}
""",
    "phases": """
  [[phases]], one after another; a phase lasts a number of steps, tokens or epochs, or a share of the run (0 to 1).
  If all have steps, tokens or epochs, the run ends with the last one; one without a length lasts to the run's end:

      [[phases]]
      name = "warm-up"
      steps = 100                         # or tokens = 50_000_000, epochs = 0.5, share = 0.1
      temperature = 0.7
      kl_coef = 0.02

      [[phases]]
      name = "main"
      epochs = 2
      temperature = 1.0
""",
    "ramps": """
  [ramps]; a setting is interpolated from one value to another, or through several points:

      [ramps]
      temperature = {{ from = 1.0, to = 0.7, steps = 200 }}    # also tokens = …, start = …, shape = "cosine"
      kl_coef = {{ at = [[0, 0.05], [100, 0.01]] }}
""",
    "rules": """
  [[rules]]; a setting changes when the mean of a metric over some steps is below or above a threshold:

      [[rules]]
      when = "accuracy < 0.15"
      over = 10
      then = "learning_rate * 0.5"
      at_least = 1e-7                     # also at_most, cooldown, times
""",
}
SCHEDULED = """
  Phases, ramps and rules can change these settings; the last part of a name is enough if it is unique:

{scheduled}
"""
ENTRIES = """
  On the command line an entry of {tables} has a number, from 0: --{table}.0.{key} VALUE
"""


def split_settings(words: Sequence[str], options: Collection[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Split the words of a command into its own and the settings, (name, text), before or after the recipe.

    A word with two dashes that is not one of the command's ``options`` is a setting: ``--section.key=value``, or
    ``--section.key`` with its value as the next word; the text is None without a value.
    """
    command: list[str] = []
    settings: list[tuple[str, str | None]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if not name.startswith("--") or name in ("--", *options):
            command.append(word)
            continue
        if equals:
            settings.append((_name(name), text))
        else:
            settings.append((_name(name), rest.pop(0) if rest and not rest[0].startswith("--") else None))
    return command, settings


def _name(word: str) -> str:
    return word[2:].replace("-", "_")


def parse_settings(settings: Sequence[tuple[str, str | None]], command: str = "train") -> dict[str, Any]:
    """The values of settings that are given as texts to a command; a switch without a text is true."""
    from groupwise.config import parse_override

    values: dict[str, Any] = {}
    for name, text in settings:
        if name in values:
            raise ConfigError(f"--{name} is given twice")
        values[name] = parse_override(name, "true" if text is None else text, command)
        if text is None:
            _check_switch(name)
    return values


def _check_switch(name: str) -> None:
    """Raise an error unless the setting can be true, so that it needs no value."""
    from groupwise.config.fields import choices_of, expected_of, types_of
    from groupwise.config.names import find_field

    field = None if name.startswith("task_options.") else find_field(name)
    if field is None or bool in types_of(field):
        return
    choices = choices_of(field)
    expected = f"one of {', '.join(choices)}" if choices else expected_of(name, field)
    raise ConfigError(f"--{name} needs a value: {expected}")


def settings_help() -> str:
    """Every setting with its default and description, by section, and an example of each list of tables."""
    sections = [_section(name) for name in ("", *_sections())]
    examples = [_example(table) for table in TABLES]
    return "".join([INTRODUCTION, *sections, *examples, _scheduled()])


def section_help(topic: str) -> str:
    """The help of a section, a list of tables or one setting; of everything for ``all``."""
    from groupwise.config import setting_names

    name = topic.strip("[]-").replace("-", "_")
    if name == ALL:
        return settings_help()
    if name in EXAMPLES:
        return _example(name) + _entries(name) + ("" if name == "rewards" else _scheduled())
    if name in _sections():
        inner = [section for section in _sections() if section.startswith(f"{name}.")]
        return "".join(_section(section) for section in (name, *inner))
    fields = dict(setting_names())
    if name in fields:
        return _setting(name, fields[name])
    topics = [*_sections(), *TABLES, ALL]
    near = did_you_mean(name, [*topics, *fields])
    raise ConfigError(f"there is no section {topic!r}{near} (sections: {', '.join(topics)})")


def short_help(command: str) -> str:
    """The usual settings and the list of sections."""
    from groupwise.config import Recipe, RewardSection, setting_names
    from groupwise.config.fields import section_of
    from groupwise.config.names import USUAL_SETTINGS

    fields = dict(setting_names())
    lines = ["", "usual settings, with their defaults in brackets (a recipe may have others):"]
    for name in USUAL.get(command, USUAL_SETTINGS):
        field = fields[name]
        text = SHORT.get(name) or str(field.description)
        default = field.get_default(call_default_factory=True)
        # The rank of an adapter has a default, but there is no adapter by default.
        shown = "" if default is None or name == "model.lora.rank" else f" [{_shown(default)}]"
        lines.append(f"  --{name:<27}  {text}{shown}")
    lines += ["", f"sections (`groupwise {command} --help SECTION` shows one, `--help {ALL}` all):"]
    # The task's options last: their settings depend on the task.
    for name in sorted(Recipe.model_fields, key=lambda name: name == "task_options"):
        field = Recipe.model_fields[name]
        section = RewardSection if name == "rewards" else section_of(field)
        summary = TABLE_SUMMARIES.get(name) or (section.__doc__ if section is not None else None)
        if summary is not None:
            lines.append(f"  {name:<12}  {summary}")
    lines += ["", *NOTATION]
    return "\n".join(lines) + "\n"


def _sections() -> list[str]:
    from groupwise.config import setting_names

    return [name for name in dict.fromkeys(name.rpartition(".")[0] for name, _ in setting_names()) if name]


def _section(section: str) -> str:
    """The settings of a section; "" are those without one."""
    from groupwise.config import setting_names

    settings = (
        _setting(name, field)
        for name, field in setting_names()
        if name not in TABLES and name.rpartition(".")[0] == section
    )
    return (f"\n  [{section}]\n" if section else "\n") + "".join(settings)


def _setting(name: str, field: FieldInfo) -> str:
    from groupwise.config.fields import choices_of

    facts = [f"one of {', '.join(choices)}"] if (choices := choices_of(field)) else []
    default = field.get_default(call_default_factory=True)
    facts += [f"default: {_shown(default)}"] if default not in (None, [], {}) else []
    description = f"{field.description} ({'; '.join(facts)})" if facts else str(field.description)
    return f"  --{name}\n{_wrap(description)}\n"


def _example(table: str) -> str:
    from groupwise.config import RewardSection

    return EXAMPLES[table].format(**{key: field.description for key, field in RewardSection.model_fields.items()})


def _entries(table: str) -> str:
    from groupwise.config.names import LIST_KEYS

    return ENTRIES.format(tables=f"[[{table}]]", table=table, key=LIST_KEYS[table]) if table in LIST_KEYS else ""


def _scheduled() -> str:
    from groupwise.config import Recipe, scheduled_names

    return SCHEDULED.format(scheduled=_wrap(", ".join(scheduled_names(Recipe()))))


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)


def _shown(default: Any) -> str:
    """A default as a recipe would write it."""
    if isinstance(default, bool):
        return "true" if default else "false"
    return f"{default:g}" if isinstance(default, float) else str(default)
