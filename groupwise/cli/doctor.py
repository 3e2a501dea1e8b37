"""`groupwise doctor`: what is wrong with a run, with evidence, examples and what to change."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.cli.common import Commands, add, console
from groupwise.errors import CheckpointError, RunDirError
from groupwise.paths import show_path
from groupwise.terminal import write_text
from groupwise.text import excerpt, plural, shown

if TYPE_CHECKING:
    from rich.console import Console

    from groupwise.analysis.findings import Finding
    from groupwise.analysis.run_reader import RunReader

FAIL_ON = {"error": ("error",), "warning": ("error", "warning"), "never": ()}
STYLES = {"error": "bold red", "warning": "bold yellow"}
PROMPT_LENGTH, COMPLETION_LENGTH = 60, 160  # characters of an example


def add_doctor(commands: Commands) -> None:
    examples = (
        "groupwise doctor                            the newest run below runs/",
        "groupwise doctor runs/quiz --fail-on error  status 1 only if the run cannot learn",
        "groupwise doctor runs/quiz --json",
    )
    summary = "say what is wrong with a run, finished or not: findings with evidence, examples and what to change"
    doctor = add(commands, "doctor", _doctor, summary, examples=examples)
    folder = "the folder of a run (default: the newest below runs/)"
    doctor.add_argument("folder", metavar="RUN", nargs="?", type=Path, help=folder)
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    fail_on = "exit with status 1 if there is an error, an error or a warning (default), or never"
    doctor.add_argument("--fail-on", choices=list(FAIL_ON), default="warning", help=fail_on)


def _doctor(arguments: argparse.Namespace) -> int:
    from groupwise.analysis.findings import diagnose
    from groupwise.analysis.run_reader import RunReader, find_runs

    reader = RunReader(arguments.folder or find_runs()[0])
    if not reader.recipe and not reader.problems:
        raise RunDirError(
            f"{show_path(reader.path)} has no recipe.json, so there is nothing to check: it is not a run of `groupwise "
            "train`, or has not started yet"
        )
    findings = diagnose(reader)
    if arguments.json:
        write_text(json.dumps(_as_json(reader, findings), indent=2) + "\n")
    else:
        _show(reader, findings)
    return int(any(finding.severity in FAIL_ON[arguments.fail_on] for finding in findings))


def _as_json(reader: RunReader, findings: list[Finding]) -> dict[str, Any]:
    from groupwise.analysis.findings import ALL_CHECKS

    return {
        "run": str(reader.path),
        "status": reader.status,
        "step": reader.step,
        "total_steps": reader.total_steps,
        "checks": list(ALL_CHECKS),
        "steps": len(reader.training_rows),
        "evaluations": len(reader.evaluations),
        "findings": [finding.as_dict() for finding in findings],
    }


def _show(reader: RunReader, findings: list[Finding]) -> None:
    out, total = console(), reader.total_steps
    progress = f"step {reader.step:,}" + (f" of {total:,}" if total else "")
    out.print(f"{reader.path}: {progress}, {reader.status}", soft_wrap=True)
    for finding in findings:
        out.print()
        _show_finding(out, reader, finding)
    out.print()
    for line in _conclusion(reader, findings):
        out.print(line, soft_wrap=True)


def _show_finding(out: Console, reader: RunReader, finding: Finding) -> None:
    def field(name: str, text: str) -> None:
        out.print(f"  {name:<9} {text}", soft_wrap=True)

    out.print(f"{finding.severity}  {finding.name}: {finding.title}", style=STYLES[finding.severity], soft_wrap=True)
    field("what", finding.message)
    field("when", _when(finding, reader.step))
    evidence = [f"{name} {_value(value)}" for name, value in finding.evidence.items() if name != "step"]
    if evidence:
        at = f" (step {finding.evidence['step']})" if "step" in finding.evidence else ""
        field("evidence", ", ".join(evidence) + at)
    for example in finding.examples[:1]:
        field("example", _example(reader, example.step, example.prompt_number, example.sample))
    if finding.remedy:
        field("change", finding.remedy)


def _when(finding: Finding, step: int) -> str:
    first, last = finding.steps
    since = "" if last >= step else ", not since"
    return f"step {first}{since}" if first == last else f"steps {first} to {last}{since}"


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _example(reader: RunReader, step: int, prompt_number: int, sample: int) -> str:
    place = f"step {step}, prompt {prompt_number}, sample {sample}"
    try:
        rows = reader.rollouts(step)
    except CheckpointError:  # deleted meanwhile
        return place
    row = next((r for r in rows if (r["prompt_number"], r["sample"]) == (prompt_number, sample)), {})
    prompt, reward = str(row.get("prompt") or ""), row.get("reward")
    start = "…" if len(prompt) > PROMPT_LENGTH else ""
    score = "" if reward is None else f" (reward {reward:.3g})"
    return (
        f"{place}: {start}{shown(prompt[-PROMPT_LENGTH:])} → {excerpt(row.get('completion'), COMPLETION_LENGTH)}{score}"
    )


def _conclusion(reader: RunReader, findings: list[Finding]) -> list[str]:
    from groupwise.analysis.findings import ALL_CHECKS
    from groupwise.training.monitor.checks import WINDOW

    steps, evaluations = len(reader.training_rows), len(reader.evaluations)
    number = plural(len(findings), "finding") if findings else "no findings"
    lines = [f"{number}; {len(ALL_CHECKS)} checks over {plural(steps, 'step')} and {plural(evaluations, 'evaluation')}"]
    if steps < WINDOW:
        lines.append(f"most checks need {WINDOW} steps")
    if not findings:
        lines.append(f"looked for: {', '.join(ALL_CHECKS)}")
    return lines
