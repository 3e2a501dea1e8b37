"""The recipe: every setting of a run, typed, with its line in ``--help``.

A recipe is a TOML file. It is merged key by key from the algorithm's preset, the file, and the command line
(``--section.key value``); later layers win. An unknown key is an error that names the nearest one. Recipes are
immutable: a schedule makes a new one for each step.
"""

from groupwise.config.layers import load_recipe, make_recipe, parse_override, with_settings
from groupwise.config.names import resolve_scheduled, scheduled_names, setting_names
from groupwise.config.sections import GroupingSection, Recipe, RewardSection, SourcesSection

__all__ = [
    "GroupingSection",
    "Recipe",
    "RewardSection",
    "SourcesSection",
    "load_recipe",
    "make_recipe",
    "parse_override",
    "resolve_scheduled",
    "scheduled_names",
    "setting_names",
    "with_settings",
]
