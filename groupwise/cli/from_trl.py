"""`groupwise from-trl`: what a script with TRL's GRPOTrainer would do here, field by field, without running it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.cli.common import Commands, add, say
from groupwise.cli.new_files import write_new_files
from groupwise.errors import ConfigError, check_installed
from groupwise.terminal import write_text
from groupwise.text import plural

if TYPE_CHECKING:
    from groupwise.integrations.trl.report import ReportEntry, ScriptReport

IMPORT = "from groupwise.trl import GRPOConfig, GRPOTrainer"
EXAMPLES = (
    "groupwise from-trl train_grpo.py",
    "groupwise from-trl train_grpo.py --rows 7473 --processes 4",
    "groupwise from-trl train_grpo.py --config grpo.yaml --write recipe.toml",
)


def add_from_trl(commands: Commands) -> None:
    summary = "read a script with TRL's GRPOTrainer and say, field by field, what would happen"
    parser = add(commands, "from-trl", _from_trl, summary, examples=EXAMPLES)
    parser.add_argument("script", metavar="SCRIPT", help="a Python file or a notebook; it is read, not run")
    parser.add_argument("--config", metavar="YAML", help="the YAML file of a script that uses TrlParser")
    parser.add_argument("--line", type=int, metavar="N", help="of several trainers, only the one in this line")
    parser.add_argument("--rows", type=int, metavar="N", help="number of training rows, for what depends on it")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes that train (default: 1)")
    parser.add_argument("--write", metavar="RECIPE", help="write the settings to a new recipe file")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _from_trl(arguments: argparse.Namespace) -> int:
    """Returns 0 if the script runs as it is, and 1 if something is refused; an error is 2."""
    for option in ("rows", "processes"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option} must be at least 1, got {value}")
    check_installed([("groupwise from-trl", "accelerate", "trl")])
    from groupwise.integrations.trl.report import read_yaml, recipe_text, report_on
    from groupwise.integrations.trl.script import read_scripts

    scripts = read_scripts(arguments.script)
    lines = [script.trainer.line for script in scripts]
    if arguments.line is not None:
        if arguments.line not in lines:
            raise ConfigError(f"--line {arguments.line} has no GRPOTrainer (there is one in: {_listed(lines)})")
        scripts = [script for script in scripts if script.trainer.line == arguments.line]
    if arguments.write and len(scripts) > 1:
        raise ConfigError(
            f"--write is for one trainer, and there are {len(scripts)}; choose by --line {_listed(lines)}"
        )
    yaml = read_yaml(Path(arguments.config)) if arguments.config else None
    options = {"yaml": yaml, "rows": arguments.rows, "processes": arguments.processes}
    reports = [report_on(script, **options) for script in scripts]
    if arguments.json:
        values = [report.as_dict() for report in reports]
        write_text(json.dumps(values if len(values) > 1 else values[0], indent=2, default=str) + "\n")
    else:
        for number, report in enumerate(reports):
            if number:
                say("")
            _show(report)
    report = reports[0]
    if arguments.write and report.runs:
        path = Path(arguments.write)
        write_new_files(path.parent, {path.name: recipe_text(report).encode()})
        if not arguments.json:
            say(f"wrote {path}")
    elif arguments.write and not arguments.json:
        say(f"{arguments.write} was not written, because something is refused")
    return 0 if all(report.runs for report in reports) else 1


def _listed(lines: list[int]) -> str:
    return ", ".join(map(str, lines))


def _show(report: ScriptReport) -> None:
    script = report.script
    config = f"GRPOConfig at line {script.config.line}, " if script.config else ""
    say(f"{script.path}: {config}GRPOTrainer at line {script.trainer.line}")
    for title, entries in (("fields of GRPOConfig", report.fields), ("arguments of GRPOTrainer", report.arguments)):
        if entries:
            say("")
            say(f"{title}:")
            width = max(len(entry.name) for entry in entries)
            for entry in entries:
                say(f"  {entry.name:<{width}}  {_meaning(entry)}")
    for title, sentences in (("problems", report.problems), ("notes", report.notes)):
        if sentences:
            say("")
            say(f"{title}:")
            for sentence in sentences:
                say(f"  {sentence}")
    say("")
    for line in _conclusion(report):
        say(line)


def _meaning(entry: ReportEntry) -> str:
    if entry.status == "refused":
        return f"{entry.value}  refused: {entry.text}"
    if entry.status == "not known":
        return f"not known: {entry.value} (line {entry.line})"
    if entry.status == "no effect":
        return f"{entry.value}  no effect: {entry.text}"
    settings = ", ".join(f"{name} = {_value(value)}" for name, value in entry.settings.items())
    if not settings:
        return f"{entry.value}  → {entry.text or 'as in TRL'}"
    return f"{entry.value}  → {settings}" + (f" ({entry.text})" if entry.text else "")


def _value(value: object) -> str:
    from groupwise.integrations.trl.report import to_toml

    return "none" if value is None else to_toml(value)


def _conclusion(report: ScriptReport) -> list[str]:
    refused = len(report.refused) + len(report.problems)
    if refused:
        return [f"does not run as it is: {plural(refused, 'thing')} to change"]
    limits = [] if report.has_config else ["the config"]
    limits += [plural(len(report.unknown), "value")] if report.unknown else []
    known = f", as far as it can be read ({' and '.join(limits)} not known)" if limits else ""
    if report.script.changed:
        return [f"runs as it is{known}"]
    imports = report.script.imports or (IMPORT,)
    lines = "import" if len(imports) == 1 else "imports"
    return [f"runs as it is{known}. Replace TRL's {lines} by:", *(f"  {line}" for line in imports)]
