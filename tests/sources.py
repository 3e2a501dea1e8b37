"""Reads docs/sources.md, and finds out whether what it names exists: in the package, and in the designs."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import keyword
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from groupwise.algorithms import ALGORITHMS
from groupwise.cli import COMMANDS, PLUGINS
from groupwise.cli.parser import Parser
from groupwise.config import Recipe, RewardSection, setting_names
from groupwise.config.layers import nested
from groupwise.config.names import section_names
from groupwise.control.settings import PRESETS, Config, GRPOSettings, PPOSettings
from groupwise.core.losses import LOSSES
from groupwise.core.preference import KINDS
from groupwise.plugins import load_plugin
from groupwise.tasks import TASKS, find_task

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "sources.md"
DESIGNS = ROOT.parent / "shared" / "seeds"
# The designs by the headings of their sections, with the beginning of the file's name.
SECTIONS = {
    "Enhanced GRPO for USMLE multiple choice": "000",
    "The GRPO reference (TRL's GRPOTrainer)": "001",
    "Similarity-group GRPO for creative writing (verl, Ray)": "002",
    "Preference-guided GRPO": "003",
    "GRPO against PPO on Gymnasium": "004",
}


class Row(NamedTuple):
    """A row of a table of the page: the line, its section, and the first two columns."""

    line: int
    section: str
    design: str
    here: str


def rows(text: str) -> Iterator[Row]:
    """The rows of every table with a column "here"."""
    section, here = "", -1
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#"):
            section, here = line.lstrip("# "), -1
        if not line.startswith("|"):
            here = -1
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if "here" in cells:
            here = cells.index("here")
        elif here > 0 and not set(cells[0]) <= set("-: "):
            yield Row(number, section, cells[0], cells[here])


def problems(text: str) -> list[str]:
    """A sentence for each thing in a column "here" that does not exist, with its line."""
    found = []
    for row in rows(text):
        setting = ""
        for token in re.findall(r"`([^`]+)`", row.here):
            name = token.split(" = ")[0].lstrip("-")
            if token.startswith('"'):
                token = f"{setting} = {token}"  # another value of the setting before it
            elif _is_setting(name):
                setting = name
            if not exists(token, row.section):
                found.append(f"docs/sources.md:{row.line}: `{token}` does not exist ({row.section})")
    return found


def exists(token: str, section: str = "") -> bool:
    """Whether there is a command, a setting (and its value is valid), a metric, a file or a Python name like this.

    Settings of control and of verl count in the sections of these designs only.
    """
    own = {"002": (_verl, _log_line), "004": (_control, _log_line)}.get(SECTIONS.get(section, ""), ())
    return any(check(token) for check in (_command, _setting, _metric, _file, _python, *own))


# --- what the package has -----------------------------------------------------------------------------------------


def _command(token: str) -> bool:
    """``groupwise COMMAND …`` with options that exist, ``make TARGET``, an option or a setting with its dashes."""
    words = token.split()
    if words[0] == "make":
        return all(re.search(rf"^{re.escape(word)}:", (ROOT / "Makefile").read_text(), re.M) for word in words[1:])
    if token.startswith("--"):
        options = {option for parser in _parsers().values() for option in parser.long_options()}
        return _is_setting(words[0][2:]) or words[0].partition("=")[0] in options
    if words[0] != "groupwise":
        return False
    names = [word for word in words[1:] if re.fullmatch(r"[a-z][a-z-]*", word)]
    parser = next((_parsers()[name] for name in (" ".join(names[:2]), *names[:1]) if name in _parsers()), None)
    if parser is None or (parser.actions() and len(names) > 1):
        return False
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    settings = bool(parser.get_default("takes_settings"))
    return all(option in parser._option_string_actions or (settings and _is_setting(option[2:])) for option in options)


@functools.cache
def _parsers() -> dict[str, Parser]:
    """The parsers of the commands and of their actions, by name."""
    commands = Parser(prog="groupwise").add_subparsers()
    for add in COMMANDS:
        add(commands)
    for name in PLUGINS:
        load_plugin("groupwise.commands", PLUGINS, name, "command")(commands)
    parsers: dict[str, Parser] = {}
    for name, parser in commands.choices.items():
        parsers[name] = parser
        parsers |= {f"{name} {action}": inner for action, inner in parser.actions().items()}
    return parsers


@functools.cache
def _settings() -> set[str]:
    options = [find_task(task).options for task in TASKS]
    of_tasks = {f"task_options.{key}" for model in options if model is not None for key in model.model_fields}
    of_rewards = {f"rewards.{key}" for key in RewardSection.model_fields}
    return {name for name, _ in setting_names()} | of_tasks | of_rewards


def _is_setting(name: str) -> bool:
    return name in _settings()


def _setting(token: str) -> bool:
    """A setting, with a valid value if there is one; a section in brackets; ``rules.when``, a key of such a table."""
    if key := re.fullmatch(r"(?:phases|ramps|rules)\.(\w+)", token):
        files = (ROOT / "groupwise" / "training" / "schedule").glob("*.py")
        return any(f'"{key[1]}"' in path.read_text() for path in files)
    if section := re.fullmatch(r"\[\[?([\w.]+)\]?\]", token):
        return section[1] in section_names() | set(Recipe.model_fields)
    name, equals, text = token.partition(" = ")
    if not _is_setting(name) or not equals:
        return _is_setting(name)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
        if name.startswith("task_options."):
            return any(_fits(find_task(task).options, name.partition(".")[2], value) for task in TASKS)
        Recipe.model_validate(nested({name: value}))
    except (tomllib.TOMLDecodeError, ValidationError):
        return False
    known = {"algorithm": ALGORITHMS, "loss.name": LOSSES, "preference.kind": KINDS, "task": TASKS}.get(name)
    return known is None or all(entry in known for entry in (value if isinstance(value, list) else [value]))


def _control(token: str) -> bool:
    """A setting of `groupwise control`, with a valid value if there is one, or a preset."""
    name, equals, text = token.partition(" = ")
    models = (GRPOSettings, PPOSettings, Config)
    if not equals:
        return name in PRESETS or any(name in model.model_fields for model in models)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return False
    return any(_fits(model, name, value) for model in models)


def _fits(model: type[BaseModel] | None, name: str, value: Any) -> bool:
    """Whether a class has this field, and the value fits."""
    if model is None or name not in model.model_fields:
        return False
    try:
        model(**{name: value})
    except ValidationError as error:
        return all(fault["loc"][:1] != (name,) for fault in error.errors())
    return True


@functools.cache
def _metrics() -> list[re.Pattern[str]]:
    """The metrics of docs/metrics.md, which is written from the code; a part in braces is a name."""
    lines = (ROOT / "docs" / "metrics.md").read_text().splitlines()
    names = [line.split("`")[1] for line in lines if line.startswith("| `")]
    filled = [name.replace("{grade}", "accuracy") for name in names]
    return [re.compile(re.sub(r"\\{\w+\\}", r"(\\w+|\\{\\w+\\})", re.escape(name))) for name in filled]


def _metric(token: str) -> bool:
    if token.endswith("/*"):
        return any(metric.pattern.startswith(re.escape(token[:-1])) for metric in _metrics())
    return any(metric.fullmatch(token) for metric in _metrics())


@functools.cache
def _source() -> str:
    return "\n".join(path.read_text() for path in sorted((ROOT / "groupwise").rglob("*.py")))


def _file(token: str) -> bool:
    """A path in the repository, or the name of a file that a run writes, where capitals are a placeholder."""
    if re.search(r"\s", token) or not re.search(r"[./]", token):
        return False
    if any(ROOT.glob(token.rstrip("/"))):
        return True
    name = token.rpartition("/")[2]
    pieces = [piece for piece in re.split(r"[A-Z]+|\{\w+\}", name) if len(piece) > 1]
    return bool(re.search(r"\.(json|jsonl|csv|pt|png|md|parquet|safetensors|html)$", name)) and all(
        re.search(rf'["/{{}}]{re.escape(piece)}|{re.escape(piece)}["{{]', _source()) for piece in pieces
    )


def _python(token: str) -> bool:
    """A dotted name below groupwise, with arguments that the function has if they are given."""
    match = re.fullmatch(r"(?:groupwise\.)?([A-Za-z_][\w.]*)(?:\((.*)\))?", token)
    if match is None:
        return token == "groupwise"
    try:
        found = _resolve(match[1])
    except (ImportError, AttributeError):
        return False
    if not match[2]:
        return match[2] is None or callable(found)
    names = [argument.partition("=")[0].strip() for argument in _split(match[2])]
    return callable(found) and set(names) <= set(inspect.signature(found).parameters)


def _resolve(path: str) -> Any:
    """The object of a dotted name below groupwise, or a field of a class."""
    parts = path.split(".")
    found: Any = importlib.import_module("groupwise")
    for place, part in enumerate(parts):
        try:
            found = getattr(found, part)
        except AttributeError:
            if inspect.ismodule(found):
                found = importlib.import_module(".".join([found.__name__, part]))
            elif inspect.isclass(found) and place == len(parts) - 1 and part in _fields(found):
                return part
            else:
                raise
    return found


def _fields(model: type) -> set[str]:
    """The fields of a class, and the attributes that its own code sets."""
    fields = set(getattr(model, "model_fields", ())) | {name for base in model.__mro__ for name in vars(base)}
    fields |= {field.name for field in dataclasses.fields(model)} if dataclasses.is_dataclass(model) else set()
    return fields | set(re.findall(r"self\.(\w+)\b.* = ", inspect.getsource(model)))


def _verl(token: str) -> bool:
    """A setting of verl that the plugin, or the example, reads or sets: ``key=value`` with dots."""
    key = re.fullmatch(r"\+?([a-z]\w*(?:\.\w+)+)(?:=\S*)?", token)
    if key is None:
        return False
    folders = (ROOT / "groupwise/integrations/verl", ROOT / "examples/verl", ROOT / "tests/verl")
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".sh", ".yaml")]
    wanted = re.sub(r"\.[A-Z]+$", "", key[1])
    return any(wanted in path.read_text() for path in files)


def _log_line(token: str) -> bool:
    """A line that is printed: its words without numbers and names are in the code."""
    pieces = [piece for piece in re.split(r"\d+|\{.*?\}|…|\.\.\.|: ?\S*/\S*", token) if len(piece.strip()) > 2]
    return " " in token and bool(pieces) and all(piece.strip() in _source() for piece in pieces)


# --- what a design names --------------------------------------------------------------------------------------------


def design_text(number: str) -> str | None:
    """The text of a design, or None where the designs are not beside the repository."""
    return next((path.read_text() for path in sorted(DESIGNS.glob(f"{number}_*.txt"))), None)


def design_names(text: str) -> dict[str, str | None]:
    """The classes, functions, arguments, settings (with their values) and metrics that a design names."""
    names: dict[str, str | None] = {}
    fences = re.findall(r"```(\w*)\n(.*?)```", text, re.S)
    for language, code in fences:
        names |= dict.fromkeys(re.findall(r"^\s*class (\w+)", code, re.M))
        for function, arguments in re.findall(r"^\s*def (\w+)\((.*?)\)(?: ->.*?)?:\n", code, re.M | re.S):
            plain = re.sub(r"#.*", "", arguments)
            words = [re.split(r"[:=]", argument)[0].strip() for argument in _split(plain)]
            names |= dict.fromkeys([function, *words])
        if language == "typescript":
            names |= _values(re.findall(r"^\s*(\w+): ([^,\n]+),", code, re.M))
        names |= _values(re.findall(r"^\s*'(\w+)': ([^,\n]+),", code, re.M))
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    for span in re.findall(r"`([^`\n]+)`", prose):
        if name := re.fullmatch(r"([A-Za-z_]\w*)(\(.*\))?", span):
            names.setdefault(name[1])
        elif re.fullmatch(r"[a-z_]+/[\w{}]+", span) and "." not in span:
            names.setdefault(span)
        else:
            assigned = re.findall(r"^(\w+(?:, \w+)*) = ", span)
            words = [*",".join(assigned).split(","), *re.findall(r"self\.(\w+)|\[\"(\w+)\"\]", span)]
            flat = [word for entry in words for word in (entry if isinstance(entry, tuple) else (entry.strip(),))]
            names |= {word: None for word in flat if word and word not in names}
    ignored = {"self", *keyword.kwlist}
    return {name: value for name, value in names.items() if len(name) > 1 and name not in ignored and name[:2] != "__"}


def _values(pairs: list[tuple[str, str]]) -> dict[str, str | None]:
    """The values that are numbers, texts, true, false or none; others are code."""
    literal = re.compile(r"[\d.]+(?:e-?\d+)?|\"\w+\"|true|false|null|None|True|False")
    return {name: value.strip() if literal.fullmatch(value.strip()) else None for name, value in pairs}


def missing_names(names: Mapping[str, str | None], design_cells: list[str]) -> list[str]:
    """The names that no cell has, and those without their value in a cell that has the name."""
    found = []
    design_cells = [_any_number(cell) for cell in design_cells]
    for name, value in names.items():
        name = _any_number(name)
        cells = [cell for cell in design_cells if re.search(rf"(?<![\w/]){re.escape(name)}(?!\w)", cell)]
        if not cells:
            found.append(name)
        elif value is not None and not any(value.lower() in cell.lower() for cell in cells):
            found.append(f"{name} {value}")
    return found


def _any_number(text: str) -> str:
    """Metrics with a number of groups, written k, {k} or as a number, in one form."""
    return re.sub(r"_(?:k|\{k\}|\d+)_groups", "_{k}_groups", text)


def _split(text: str) -> list[str]:
    """Split at the commas that are outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
