"""`groupwise control`: GRPO and PPO on Gymnasium environments; train, compare, play."""

from __future__ import annotations

import argparse
import json
import os
import re
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any

from groupwise.cli.common import Commands, add, format_examples, say
from groupwise.cli.parser import Parser, integer_of_at_least
from groupwise.errors import ConfigError
from groupwise.paths import check_writable, is_folder
from groupwise.redaction import is_secret_name

RUNS = Path("runs")
ENV_HELP = "a Gymnasium id, or MODULE:ID with a module that registers it (default: %(default)s)"
SETTINGS_HELP = "a preset, optionally with changes: grpo:same_start=false:lr=0.01; see below (default: %(default)s)"


EXAMPLES = {
    "train": (
        "groupwise control train --env CartPole-v1 --algo grpo-fast --out runs/cartpole --stop-when-solved",
        "groupwise control train --env Acrobot-v1 --algo ppo:lr=0.001 --seed 3",
        "groupwise control train --env Pendulum-v1 --algo ppo:gamma=0.9:lr=0.001",
        "groupwise control train --env my_envs:MyEnv-v0 --threshold 200",
    ),
    "compare": (
        "groupwise control compare --envs CartPole-v1,Acrobot-v1 --algos ppo,grpo-fast --seeds 10",
        "groupwise control compare --algos grpo-fast,grpo-fast:same_start=false --steps 50000",
    ),
    "play": ("groupwise control play runs/cartpole", "groupwise control play runs/a runs/b --out both.gif"),
}


# What papers and other libraries call the settings of an algorithm.
OTHER_NAMES = {
    **dict.fromkeys(("learning_rate", "actor_lr"), "lr"),
    **dict.fromkeys(("clip_range", "clip_epsilon", "epsilon"), "clip"),
    **dict.fromkeys(("beta", "kl_coefficient"), "kl_coef"),
}


class HelpWithPresets(argparse._HelpAction):
    """`--help` that also lists the presets and all settings, which are imported only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.epilog = f"{parser.epilog}\n\n{_presets_help()}"
        super().__call__(parser, *_)


def add_control(commands: Commands) -> None:
    summary = "GRPO and PPO on Gymnasium environments: train, compare, play"
    control: Parser = commands.add_parser(
        "control",
        help=summary,
        description=f"{summary}.",
        epilog=format_examples([examples[0] for examples in EXAMPLES.values()]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    control.examples = EXAMPLES["train"]
    actions = control.add_subparsers(title="actions", metavar="ACTION", required=True)

    action = _add(actions, "train", _train, "train one agent; Ctrl-C finishes the update and saves")
    action.add_argument("--env", default="CartPole-v1", metavar="ID", help=ENV_HELP)
    action.add_argument("--algo", default="grpo", metavar="PRESET[:KEY=VALUE…]", help=SETTINGS_HELP)
    _add_integer(action, "--seed", 0, "seed of the weights, first states and sampling", least=0)
    action.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: a new one below runs/)")
    _add_common(action)
    action.add_argument("--stop-when-solved", action="store_true", help="stop after two evaluations at the threshold")
    _add_integer(action, "--save-every", 50, "updates between checkpoints")
    action.add_argument("--live-plot", action="store_true", help="plot the curves in a window during training")
    action.add_argument("--resume", action="store_true", help="continue the run in --out")
    action.add_argument("--overwrite", action="store_true", help="replace an existing run in --out")

    help_text = "train several algorithms on several seeds and compare them; continues a stopped comparison"
    action = _add(actions, "compare", _compare, help_text)
    action.add_argument("--envs", default="CartPole-v1", metavar="ID,…", help=f"one or more: {ENV_HELP}")
    action.add_argument("--algos", default="ppo,grpo", metavar="PRESET,…", help=SETTINGS_HELP)
    _add_integer(action, "--seeds", 10, "number of seeds, 0 … N − 1")
    help_text = "folder of the runs (default: %(default)s)"
    action.add_argument("--out", type=Path, default=RUNS / "comparison", metavar="DIR", help=help_text)
    _add_integer(action, "--jobs", os.cpu_count() or 1, "parallel runs (default: number of cores)")
    _add_common(action)
    action.set_defaults(interrupted="interrupted; every run is saved, and the same command continues them")

    action = _add(actions, "play", _play, "watch a trained agent, or several from the same first state")
    action.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, or a model (.pt)")
    _add_integer(action, "--seed", None, "seed of the first state (default: the first held-out one)", least=0)
    help_text = "a video, .gif or .mp4 (default: a window, or RUN/play.gif)"
    action.add_argument("--out", type=Path, metavar="FILE", help=help_text)


def _add(actions: Commands, name: str, run: Any, help_text: str) -> argparse.ArgumentParser:
    parser = add(actions, name, run, help_text, add_help=False, examples=EXAMPLES[name])
    action = "help" if name == "play" else HelpWithPresets
    parser.add_argument("-h", "--help", action=action, help="show this help and exit")
    if name != "play":
        parser.suggest_option = _suggest_option
    return parser


def _suggest_option(word: str) -> str:
    """A setting of an algorithm follows the algorithm's name."""
    from groupwise.control.settings import PRESETS

    key = word.lstrip("-").replace("-", "_")
    key = OTHER_NAMES.get(key, key)
    preset = next((name for name in ("grpo", "ppo") if key in type(PRESETS[name]).model_fields), None)
    return f"; it is a setting of the algorithm: --algo {preset}:{key}=VALUE" if preset else ""


def _add_common(action: argparse.ArgumentParser) -> None:
    _add_integer(action, "--steps", 500_000, "environment steps per run (default: %(default)s)")
    _add_integer(action, "--evaluate-every", 2048, "steps between evaluations")
    _add_integer(action, "--starts", 20, "held-out first states per evaluation")
    action.add_argument("--threshold", type=float, metavar="X", help="the return that counts as solved")
    help_text = "keyword argument of the environment"
    action.add_argument("--env-option", action="append", default=[], metavar="KEY=VALUE", help=help_text)


def _add_integer(
    action: argparse.ArgumentParser, name: str, default: int | None, help_text: str, *, least: int = 1
) -> None:
    if default is not None and "default" not in help_text:
        help_text += " (default: %(default)s)"
    action.add_argument(name, type=integer_of_at_least(least), default=default, metavar="N", help=help_text)


def _train(arguments: argparse.Namespace) -> int:
    from groupwise.control.main import format_row, make_plotter, train
    from groupwise.control.settings import config_of
    from groupwise.rundir import new_run_path

    values = _values(arguments, "seed", "stop_when_solved", "save_every")
    config = config_of(environment=arguments.env, algorithm=arguments.algo, **values)
    if arguments.resume and not arguments.out:
        raise ConfigError("--resume needs --out, the folder of the run to continue")
    name = re.sub(r"[^\w.-]+", "_", f"{config.environment}-{config.algorithm}").lstrip("._-")
    folder = arguments.out or new_run_path(RUNS, name)

    def report(row: dict[str, float]) -> None:
        say(format_row(row))
        plotter.add(config.algorithm, row)

    with closing(make_plotter(config, folder / "progress.png", window=arguments.live_plot)) as plotter:
        training = train(config, folder, resume=arguments.resume, overwrite=arguments.overwrite, report=report)
    say(training.outcome())
    ending = "stopped; continue with --resume" if training.exit_status else f"watch it: groupwise control play {folder}"
    say(f"{folder} has the curve (progress.png) and the best model; {ending}")
    return training.exit_status


def _compare(arguments: argparse.Namespace) -> int:
    from groupwise.control.comparison.compare import compare
    from groupwise.control.settings import config_of

    environments, algorithms = (_names(arguments, option) for option in ("envs", "algos"))
    configs = [
        config_of(environment=environment, algorithm=algorithm, seed=seed, **_values(arguments))
        for environment in environments
        for seed in range(arguments.seeds)
        for algorithm in algorithms
    ]
    say(compare(configs, arguments.out, jobs=arguments.jobs, report=say))
    say(f"{arguments.out} has comparison.md, runs.csv, curves.csv and a plot of each environment")
    return 0


def _play(arguments: argparse.Namespace) -> int:
    from groupwise.control.environments import HELD_OUT
    from groupwise.control.play import play
    from groupwise.control.utils import has_display

    video = arguments.out
    if video is None and (len(arguments.runs) > 1 or not has_display()):
        first = arguments.runs[0]
        video = (first if is_folder(first, ConfigError) else first.parent) / "play.gif"
    if video is not None:
        check_writable(video, ConfigError)
    returns = play(arguments.runs, seed=HELD_OUT if arguments.seed is None else arguments.seed, out=video)
    for run, value in zip(arguments.runs, returns, strict=True):
        say(f"{run}: return {value:g}")
    if video:
        say(f"the video is {video}")
    return 0


def is_control_folder(folder: Path) -> bool:
    """Whether a folder is of `groupwise control`; only if it may be, the modules that know it are loaded."""
    names = {path.name for path in folder.glob("*")}
    below = next(folder.glob("*/*/seed-*/config.json"), None)
    if "recipe.json" in names or ("config.json" not in names and below is None):
        return False
    from groupwise.control.comparison.read import is_comparison, is_control_run

    return is_control_run(folder) or is_comparison(folder)


def control_report(folder: Path, _: int, markdown: Path | None) -> tuple[str, str, list[str]]:
    """`groupwise report` of such a folder: the HTML, the Markdown for a file ``markdown``, and what is left out."""
    from groupwise.control.comparison.page import blocks_as_markdown
    from groupwise.control.comparison.read import read_comparison
    from groupwise.control.comparison.report import report_blocks, report_curves, saved_plots
    from groupwise.viewer.report import comparison_report

    comparison = read_comparison(folder)
    blocks, groups = report_blocks(comparison), comparison.groups
    report = comparison_report(folder.absolute().name, blocks, report_curves(groups))
    text = ""
    if markdown is not None:
        plots = saved_plots(folder, groups)
        links = {name: Path(os.path.relpath(path, markdown.parent)).as_posix() for name, path in plots.items()}
        text = blocks_as_markdown(blocks, links)
    return report.html, text, report.left_out


def _values(arguments: argparse.Namespace, *more: str) -> dict[str, Any]:
    """The common settings of a configuration and those of the options ``more``."""
    values = {name: getattr(arguments, name) for name in ("steps", "evaluate_every", "starts", "threshold", *more)}
    return {"options": dict(map(_option, arguments.env_option)), **values}


def _names(arguments: argparse.Namespace, option: str) -> list[str]:
    names = [name.strip() for name in getattr(arguments, option).split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--{option} needs a comma-separated list without repetitions, got {names}")
    return names


def _option(word: str) -> tuple[str, Any]:
    """KEY=VALUE; a value that is not JSON (a number, true, false, null) is text."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"--env-option needs KEY=VALUE, got {word!r}")
    if is_secret_name(key):
        raise ConfigError(
            f"--env-option {key}: options are written into config.json, and this one looks like a secret; let the "
            "environment read it from an environment variable"
        )
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


def _presets_help() -> str:
    from groupwise.control.settings import PRESET_HELP, PRESETS

    lines = ["presets:"]
    for name, text in PRESET_HELP.items():
        lines += [f"  {name}", textwrap.indent(textwrap.fill(text, 114, break_on_hyphens=False), " " * 6)]
    for name in ("grpo", "ppo"):
        settings = PRESETS[name]
        lines += ["", f"settings of {name} and their defaults:"]
        for key, field in type(settings).model_fields.items():
            if key != "algorithm":
                value = getattr(settings, key)
                shown = "x".join(map(str, value)) if isinstance(value, tuple) else json.dumps(value).strip('"')
                shown = "none" if value is None else shown  # as it is written on the command line
                lines.append(f"  {f'{key}={shown}':28} {field.description}")
    return "\n".join(lines)
