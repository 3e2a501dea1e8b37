"""The recipe: every setting of a run, typed, with the sentence that ``--help`` shows.

A recipe is TOML. Three layers make it: the algorithm's preset, the file, and what the command line overrides
(``--section.key value``); the later wins, key by key. A key that does not exist is an error that names its nearest
neighbour. A recipe is never changed once it is made: a schedule makes a new one for each step.
"""

from groupwise.config.layers import load_recipe, make_recipe, parse_override, samples_answers
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
    "samples_answers",
    "scheduled_names",
    "setting_names",
]
