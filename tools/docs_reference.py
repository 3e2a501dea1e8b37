"""Write docs/settings.md, docs/metrics.md and docs/trl-fields.md from the code. `make docs` runs it; a test fails if
one is stale.

python tools/docs_reference.py            # write the pages
python tools/docs_reference.py --check    # exit status 1 if one of them would change
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from groupwise.algorithms import ALGORITHMS
from groupwise.config import Recipe, RewardSection, scheduled_names, setting_names
from groupwise.config.fields import choices_of, expected_of
from groupwise.control.descriptions import EVALUATION_METRICS, UPDATE_METRICS
from groupwise.control.settings import PRESETS, Config, GRPOSettings, PPOSettings
from groupwise.integrations.trl.fields import GROUPS, ConfigField, FieldExample
from groupwise.tasks import TASKS, find_task
from groupwise.training.monitor.descriptions import SECTIONS, aliases

DOCS = Path(__file__).parents[1] / "docs"
NOTE = "<!-- Written by tools/docs_reference.py from the code. Do not edit: run `make docs`. -->\n"

# What each section is about: the sentence under its heading.
ABOUT = {
    "": "At the top of a recipe, before the first section.",
    "model": "Where the model comes from, and how it is computed. See [Models](models.md).",
    "model.lora": "Train a LoRA adapter instead of all weights. Needs the extra `lora`.",
    "data": "The rows to train and to evaluate on. See [Your data](data.md).",
    "scoring": "How rewards are computed. See [Your reward](rewards.md).",
    "sampling": "How completions are sampled. See [Generation](generation.md).",
    "environment": "Completions that are conversations: see [tools and environments](environments.md).",
    "vllm": 'vLLM as the sampler, with `sampling.generator = "vllm"`. See [vLLM](vllm.md).',
    "advantages": "From rewards to advantages. See [Choosing an algorithm](algorithms.md).",
    "grouping": 'Clusters of similar completions, for `advantages.grouping = "similarity"`. '
    "See [Similarity groups](creative.md).",
    "loss": "The policy loss and its regularizers. See [Choosing an algorithm](algorithms.md).",
    "preference": "A loss on preference pairs, beside the policy loss or alone. See [Preferences](preference.md).",
    "distillation": "A teacher scores the student's samples, beside the policy loss or alone. See "
    "[Distillation](distillation.md).",
    "masks": "Completions and tokens that the policy loss leaves out.",
    "reference": "The reference model of the KL and of preference pairs. It exists only if something needs it.",
    "optimizer": "AdamW and the learning-rate schedule.",
    "sft": "Supervised steps on a task's examples before the first step. "
    "See [Extending](extending.md#supervised-fine-tuning).",
    "train": "Length of the run, batches, and what to do in odd cases. See [Memory and speed](memory-and-speed.md).",
    "evaluate": "Evaluation on the held-out rows during a run. See [Evaluating](evaluating.md).",
    "run": "What a run writes, and where. See [Stop, resume, compare](resume.md).",
}
TABLES = ("task_options", "rewards", "phases", "ramps", "rules")  # their entries are described below the sections


def settings_page() -> str:
    return "\n".join([NOTE, *_settings_head(), *_sections(), *_table_sections(), *_presets(), *_control()])


def _settings_head() -> Iterator[str]:
    number = sum(1 for _ in setting_names())
    yield "# Settings\n"
    yield (
        f"A recipe has {number} settings, all with a default; `groupwise train --help` lists the twenty usual ones. In "
        "a recipe file they are written `[section]` and "
        "`key = value`; on the command line `--section.key VALUE`, where the value `none` switches an optional setting "
        "off; in Python as keyword arguments of `Trainer.from_rows`, or as nested tables for `make_recipe`.\n"
    )
    yield (
        "Three layers are merged key by key, and later ones win: the [preset](#presets) of the algorithm, the recipe "
        "file, the command line. An unknown key is an error that names the nearest one. "
        "`groupwise train --help SECTION` prints this reference in the terminal.\n"
    )
    yield (
        "*Scheduled* marks what [phases, ramps and rules](extending.md#schedules) may change during a run. A preset "
        "that changes a default is listed with its value.\n"
    )


def _sections() -> Iterator[str]:
    scheduled = scheduled_names(Recipe())
    sections: dict[str, list[str]] = {}
    for name, field in setting_names():
        if name not in TABLES:
            sections.setdefault(name.rpartition(".")[0], []).append(_row(name, field, name in scheduled))
    for section, rows in sections.items():
        yield f"## {f'[{section}]' if section else 'Task and algorithm'}\n"
        yield f"{ABOUT[section]}\n"
        yield from _table(("setting", "type", "default", "meaning"), rows)


def _row(name: str, field: FieldInfo, scheduled: bool) -> str:
    notes = ["*scheduled*"] if scheduled else []
    notes += [f"`{preset}`: {_code(values[name])}" for preset, values in _changes().items() if name in values]
    meaning = _one_line(field) + (f"<br>{', '.join(notes)}" if notes else "")
    return _cells(_anchored(name), _type(name, field), _default(field), meaning)


def _changes() -> dict[str, Mapping[str, Any]]:
    """The settings of each preset that differ from the section's default."""
    defaults = Recipe()
    return {
        name: {key: value for key, value in preset.settings.items() if defaults.get(key) != value}
        for name, preset in ALGORITHMS.items()
    }


def _table_sections() -> Iterator[str]:
    yield "## [[rewards]]\n"
    yield (
        "Any number of tables. Each gives every completion a number, and the weighted sum is the reward. They are "
        "added to the task's own. See [Your reward](rewards.md).\n"
    )
    yield from _options(RewardSection, "rewards.")
    yield "## [task_options]\n"
    yield "The task's own settings, also as `--task_options.KEY VALUE`. `groupwise check RECIPE` shows them.\n"
    for task in TASKS:
        options = find_task(task).options
        if options is not None:
            yield f"Of the task `{task}`:\n"
            yield from _options(options, "task_options.")
    yield "## [[phases]], [ramps], [[rules]]\n"
    yield (
        "Settings that change during a run; see [Schedules](extending.md#schedules). These can: "
        + ", ".join(f"[`{name}`](#{name})" for name in scheduled_names(Recipe()))
        + ".\n"
    )


def _options(model: type[BaseModel], prefix: str) -> Iterator[str]:
    rows = [
        _cells(_anchored(key, prefix + key), _type(key, field), _default(field), _one_line(field))
        for key, field in model.model_fields.items()
    ]
    yield from _table(("setting", "type", "default", "meaning"), rows)


def _presets() -> Iterator[str]:
    yield "## Presets\n"
    yield (
        '`algorithm = "NAME"` puts these settings below a recipe. Everything else has the default above. '
        "[Choosing an algorithm](algorithms.md) says when to use which.\n"
    )
    for name, preset in ALGORITHMS.items():
        yield f"### {name}\n"
        yield f"{preset.summary}\n"
        yield "```toml"
        yield f'algorithm = "{name}"  # sets:'
        sections: dict[str, list[str]] = {}
        for setting, value in preset.settings.items():
            section, _, key = setting.rpartition(".")
            sections.setdefault(section, []).append(f"{key} = {_toml(value)}")
        for section, lines in sections.items():
            yield f"\n[{section}]"
            yield from lines
        yield "```\n"


def _control() -> Iterator[str]:
    yield "## groupwise control\n"
    yield (
        "`groupwise control train` has settings of its own: those of a run, and those of its algorithm, which a preset "
        "fills and `--algo PRESET:KEY=VALUE` changes. See [Control](control.md).\n"
    )
    rows = [
        _cells(f"`{key}`", _default(field), _one_line(field))
        for key, field in Config.model_fields.items()
        if key != "settings"
    ]
    yield from _table(("of a run", "default", "meaning"), rows)
    for title, kind in (("of `grpo`", GRPOSettings), ("of `ppo`", PPOSettings)):
        presets = {name: preset for name, preset in PRESETS.items() if type(preset) is kind}
        rows = []
        for key, field in kind.model_fields.items():
            if key != "algorithm":
                values = [_code(getattr(preset, key)) for preset in presets.values()]
                rows.append(_cells(f"`{key}`", *values, _one_line(field)))
        yield from _table((title, *(f"`{name}`" for name in presets), "meaning"), rows)


def metrics_page() -> str:
    return "\n".join([NOTE, *_metrics()])


def _metrics() -> Iterator[str]:
    yield "# Metrics\n"
    yield (
        "What a run writes to `metrics.jsonl`, TensorBoard and Weights & Biases: one row per step, and one per "
        "evaluation (`eval/`). Names are TRL's where TRL has the same metric. A part in braces is a name that your run "
        "supplies: a reward's, the task's grade (such as `accuracy`), a number or a letter. A reward function adds "
        "metrics of its own with `log_metric` ([Your reward](rewards.md)). [Reading a run](reading-a-run.md) says "
        "which ones to look at.\n"
    )
    for title, descriptions in SECTIONS.items():
        yield f"## {title}\n"
        yield from _table(("metric", "meaning"), [_cells(f"`{name}`", text) for name, text in descriptions.items()])
    yield "## Other names\n"
    yield "Some algorithms log a metric a second time under the name that other implementations use.\n"
    rows = []
    for alias, names in aliases().items():
        presets = ", ".join(f"`{name}`" for name in names)
        rows.append(_cells(f"`{alias}`", f"`{next(iter(names.values()))}`", presets))
    yield from _table(("metric", "the same as", "logged by"), rows)
    yield "## groupwise control\n"
    yield "`metrics.jsonl` of a control run has one row per update:\n"
    yield from _table(("metric", "meaning"), [_cells(f"`{name}`", text) for name, text in UPDATE_METRICS.items()])
    yield "`progress.csv` has one row per evaluation: these, and the means of the metrics above since the last one.\n"
    yield from _table(("metric", "meaning"), [_cells(f"`{name}`", text) for name, text in EVALUATION_METRICS.items()])


def trl_page() -> str:
    return "\n".join([NOTE, *_trl()])


def _trl() -> Iterator[str]:
    kinds = Counter(field.kind for group in GROUPS.values() for field in group.values())
    yield "# Fields of GRPOConfig\n"
    yield (
        "What each field of TRL 1.16's `GRPOConfig`, those of transformers' `TrainingArguments` included, does with "
        "[`groupwise.trl`](trl.md). All have TRL's names, defaults and meaning: sizes count completions, and intervals "
        f"count updates. {kinds['translated']} are translated to [settings](settings.md) of a recipe, "
        f"{kinds['trainer']} are used by `GRPOTrainer` itself, {kinds['no effect']} have no effect here, for the "
        f"reason in the table, and {kinds['refused']} are refused if they have another value than TRL's default, with "
        "an error that says what to do. `groupwise from-trl SCRIPT` says the same about a script.\n"
    )
    yield (
        "The column *tested* has the examples that the tests run: a value, and what it changes in the recipe of a run "
        "with 64 training rows and TRL's defaults.\n"
    )
    for title, fields in GROUPS.items():
        yield f"## {title}\n"
        rows = [_cells(f"`{name}`", _trl_meaning(field), _trl_tested(field)) for name, field in fields.items()]
        yield from _table(("field", "here", "tested"), rows)


def _trl_meaning(field: ConfigField) -> str:
    meaning = field.meaning.replace("{", "&#123;").replace("}", "&#125;")
    if field.kind == "translated":
        names = ", ".join(f"[`{name}`](settings.md#{name})" for name in field.settings)
        return f"{names}{'; ' if meaning else ''}{meaning}"
    if field.kind == "trainer":
        return f"`GRPOTrainer`: {meaning}"
    return f"**{field.kind}**: {meaning}" if field.kind == "refused" else f"{field.kind}: {meaning}"


def _trl_tested(field: ConfigField) -> str:
    if field.kind == "trainer":
        return f"`{field.test.rpartition('/')[2]}`"
    return "<br>".join(_trl_example(field, example) for example in field.examples)


def _trl_example(field: ConfigField, example: FieldExample) -> str:
    value = "an object" if type(example.value) is object else f"`{example.value!r}`"
    given = ", ".join(f"`{name}={other!r}`" for name, other in example.given.items())
    given = f" (with {given})" if given else ""
    if field.kind == "refused":
        return f"{value}{given}"
    changes = ", ".join(f"`{name} = {_toml(setting)}`" for name, setting in example.settings.items())
    return f"{value}{given}: {changes or 'no change'}"


def _table(head: Iterable[str], rows: Iterable[str]) -> Iterator[str]:
    head = list(head)
    yield _cells(*head)
    yield "|" + "---|" * len(head)
    yield from rows
    yield ""


def _cells(*values: str) -> str:
    return f"| {' | '.join(value.replace('|', chr(92) + '|') for value in values)} |"


def _anchored(key: str, name: str | None = None) -> str:
    return f'<span id="{name or key}"></span>`{key}`'


def _type(name: str, field: FieldInfo) -> str:
    if choices := choices_of(field):
        return " · ".join(_code(choice) for choice in choices)
    return expected_of(name, field).partition(", such as")[0]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "–" if value is None or value in ([], {}, ()) else _code(value)


def _code(value: Any) -> str:
    if isinstance(value, tuple):
        return f"`{'x'.join(map(str, value))}`"
    return f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    """A value as a recipe writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = f"{value:g}"
        return text if "e" in text or "." in text else f"{text}.0"
    if value is None:
        return "none"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _one_line(field: FieldInfo) -> str:
    # Braces at the end of a cell would be read as attributes of the cell.
    return " ".join(str(field.description).split()).replace("{", "&#123;").replace("}", "&#125;")


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page, "trl-fields.md": trl_page}


def stale_pages(folder: Path = DOCS) -> list[str]:
    """The pages that differ from what the code says now."""
    return [
        name
        for name, make in PAGES.items()
        if not (folder / name).exists() or (folder / name).read_text(encoding="utf-8") != make()
    ]


def main() -> int:
    if "--check" in sys.argv[1:]:
        stale = stale_pages()
        for name in stale:
            print(f"docs/{name} is not what the code says; run: make docs")
        return bool(stale)
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
