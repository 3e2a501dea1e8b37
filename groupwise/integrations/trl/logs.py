"""Metrics under TRL's names, averaged between two logs as TRL does, and the table of completions."""

from __future__ import annotations

import io
import json
import logging
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_utils import speed_metrics

from groupwise.data.prompts import completion_for_reward
from groupwise.environments import with_opening
from groupwise.integrations.trl.conversations import shown_messages
from groupwise.integrations.trl.limits import CLIPPED_LOSSES, TOKEN_LOSSES
from groupwise.rewards import RewardFunction
from groupwise.rundir import from_json, write_bytes
from groupwise.terminal import make_console
from groupwise.text import excerpt
from groupwise.training.environments import RunEnvironment
from groupwise.training.monitor.descriptions import describe_metric
from groupwise.training.rollout.batch import Batch
from groupwise.training.rollout.episodes import COLUMNS, TOOL_COLUMNS

log = logging.getLogger("groupwise")

# Metrics of an update that have the same name and meaning here and in TRL.
SAME = ("entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
RENAMED = {
    "sampling/sampling_logp_difference/mean": "sampler/logp_difference_mean",
    "sampling/sampling_logp_difference/max": "sampler/logp_difference_max",
    "sampling/importance_sampling_ratio/mean": "sampler/importance_mean",
}


class MetricAverages:
    """The values of each metric and the sum of the losses since the last log, which a checkpoint keeps.

    NaN is left out of means; the mean of nothing but NaN is None, and so is a mean of values that are not all known.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float | None]] = {}
        self.loss, self.logged_at = 0.0, 0

    def add(self, metrics: Mapping[str, float | None]) -> None:
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(value)

    def replace(self, name: str, value: float) -> None:
        """Keep only the last value, as of a count."""
        self._values[name] = [value]

    def take(self) -> dict[str, float | None]:
        """The means, in the order in which the metrics came; the next log begins."""
        means = {}
        for name, values in self._values.items():
            known = [value for value in values if value is not None and not math.isnan(value)]
            means[name] = sum(known) / len(known) if known and None not in values else None
        self._values.clear()
        return means

    def take_loss(self, step: int) -> float:
        """The mean loss of the steps since the last log, which is now at ``step``."""
        mean = self.loss / (step - self.logged_at)
        self.loss, self.logged_at = 0.0, step
        return mean

    def state(self) -> dict[str, Any]:
        return {"values": self._values, "loss": self.loss, "logged_at": self.logged_at}

    def load_state(self, state: Mapping[str, Any]) -> None:
        saved: Mapping[str, Sequence[Any]] = state.get("values", {})
        self._values = {name: [from_json(value) for value in values] for name, values in saved.items()}
        self.loss, self.logged_at = float(state.get("loss", 0.0)), int(state.get("logged_at", 0))


def sample_metrics(
    lengths: Tensor,
    truncated: Tensor,
    rewards: Tensor,
    weights: Mapping[str, float],
    samples: int,
    *,
    by_group: bool = True,
) -> dict[str, float]:
    """TRL's metrics of sampled completions: their lengths ``(B,)`` and rewards ``(B, K)``, ``samples`` per prompt.

    by_group: whether rewards are scaled within groups, so that frac_reward_zero_std is a share of groups.
    """
    lengths = lengths.double()
    ended = lengths[~truncated] if bool((~truncated).any()) else torch.zeros(1)
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(truncated.double().mean()),
        "completions/mean_terminated_length": float(ended.mean()),
        "completions/min_terminated_length": float(ended.min()),
        "completions/max_terminated_length": float(ended.max()),
    }
    for name, column in zip(weights, rewards.unbind(1), strict=True):
        metrics[f"rewards/{name}/mean"] = float(column.nanmean())
        metrics[f"rewards/{name}/std"] = float(_std(column))
    total = (rewards * rewards.new_tensor(list(weights.values()))).nansum(1)
    total = torch.where(rewards.isnan().all(1), torch.nan, total)
    grouped = total.view(-1, samples) if by_group else total.view(1, -1)
    spread = torch.stack([_std(group) for group in grouped])
    equal = spread.isclose(torch.zeros_like(spread)) if grouped.shape[1] > 1 else torch.ones(len(spread))
    return metrics | {
        "reward": float(total.nanmean()),
        "reward_std": float(_std(total)),
        "frac_reward_zero_std": float(equal.double().mean()),
    }


def _std(values: Tensor) -> Tensor:
    """The standard deviation (n − 1) of the values that are not NaN; NaN of fewer than two."""
    known = values[~values.isnan()]
    return known.std() if len(known) > 1 else torch.tensor(torch.nan, dtype=values.dtype)


def batch_metrics(batch: Batch, rewards: Sequence[RewardFunction], args: Any) -> dict[str, float]:
    """`sample_metrics` of a rollout. Rewards with one name share their metrics, as in TRL: means over them."""
    weights = {reward.name: reward.weight for reward in rewards}
    by_group = args.scale_rewards != "batch" and args.multi_objective_aggregation == "sum_then_normalize"
    truncated = torch.tensor([reason == "length" for reason in batch.stop_reasons])
    metrics = sample_metrics(batch.lengths, truncated, batch.scored, weights, batch.samples, by_group=by_group)
    shown = {reward.name: getattr(reward, "metric_name", reward.name) for reward in rewards}
    names = {f"rewards/{name}/{part}": f"rewards/{shown[name]}/{part}" for name in shown for part in ("mean", "std")}
    shared: dict[str, list[float]] = {}
    for name, value in metrics.items():
        shared.setdefault(names.get(name, name), []).append(value)
    return {name: sum(values) / len(values) for name, values in shared.items()}


def tool_metrics(batch: Batch, environment: RunEnvironment | None) -> dict[str, float]:
    """TRL's metrics of the calls in a rollout; none of a run without tools. One that could not be read has failed."""
    if environment is None or environment.factory is None:
        return {}
    calls, failed, unreadable = (sum(batch.extra[name]) for name in TOOL_COLUMNS)
    calls, failed = calls + unreadable, failed + unreadable
    return {"tools/call_frequency": calls / len(batch), "tools/failure_frequency": failed / calls if calls else 0.0}


def batch_tokens(batch: Batch) -> int:
    """Tokens as TRL counts them: each completion, and its prompt once for each."""
    if batch.turns is None:
        prompts = sum(len(prompt.ids) for prompt in batch.prompts) * batch.samples
    else:  # conversations of a group may start differently
        prompts = sum(batch.extra["prompt_tokens"])
    return prompts + int(batch.lengths.sum())


def update_metrics(metrics: Mapping[str, float], args: Any, micro_batches: int = 1) -> dict[str, float | None]:
    """TRL's metrics of one update of so many micro-batches, from those of the step; None for one that is not known."""
    found: dict[str, float | None] = {}
    if args.entropy_coef or args.use_adaptive_entropy:
        share = micro_batches if args.loss_type in TOKEN_LOSSES else 1  # of the update's tokens in a micro-batch
        found["policy_loss"] = (metrics["loss/policy"] + metrics.get("loss/kl", 0.0)) / share
        found["entropy_coef"] = metrics.get("entropy_coef", args.entropy_coef)
    if args.beta:
        found["kl"] = metrics["kl"]
    names = SAME if args.loss_type in CLIPPED_LOSSES else ("entropy",)
    found |= {name: metrics[name] for name in names if name in metrics}
    if "clip_ratio/low_mean" in found:
        found |= {name: metrics.get(name, 0.0) for name in ("clip_ratio/low_min", "clip_ratio/high_max")}
    if args.loss_type == "cispo" and "clip_ratio/high_mean" in metrics:
        found["cispo_clip_ratio"] = metrics["clip_ratio/high_mean"]
    if args.use_vllm and args.vllm_importance_sampling_correction:
        found |= {name: metrics[own] for name, own in RENAMED.items() if own in metrics}
    return found


def speed(
    prefix: str, started: float, samples: float | None = None, steps: int | None = None, tokens: int | None = None
) -> dict[str, float]:
    """transformers' metrics of the time since ``started``."""
    measure: Any = speed_metrics  # it has no types
    return dict(measure(prefix, started, num_samples=samples, num_steps=steps, num_tokens=tokens))


def logged_by_rewards(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that reward functions have logged by log_metric: those that groupwise itself does not describe."""
    return {name: value for name, value in metrics.items() if describe_metric(name) is None}


def warn_unscored(batch: Batch) -> None:
    """Log a warning, as TRL does, if no reward function has scored one of the completions; it names the first one."""
    unscored = batch.scored.isnan().all(1).nonzero().flatten().tolist()
    if unscored:
        row = batch.rows[batch.prompt_of[unscored[0]]]
        log.warning(
            "All reward functions returned None for %d of %d completions, which are not trained on. The first one is "
            "%s, of the row %s. Let at least one function score each completion",
            *(len(unscored), len(batch), excerpt(batch.texts[unscored[0]]), excerpt(dict(row))),
        )


class CompletionTable:
    """The completions of the last rollout, for ``log_completions``: printed, and one Parquet file per log."""

    def __init__(self, folder: Path, shown: int | None, names: Sequence[str], unique: bool) -> None:
        self.folder, self.shown, self.names, self.unique = folder, shown, names, unique
        self.columns: dict[str, list[Any]] = {}

    def keep(self, batch: Batch, advantages: Tensor) -> None:
        """Remember a rollout in place of the one before."""
        prompts = [batch.rows[prompt]["prompt"] for prompt in batch.prompt_of.tolist()]
        completions = [completion_for_reward(*pair) for pair in zip(prompts, batch.texts, strict=True)]
        if batch.turns is not None and not isinstance(prompts[0], str):
            said = [list(map(json.loads, batch.extra[name])) for name in ("opening", "conversation")]
            prompts = [with_opening(*pair) for pair in zip(prompts, said[0], strict=True)]
            completions = [shown_messages(messages) for messages in said[1]]
        self.columns = {"prompt": prompts, "completion": completions}
        self.columns |= {name: column.tolist() for name, column in zip(self.names, batch.scored.T, strict=False)}
        left_out = (*self.columns, *(COLUMNS if batch.turns is not None else ()))
        extra = {name: values for name, values in batch.extra.items() if name not in left_out}
        self.columns |= {**extra, "advantage": advantages.tolist()}

    def write(self, step: int, report_to: Sequence[str]) -> None:
        """Print some rows, write all of them, and send them to the trackers that have tables."""
        if not self.columns:
            return
        import pyarrow
        import pyarrow.parquet

        table = {"step": [step] * len(self.columns["prompt"]), **self.columns}
        self._print(step)
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(table), buffer)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_bytes(self.folder / f"completions_{step:05d}.parquet", buffer.getvalue())
        if "wandb" in report_to:
            import wandb

            if wandb.run is not None:
                frame = pyarrow.table(table).to_pandas()
                frame = frame[~frame["prompt"].astype(str).duplicated()] if self.unique else frame
                wandb.log({"completions": wandb.Table(dataframe=frame)})

    def _print(self, step: int) -> None:
        from rich.panel import Panel
        from rich.table import Table

        rows = range(len(self.columns["prompt"]))
        if self.shown is not None and self.shown < len(rows):
            if self.shown <= 0:
                return
            rows = sorted(random.Random(step).sample(rows, self.shown))  # type: ignore[assignment]
        table = Table(expand=True, show_lines=True)
        for name in self.columns:
            is_number = isinstance(self.columns[name][0], float)
            table.add_column(name.capitalize() if name in TEXTS else name, justify="right" if is_number else "left")
        for row in rows:
            table.add_row(*(_shown(values[row]) for values in self.columns.values()))
        make_console().print(Panel(table, title=f"Step {step}", expand=False))


TEXTS = ("prompt", "completion", "advantage")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        return "\n\n".join(f"{str(entry.get('role', '')).upper()}\n{entry.get('content', '')}" for entry in value)
    return str(value)
