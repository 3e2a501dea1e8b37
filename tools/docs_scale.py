"""Write the tables of docs/scale.md from the cost model and its measurements. `make docs` runs it; a test fails if they
are stale.

python -m tools.docs_scale            # write the tables
python -m tools.docs_scale --check    # exit status 1 if one of them would change
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from groupwise.errors import ConfigError
from groupwise.planning.constants import FITTED
from groupwise.planning.gpus import GPUS
from groupwise.planning.layouts import COLOCATED, DISAGGREGATED, Layout
from groupwise.planning.plan import bound, plan_step
from groupwise.planning.shapes import SHAPES
from groupwise.planning.work import StepWork
from tools import fit_plan

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
MODELS = ("qwen2.5-7b", "qwen2.5-32b", "llama-3.1-70b")
NUMBERS = (8, 64, 1024)
PROMPTS_PER_GPU = 8
WORK = StepWork(64, 256, 16, 1500, 4096, checkpointing=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _seconds(number: float) -> str:
    return f"{number:,.0f} s" if number >= 100 else f"{number:.1f} s"


def _layout_row(layout: Layout) -> list[str]:
    servers = f"{layout.servers:,} sample"
    servers += f" ({layout.tensor_parallel} each)" if layout.tensor_parallel > 1 else ""
    placed = layout.kind if not layout.servers else f"{servers}, {layout.training.ranks:,} learn"
    return [
        placed,
        f"`{layout.training.sharding}`",
        _seconds(layout.sampling_seconds),
        _seconds(layout.transfer_seconds),
        _seconds(layout.training_seconds),
        _seconds(layout.step_seconds),
        f"{layout.tokens_per_second / layout.gpus:,.0f}",
        f"{layout.most_memory / 1e9:.0f} GB",
        bound(layout)[0],
    ]


LAYOUT = ("placement", "sharding", "sampling", "sent", "learning", "step", "tokens/s per GPU", "memory", "bound by")


def scale_rows(gpu: str, models: Sequence[str], work_of: Callable[[int], StepWork]) -> Iterator[list[str]]:
    for name in models:
        for gpus in NUMBERS:
            work = work_of(gpus)
            try:
                plan = plan_step(SHAPES[name], work, GPUS[gpu], gpus)
            except ConfigError as error:
                helps = str(error).partition("What helps: ")[2]
                yield [name, f"{gpus:,}", f"does not fit; what helps: {helps}", *[""] * (len(LAYOUT) - 1)]
                continue
            for layout in plan.layouts:
                mark = "**" if layout is plan.best else ""
                cells = _layout_row(layout)
                yield [name, f"{gpus:,}", f"{mark}{cells[0]}{mark}", *cells[1:]]


def weak_scaling() -> str:
    rows = scale_rows("h100", MODELS, lambda gpus: replace(WORK, prompts=PROMPTS_PER_GPU * gpus))
    return table(("model", "GPUs", *LAYOUT), rows)


def strong_scaling() -> str:
    rows = scale_rows("h100", MODELS[:1], lambda gpus: replace(WORK, prompts=512))
    return table(("model", "GPUs", *LAYOUT), rows)


def gpu_table() -> str:
    rows = [
        [
            gpu.name,
            f"{gpu.flops / 1e12:,.0f}",
            f"{gpu.bandwidth / 1e12:.2f}",
            f"{gpu.memory / 1e9:.0f}",
            f"{gpu.link / 1e9:.0f} ({gpu.link_name})",
            f"{gpu.network / 1e9:g}",
            gpu.source,
        ]
        for gpu in GPUS.values()
    ]
    columns = ("", "bf16 TFLOP/s", "memory TB/s", "memory GB", "GPU to GPU GB/s", "network GB/s", "from")
    return table(columns, rows)


def constant_table() -> str:
    meanings = {
        ("device", "flops"): "of the data sheet's peak, reached by a product of two 8,192 × 8,192 matrices",
        ("device", "bandwidth"): "of the data sheet's peak, reached by a copy of 1 GiB",
        ("passes", "products"): "times the ideal: matrix products of prefill, log-probs and training",
        ("passes", "attention"): "times the ideal: attention in them",
        ("passes", "activations"): "times one read of the kept activations per pass: everything between the products",
        ("passes", "logits"): "times one read of the float32 logits per pass",
        ("passes", "launches"): "seconds of the host to launch a forward pass; backward 1.5 times as long",
        ("decode", "launches"): "seconds per layer and step",
        ("decode", "products"): "times the ideal: the weights read once, or the arithmetic, whichever takes longer",
        ("decode", "cache"): "times one read of the KV caches",
        ("decode", "logits"): "times one read of the float32 logits: head, filters, sampling",
        ("decode", "inner"): "seconds per unit of a product's inner dimension, summed over a layer's products",
        ("decode", "prompts"): "seconds per layer, prompt token, and width of the heads that share keys",
        ("optimizer", "bytes"): "times 44 bytes per weight: clipping, AdamW, finite check",
        ("optimizer", "call"): "seconds per update",
        ("sync", "bytes"): "times 6 bytes per weight: masters into the model",
        ("sync", "call"): "seconds per update",
        ("memory", "activations"): "times 7 hidden and 3 MLP widths per layer and token",
        ("memory", "checkpoints"): "the same with gradient checkpointing: one width per layer, and two complete layers",
    }
    rows = [[phase, name, f"{FITTED[phase][name]:.4g}", text] for (phase, name), text in meanings.items()]
    missing = {(phase, name) for phase, numbers in FITTED.items() for name in numbers} - meanings.keys()
    if missing:
        raise RuntimeError(f"constants without a meaning: {missing}")
    return table(("phase", "constant", "value", "meaning"), rows)


def error_table(kind: str) -> str:
    report = fit_plan.read_report()
    return total_table(row for row in (*fit_plan.totals(report), *fit_plan.memory_totals(report)) if row.kind == kind)


def total_table(totals: Iterable[fit_plan.Total]) -> str:
    rows = []
    for total in totals:
        unit, scale = (" GiB", 2**30) if total.what == "memory" else (" s", 1.0)
        digits = 1 if total.what == "memory" else 2
        sizes = (f"{number / scale:.{digits}f}{unit}" for number in (total.measured, total.predicted))
        rows.append([total.shape, total.work, total.what, *sizes, f"{total.error:+.0%}"])
    return table(("model", "work", "", "measured", "predicted", "error"), rows)


def prefill_errors() -> str:
    rows = [
        [row.shape, row.work, row.phase, f"{row.measured:.3f} s", f"{row.predicted:.3f} s", f"{row.error:+.0%}"]
        for row in fit_plan.comparisons(fit_plan.read_report())
        if row.phase in ("prefill", "forward", "optimizer", "sync")
    ]
    return table(("model", "work", "", "measured", "predicted", "error"), rows)


# NeMo RL 0.4 on DGX H100: model, GPUs, mean tokens of a completion, asynchronous, seconds of a step. 64 prompts × 32
# completions of up to 4,096 tokens, four updates of 512 each, log-probs of the policy and of a reference.
NEMO = (
    ("llama-3.1-8b", 16, 1060, False, 97.7),
    ("llama-3.1-8b", 16, 1129, True, 74.6),
    ("qwen3-32b", 32, 3206, False, 393.0),
    ("qwen3-32b", 64, 3207, True, 215.0),
)


def nemo_table() -> str:
    rows = []
    for name, gpus, tokens, asynchronous, measured in NEMO:
        work = StepWork(64, 130, 32, tokens, 4096, forwards=2, updates=4, checkpointing=True, reference=True)
        plan = plan_step(SHAPES[name], work, GPUS["h100"], gpus)
        wanted = DISAGGREGATED if asynchronous else COLOCATED
        chosen = next((layout for layout in plan.layouts if layout.kind == wanted), plan.best)
        seconds = chosen.step_seconds if asynchronous else chosen.synchronous_seconds
        how = "one step off policy" if asynchronous else "on policy"
        cells = [name, f"{gpus}", f"{tokens:,}", how, f"{measured:.0f} s", f"{seconds:.0f} s", _layout_row(chosen)[0]]
        rows.append(cells)
    return table(("model", "H100", "tokens", "", "NeMo RL 0.4, measured", "this plan, predicted", "placement"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "validation": lambda: error_table("validation"),
    "other runs": lambda: error_table("another run"),
    "servers": lambda: total_table(fit_plan.server_totals()),
    "fitted": lambda: error_table("fitted"),
    "phases": prefill_errors,
    "weak scaling": weak_scaling,
    "strong scaling": strong_scaling,
    "gpus": gpu_table,
    "constants": constant_table,
    "nemo": nemo_table,
}


def fresh(text: str) -> str:
    """The page with all tables written anew; each stands between two comments."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end of table -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise RuntimeError(f"{PAGE.name} must have one place for the table {name!r}")
        text = pattern.sub(lambda match, make=make: f"{match[1]}\n{make()}\n\n{match[2]}", text)  # type: ignore[misc]
    return text


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    new = fresh(text)
    if "--check" in sys.argv[1:]:
        if new != text:
            print("the tables of docs/scale.md are not what the code says; run: make docs")
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
