"""What would happen to a script with TRL's `GRPOTrainer`: field by field, as settings of a recipe, and as a file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from groupwise.config import Recipe
from groupwise.errors import ConfigError, did_you_mean
from groupwise.integrations.trl.config import GRPOConfig
from groupwise.integrations.trl.fields import FIELDS, FORMER_FIELDS
from groupwise.integrations.trl.script import TRAINER_ARGUMENTS, Script, ScriptCall, ScriptValue
from groupwise.integrations.trl.translate import Translation, Translator
from groupwise.redaction import without_secrets

Status = Literal["translated", "trainer", "no effect", "refused", "not known"]

SEE_PROBLEM = "see the problem below"
REFUSED_ARGUMENTS = {
    "quantization_config": "quantized models are not supported; train a LoRA adapter of the unquantized model",
}
CONVERSATION_SETTINGS = {"tools": "environment.tools", "environment_factory": "environment.factory"}
TRAINER_ARGUMENT_TEXTS = {
    "rollout_func": "called for each rollout, as in TRL; in a recipe an environment is in its place"
}
FORMER_ARGUMENTS = {"tokenizer": "; write processing_class", "ref_model": "; it is made from model if beta is not 0"}
LORA = {
    "r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "target_modules": "model.lora.targets",
    "use_rslora": "model.lora.rslora",
}
LORA_DEFAULTS = {"model.lora.rank": 8, "model.lora.alpha": 8.0}  # of PEFT
LORA_NEUTRAL = ("task_type", "bias", "inference_mode")
YAML_SETTINGS = {  # of TRL's ScriptArguments and ModelConfig
    "model_name_or_path": "model.source",
    "model_revision": "model.revision",
    "dataset_name": "data.train",
    "dataset_config": "data.subset",
    "dataset_train_split": "data.train_split",
    "dataset_test_split": "data.held_out_split",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_target_modules": "model.lora.targets",
    "use_rslora": "model.lora.rslora",
}
YAML_REFUSED = {
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), REFUSED_ARGUMENTS["quantization_config"]),
    **dict.fromkeys(("use_dora", "lora_modules_to_save", "lora_target_parameters"), "not supported; leave it out"),
}
HELPER_FIELDS = (  # of the same classes, without a setting
    *("dtype", "torch_dtype", "attn_implementation", "use_peft", "lora_task_type", "bnb_4bit_quant_type"),
    *("use_bnb_nested_quant", "bnb_4bit_quant_storage", "dataset_streaming", "ignore_bias_buffers"),
    *("reward_model_name_or_path", "reward_funcs", "datasets", "streaming", "test_split_size"),
)
# A recipe file has no value "none"; these are as good.
NO_LIMIT: dict[str, Any] = {"data.max_prompt_length": 32768, "optimizer.max_grad_norm": 1e30}


@dataclass(frozen=True)
class ReportEntry:
    """A field of the config, or an argument of the trainer."""

    name: str
    value: str  # as the script has it
    line: int | None
    status: Status
    text: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class ScriptReport:
    """All entries, and the settings of a recipe; ``problems`` belong to no single field."""

    script: Script
    fields: list[ReportEntry]
    arguments: list[ReportEntry]
    notes: list[str]
    problems: list[str]
    settings: dict[str, Any]
    rewards: list[dict[str, Any]]

    @property
    def refused(self) -> list[ReportEntry]:
        entries = (*self.fields, *self.arguments)
        return [entry for entry in entries if entry.status == "refused" and entry.text != SEE_PROBLEM]

    @property
    def unknown(self) -> list[ReportEntry]:
        return [entry for entry in (*self.fields, *self.arguments) if entry.status == "not known"]

    @property
    def has_config(self) -> bool:
        """Whether the fields of the config are known: from the script, from YAML, or because there is none."""
        trainer = self.script.trainer
        return bool(self.script.config or self.fields or not ("args" in trainer.arguments or trainer.unread))

    @property
    def runs(self) -> bool:
        """Whether nothing is refused."""
        return not self.refused and not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {
            "script": str(self.script.path),
            "runs": self.runs,
            "parser": self.script.parser,
            "fields": [dataclasses.asdict(entry) for entry in self.fields],
            "arguments": [dataclasses.asdict(entry) for entry in self.arguments],
            "problems": self.problems,
            "notes": self.notes,
            "settings": self.settings,
            "rewards": self.rewards,
        }


def read_yaml(path: Path) -> ScriptCall:
    """The values of a YAML file for `TrlParser`, as a call."""
    import yaml  # type: ignore[import-untyped]

    from groupwise.paths import read_file, show_path

    try:
        values = yaml.safe_load(read_file(path, ConfigError))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{show_path(path)} is not valid YAML: {reason:.300}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{show_path(path)} is not a table of fields, such as `num_generations: 8`")
    arguments = {
        str(name): ScriptValue(repr(without_secrets(value, str(name))), 0, value) for name, value in values.items()
    }
    return ScriptCall("GRPOConfig", 0, arguments)


def report_on(
    script: Script, *, yaml: ScriptCall | None = None, rows: int | None = None, processes: int = 1
) -> ScriptReport:
    """What the drop-in would do with a script, with ``rows`` training rows (None: not known) on so many processes."""
    call = script.config or yaml
    report = ScriptReport(script, [], [], _notes(script, call), [], {}, [])
    if yaml is not None and script.config is not None:
        report.notes.append(f"the config is made in line {script.config.line}; the YAML file is not used")
    _add_fields(report, call or ScriptCall("GRPOConfig", 0), rows, processes, from_yaml=call is yaml)
    _add_arguments(report)
    return report


def _notes(script: Script, call: ScriptCall | None) -> list[str]:
    notes = []
    if script.subclass:
        notes.append(
            f"{script.subclass} is a class of the script: methods of GRPOTrainer that it replaces are not called"
        )
    if call is None and script.parser:
        notes.append(
            f"the config comes from {script.parser}, so from the command line or a YAML file: give the file as --config"
        )
    elif call is None and script.trainer.unread and "args" not in script.trainer.arguments:
        notes.append("the config may be among the arguments of GRPOTrainer that cannot be read")
    elif call is None and "args" in script.trainer.arguments:
        value = script.trainer.arguments["args"]
        notes.append(f"the config is made in a way that cannot be read (line {value.line}: {value.text})")
    elif call is None:
        notes.append("the trainer has no args, so every field has TRL's default")
    if call is not None:
        notes += [f"line {value.line}: arguments in {value.text} cannot be read" for value in call.unread]
    return notes


# -- the config -------------------------------------------------------------------------------------------------------


def _add_fields(report: ScriptReport, call: ScriptCall, rows: int | None, processes: int, *, from_yaml: bool) -> None:
    known = {entry.name for entry in dataclasses.fields(GRPOConfig)}
    given = {name: value for name, value in call.arguments.items() if name in known}
    values = {name: value.value for name, value in given.items() if value.known}
    translator, problem = _translate(values, rows, processes)
    if problem:  # the other fields are explained all the same
        report.problems.append(f"no config can be made of these fields: {problem}")
        values = _valid_part(values)
        translator, _ = _translate(values, rows, processes)
    refused: dict[str, str] = {}
    for name, sentence in translator.problems:
        refused[name] = f"{refused[name]}; {sentence}" if name in refused else sentence
    for name, value in call.arguments.items():
        if name in call.own and name not in given:
            entry = ReportEntry(name, value.text, value.line, "trainer", "for the script: a field of its own class")
        elif name not in given:
            entry = _yaml_entry(name, value, known, call) if from_yaml else _unknown_field(name, value, known)
        elif value.known and name not in values:
            entry = ReportEntry(name, _short(value.value), value.line or None, "refused", SEE_PROBLEM)
        elif not value.known or name in refused:
            entry = _field_entry(name, value, refused, {})
        else:
            others = {key: entry for key, entry in values.items() if key != name}
            without, invalid = _translate(others, rows, processes)
            effect = _effect(name, translator, None if invalid else without)
            entry = _field_entry(name, value, refused, effect)
            if entry.status == "translated" and not effect and translator.settings == without.settings:
                entry = dataclasses.replace(entry, status="no effect", text=_unused(name, value.value))
        report.fields.append(entry)
    named = {entry.name for entry in report.fields}
    report.problems += [f"{name}: {sentence}" for name, sentence in refused.items() if name not in named]
    report.notes += translator.notes
    report.settings = dict(translator.settings)
    for entry in report.fields:
        if from_yaml and entry.name not in known:
            report.settings |= entry.settings
    if not refused:
        try:
            Translation(translator.settings, [], None, None).recipe()
        except ConfigError as error:
            report.problems.append(str(error))


def _translate(values: Mapping[str, Any], rows: int | None, processes: int) -> tuple[Translator, str]:
    """A translation of the fields; if no config can be made of them, that of the defaults, and why."""
    problem, args = _make_config(values, processes)
    return Translator(args, rows), problem


def _make_config(values: Mapping[str, Any], processes: int) -> tuple[str, GRPOConfig]:
    kind = type("_Config", (GRPOConfig,), {"world_size": processes})  # elsewhere the launcher says how many
    # What has no effect, and what is refused, need not be valid on this machine.
    used = {name: value for name, value in values.items() if FIELDS[name].kind in ("translated", "trainer")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            args = kind(**{**used, "use_cpu": True})
    except (ValueError, TypeError, ArithmeticError) as error:
        return " ".join(str(error).split()), kind(use_cpu=True)
    for name, value in values.items():
        if name not in used:
            setattr(args, name, value)
    args.use_cpu = values.get("use_cpu", False)
    return "", args


def _valid_part(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of which a config can be made, from the first on."""
    valid: dict[str, Any] = {}
    for name, value in values.items():
        if not _make_config({**valid, name: value}, 1)[0]:
            valid[name] = value
    return valid


def _effect(name: str, translator: Translator, without: Translator | None) -> dict[str, Any]:
    """The settings that a field changes; of one at its default, the one that it would change first; if no config can be
    made without it, those that belong to it."""
    after = translator.settings
    if without is None:
        return {key: after[key] for key in FIELDS[name].settings if key in after}
    before = without.settings
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    return changed or {key: after[key] for key in FIELDS[name].settings[:1] if after.get(key) is not None}


def _unused(name: str, value: Any) -> str:
    """Why a translated field changes no setting."""
    (entry,) = (entry for entry in dataclasses.fields(GRPOConfig) if entry.name == name)
    if value == entry.default:
        return "its default"
    condition = "only with use_vllm" if name.startswith("vllm_") else FIELDS[name].meaning
    return "the other fields leave it unused" + (f" ({condition})" if condition else "")


def _field_entry(name: str, value: ScriptValue, refused: Mapping[str, str], settings: dict[str, Any]) -> ReportEntry:
    known = FIELDS.get(name)
    if not value.known:
        return ReportEntry(name, value.text, value.line or None, "not known", "only known when the script runs")
    text = _short(without_secrets(value.value, name))
    if name in refused:
        return ReportEntry(name, text, value.line, "refused", refused[name])
    if known is None or known.kind == "refused":  # at its default
        return ReportEntry(name, text, value.line, "no effect", "its default")
    return ReportEntry(
        name, text, value.line, known.kind, known.meaning, settings if known.kind == "translated" else {}
    )


def _yaml_entry(name: str, value: ScriptValue, known: set[str], call: ScriptCall) -> ReportEntry:
    """A value of another class of the parser: of TRL's ScriptArguments or ModelConfig, or of the script's own."""
    adapter = name.startswith("lora_") or name in ("use_rslora", "use_dora")
    if adapter and not ("use_peft" in call.arguments and call.arguments["use_peft"].value):
        return ReportEntry(name, value.text, None, "no effect", "only with use_peft")
    if name in YAML_REFUSED and value.value:
        return ReportEntry(name, value.text, None, "refused", YAML_REFUSED[name])
    if name in YAML_SETTINGS:
        return ReportEntry(name, value.text, None, "translated", "", {YAML_SETTINGS[name]: value.value})
    if name in HELPER_FIELDS or name in YAML_REFUSED:
        return ReportEntry(name, value.text, None, "trainer", "for the script: a field of TRL's own classes")
    hint = did_you_mean(name, sorted(known), 0.8)
    text = f"not a field of GRPOConfig, but perhaps of another class of the parser{hint}"
    return ReportEntry(name, value.text, None, "no effect", text)


def _unknown_field(name: str, value: ScriptValue, known: set[str]) -> ReportEntry:
    hint = f"; {FORMER_FIELDS[name]}" if name in FORMER_FIELDS else did_you_mean(name, sorted(known))
    text = f"GRPOConfig of TRL 1.16 has no such field{hint}"
    return ReportEntry(name, value.text, value.line or None, "refused", text)


# -- the trainer ------------------------------------------------------------------------------------------------------


def _add_arguments(report: ScriptReport) -> None:
    script = report.script
    arguments = {name: value for name, value in script.trainer.arguments.items() if name != "args"}
    given = {name for name, value in arguments.items() if not (value.known and not value.value)}
    for name, value in arguments.items():
        if name in REFUSED_ARGUMENTS and not (value.known and value.value is None):
            report.arguments.append(ReportEntry(name, value.text, value.line, "refused", REFUSED_ARGUMENTS[name]))
        elif name not in TRAINER_ARGUMENTS:
            hint = FORMER_ARGUMENTS.get(name) or did_you_mean(name, TRAINER_ARGUMENTS)
            text = f"GRPOTrainer of TRL 1.16 has no such argument{hint}"
            report.arguments.append(ReportEntry(name, value.text, value.line, "refused", text))
        elif name == "model":
            _add(report, _model_entry(value))
        elif name == "reward_funcs":
            _add(report, _rewards_entry(report, value))
        elif name == "train_dataset":
            _add(report, _dataset_entry(name, value))
        elif name in CONVERSATION_SETTINGS and name in given:
            _add(report, _conversations_entry(report, name, value))
        elif name == "peft_config" and not (value.known and value.value is None):
            _add(report, _lora_entry(value))
        else:
            text = TRAINER_ARGUMENT_TEXTS.get(name, "passed on")
            report.arguments.append(ReportEntry(name, value.text, value.line, "trainer", text))
    if "rollout_func" in given and given & set(CONVERSATION_SETTINGS):
        report.problems.append("rollout_func cannot be combined with tools or environment_factory")
    for value in script.trainer.unread:
        report.notes.append(f"line {value.line}: arguments in {value.text} cannot be read")


def _add(report: ScriptReport, entry: ReportEntry) -> None:
    report.arguments.append(entry)
    if entry.status == "translated":
        report.settings |= entry.settings


def _model_entry(value: ScriptValue) -> ReportEntry:
    if value.known and isinstance(value.value, str):
        return ReportEntry("model", repr(value.value), value.line, "translated", "", {"model.source": value.value})
    return ReportEntry("model", value.text, value.line, "trainer", "trained as it is, by its name or loaded")


def _rewards_entry(report: ScriptReport, value: ScriptValue) -> ReportEntry:
    """Functions of the script, of a module, and reward models by their names."""
    script = report.script
    weights: Sequence[Any] = ()
    if script.config is not None and (given := script.config.arguments.get("reward_weights")) and given.known:
        weights = given.value or ()
    file = script.path.name if script.guarded else "rewards.py"
    for number, name in enumerate(value.names):
        entry: dict[str, Any] = {}
        if name in script.functions:
            entry["function"] = f"{file}:{name}"
        elif "/" in name or os.path.exists(name):
            entry |= {"function": "reward_model", "options": {"model": name}}
        elif "." in name:
            module, _, attribute = name.rpartition(".")
            entry["function"] = f"{module}:{attribute}"
        else:
            entry["function"] = f"rewards.py:reward_{number + 1}"
        if number < len(weights):
            entry["weight"] = float(weights[number])
        report.rewards.append(entry)
    return ReportEntry("reward_funcs", value.text, value.line, "trainer", "called with TRL's arguments")


def _conversations_entry(report: ScriptReport, name: str, value: ScriptValue) -> ReportEntry:
    """Tools, or an environment. Those that are defined in the script can be named in a recipe."""
    script, setting = report.script, CONVERSATION_SETTINGS[name]
    if value.text.startswith("{"):
        return ReportEntry(name, value.text, value.line, "refused", "a dict of several environments is not supported")
    if setting == "environment.factory" and "environment.tools" in report.settings:
        report.notes.append("a recipe has tools or an environment, not both: make the tools methods of the environment")
    if not value.names or not set(value.names) <= script.functions | script.classes:
        return ReportEntry(name, value.text, value.line, "trainer", f"called as in TRL; in a recipe {setting}")
    named = [f"{script.path.name if script.guarded else 'tools.py'}:{part}" for part in value.names]
    text = "" if script.guarded else "in a recipe from a file of their own, as importing the script would train"
    tokens = report.settings.get("sampling.max_new_tokens", Recipe().sampling.max_new_tokens)
    turns = report.settings.get("environment.max_turns", tokens)
    settings = {"environment.max_tokens": tokens, "environment.max_turns": turns}
    settings[setting] = named if name == "tools" else named[0]
    return ReportEntry(name, value.text, value.line, "translated", text, settings)


def _dataset_entry(name: str, value: ScriptValue) -> ReportEntry:
    call = value.call
    source = call.arguments.get("0") if call is not None and call.function == "load_dataset" else None
    if call is None or source is None or not source.known or not isinstance(source.value, str):
        return ReportEntry(name, value.text, value.line, "trainer", "its column prompt; all columns reach the rewards")
    settings: dict[str, Any] = {"data.train": source.value}
    for setting, argument in (("data.subset", "1"), ("data.subset", "name"), ("data.train_split", "split")):
        if argument in call.arguments and call.arguments[argument].known:
            settings[setting] = call.arguments[argument].value
    return ReportEntry(name, value.text, value.line, "translated", "", settings)


def _lora_entry(value: ScriptValue) -> ReportEntry:
    if value.call is None or value.call.function != "LoraConfig":
        return ReportEntry("peft_config", value.text, value.line, "trainer", "checked when the trainer is made")
    settings: dict[str, Any] = dict(LORA_DEFAULTS)
    others = []
    for name, argument in value.call.arguments.items():
        if name in LORA and argument.known:
            settings[LORA[name]] = float(argument.value) if name == "lora_alpha" else argument.value
        elif name not in LORA_NEUTRAL:
            others.append(name)
    text = f"{', '.join(others)}: checked when the trainer is made" if others else ""
    return ReportEntry("peft_config", value.text, value.line, "translated", text, settings)


# -- a recipe file ----------------------------------------------------------------------------------------------------


def recipe_text(report: ScriptReport) -> str:
    """A recipe file of the settings that differ from the defaults."""
    defaults = Recipe()
    head = [
        f"# What {report.script.path.name} trains with TRL, for `groupwise train`. Written by `groupwise from-trl`."
    ]
    missing = [f"{entry.name} (line {entry.line}: {entry.value})" for entry in report.unknown]
    if missing:
        head.append(f"# Not known from the script, so at its default here: {'; '.join(missing)}")
    sections: dict[str, list[str]] = {}
    settings = {name: NO_LIMIT.get(name) if value is None else value for name, value in report.settings.items()}
    if "data.train" not in settings:
        sections["data"] = ['# train = "rows.jsonl"  # the training rows as a file']
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        if value is not None and (section == "model.lora" or defaults.get(name) != value):
            sections.setdefault(section, []).append(f"{key} = {to_toml(value)}")
    lines = [*head]
    for section, entries in sections.items():
        lines += ["", f"[{section}]", *entries]
    missing = [entry["function"] for entry in report.rewards if entry["function"].startswith("rewards.py:")]
    if missing:
        names = ", ".join(name.rpartition(":")[2] for name in missing)
        lines += [
            "",
            f"# Write rewards.py with {names}: importing {report.script.path.name} would train, or it has no name.",
        ]
    for reward in report.rewards or [{"function": "rewards.py:reward"}]:
        lines += ["", "[[rewards]]", *(f"{key} = {to_toml(value)}" for key, value in reward.items())]
    return "\n".join(lines) + "\n"


def to_toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{json.dumps(str(key))} = {to_toml(entry)}' for key, entry in value.items())} }}"
    return str(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
