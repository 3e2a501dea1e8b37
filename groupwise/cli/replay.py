"""`groupwise replay`: rollouts under other settings, one step taken again, two runs to their first difference."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from groupwise.cli.common import Commands, add, console, make_status, make_table, print_table, say
from groupwise.cli.settings import parse_settings
from groupwise.errors import ConfigError
from groupwise.terminal import write_text

# The options of each of the three kinds of replay.
RESCORING: tuple[str, ...] = ("steps", "algorithm", "set", "reward")
RETAKING = ("step", "algorithm", "set", "keep", "from_start", "allow_changed")
COMPARING = ("against", "tolerance")


def add_replay(commands: Commands) -> None:
    summary = "replay a run: score its rollouts under other settings, take one step again, compare it with another run"
    examples = (
        "groupwise replay runs/quiz --set advantages.scale=none       what would have been reinforced",
        "groupwise replay runs/quiz --steps 10-20 --algorithm dr_grpo",
        "groupwise replay runs/quiz --reward rewards.py:brief=0.5 --reward correct",
        "groupwise replay runs/quiz --step 412 --set loss.kl_coef=0.1 take a step again with one thing changed",
        "groupwise replay runs/quiz --against runs/other              two runs, to the first difference",
    )
    replay = add(commands, "replay", _replay, summary, examples=examples)
    replay.add_argument(
        "run_folder", metavar="RUN", type=Path, help="the folder of a run, also of one that is training"
    )
    replay.add_argument("--set", action="append", metavar="SECTION.KEY=VALUE", help="a changed setting; repeatable")
    replay.add_argument("--algorithm", metavar="NAME", help="the settings of another preset")
    replay.add_argument("--steps", metavar="A-B", help="score only these steps again, such as 10-20 or 1,5,9")
    replay.add_argument(
        "--reward",
        action="append",
        metavar="NAME[=WEIGHT]",
        help="score with these rewards instead: file.py:function, a built-in one, or one of the run's; repeatable",
    )
    replay.add_argument("--step", type=int, metavar="N", help="take step N again, from the nearest earlier checkpoint")
    replay.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="with --step: keep the replayed runs in a new folder"
    )
    help_text = "with --step: begin at the start of the run if no earlier checkpoint is kept"
    replay.add_argument("--from-start", action="store_true", help=help_text)
    help_text = "with --step: accept other rows, another model, or changed source files"
    replay.add_argument("--allow-changed", action="store_true", help=help_text)
    replay.add_argument("--against", type=Path, metavar="OTHER", help="another run, compared to the first difference")
    help_text = "with --against: numbers that differ by less are equal, relative to the larger one (default: 0)"
    replay.add_argument("--tolerance", type=float, metavar="SHARE", help=help_text)
    replay.add_argument("--json", action="store_true", help="print the result as JSON")
    replay.add_argument("--out", type=Path, metavar="FILE.md", help="also write the result as Markdown")
    replay.set_defaults(interrupted="interrupted; the run that was replayed is untouched")


def _replay(arguments: argparse.Namespace) -> int:
    run, allowed, kind = _rescore, RESCORING, "scoring rollouts again"
    if arguments.against is not None:
        run, allowed, kind = _compare, COMPARING, "--against"
    elif arguments.step is not None:
        run, allowed, kind = _retake, RETAKING, "--step"
    for option in dict.fromkeys((*RESCORING, *RETAKING, *COMPARING)):
        if option not in allowed and getattr(arguments, option) not in (None, False):
            raise ConfigError(f"--{option.replace('_', '-')} has no use for {kind}; leave it out{_hint(option)}")
    result, page, differs = run(arguments)
    from groupwise.analysis.replay.pages import as_json, as_markdown

    if arguments.out is not None:
        from groupwise.rundir.files import write_bytes

        write_bytes(arguments.out, as_markdown(page(result)).encode())
    if arguments.json:
        write_text(json.dumps(as_json(result), indent=2, ensure_ascii=False) + "\n")
    else:
        _show(page(result))
    return 1 if differs else 0


def _hint(option: str) -> str:
    hints = {
        "reward": " (a step's rewards are changed by --set rewards.0.weight=…)",
        "keep": " (it belongs to --step N)",
        "from_start": " (it belongs to --step N)",
        "allow_changed": " (it belongs to --step N)",
        "tolerance": " (it belongs to --against OTHER)",
        "steps": ", or leave --step out to score rollouts again",
    }
    return hints.get(option, "")


def _show(page: Any) -> None:
    after_table = False
    for part in page:
        is_table = not isinstance(part, str)
        if is_table or after_table:
            say("")
        if is_table:
            header = [name or " " for name in part.header]
            table = make_table(*header, left=[header[place] for place in part.left])
            for column in table.columns:  # in a narrow window headings are broken, and long names are cut
                column.overflow = "ellipsis"
            for row in part.rows:
                table.add_row(*row)
            print_table(console(), table)
        else:
            say(part)
        after_table = is_table


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of --set, parsed as on the command line of `groupwise train`."""
    texts: list[tuple[str, str | None]] = []
    for word in arguments.set or ():
        name, equals, text = word.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set needs a setting and its value, as in --set loss.kl_coef=0.1, got {word!r}")
        texts.append((name.strip().removeprefix("--"), text.strip()))
    return parse_settings(texts)


def _steps(text: str | None) -> list[int] | None:
    if text is None:
        return None
    steps: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*[-–:]\s*(\d{1,9}))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ConfigError(f"--steps must be steps or ranges of steps, such as 10-20 or 1,5,9, got {text!r}")
        steps += range(int(match[1]), int(match[2] or match[1]) + 1)
    return steps


def _reward(text: str) -> Any:
    name, equals, weight = text.rpartition("=")
    if not equals:
        return text
    try:
        return name, float(weight)
    except ValueError:
        raise ConfigError(f"--reward {text}: the weight must be a number, got {weight!r}") from None


def _rescore(arguments: argparse.Namespace) -> tuple[Any, Any, bool]:
    settings, steps = _settings(arguments), _steps(arguments.steps)
    rewards = [_reward(text) for text in arguments.reward or ()]
    with make_status() as display:
        display.stage("loading PyTorch")
        from groupwise.analysis.replay import rescore
        from groupwise.analysis.replay.pages import rescoring_page

        result = rescore(
            arguments.run_folder,
            steps=steps,
            algorithm=arguments.algorithm,
            settings=settings,
            rewards=rewards,
            progress=lambda done, total: display.progress("scoring", done, total, "steps"),
        )
    return result, rescoring_page, not result.self_check.passed


def _retake(arguments: argparse.Namespace) -> tuple[Any, Any, bool]:
    settings = _settings(arguments)
    with make_status() as display:
        display.stage("loading PyTorch")
        from groupwise.analysis.replay import retake
        from groupwise.analysis.replay.pages import retaken_page

        result = retake(
            arguments.run_folder,
            arguments.step,
            settings,
            algorithm=arguments.algorithm,
            keep=arguments.keep,
            from_start=arguments.from_start,
            allow_changed=arguments.allow_changed,
            progress=display.stage,
        )
    return result, retaken_page, result.reproduced is not None and not result.reproduced.equal


def _compare(arguments: argparse.Namespace) -> tuple[Any, Any, bool]:
    from groupwise.analysis.replay import find_difference
    from groupwise.analysis.replay.pages import difference_page

    tolerance = arguments.tolerance or 0.0
    if not 0 <= tolerance < 1:
        raise ConfigError(f"--tolerance must be from 0 to below 1, got {tolerance:g}")
    with make_status() as display:
        display.stage("comparing")
        result = find_difference(arguments.run_folder, arguments.against, tolerance=tolerance)
    return result, difference_page, not result.equal
