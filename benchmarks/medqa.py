"""MedQA before and after training: the rows of the table in docs/usmle.md, and the table itself.

Every row is a training run and two exams: MedQA's test file and the medical subjects of MMLU, each asked once. Settings
are chosen on 300 questions held out from MedQA's training file. Rows that start from another row need it first; rows
that do not may run beside each other in several processes.

Usage (DATA is a folder with the files that `FILES` names)::

    python benchmarks/medqa.py DATA --out runs/medqa                       # all rows, one after another
    python benchmarks/medqa.py DATA --out runs/medqa --only sft both       # these
    python benchmarks/medqa.py --table runs/medqa                          # the table of the finished rows
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trials import as_options

from groupwise.rundir import metric_column, read_metrics
from groupwise.text import markdown_table
from groupwise.usmle.compare import compare
from groupwise.usmle.markdown import interval
from groupwise.usmle.report import read_report
from groupwise.usmle.tables import ALL_ORDERS, ExamReport

POOL, TEST = "medqa_usmle_train_pool.jsonl", "medqa_usmle_4opt_test.jsonl"
OTHERS = ("medmcqa_dev.jsonl", "medmcqa_train_sample.jsonl", "headqa_en.jsonl", "medqa_taiwan_en.jsonl")
MMLU = tuple(
    f"mmlu_{subject}_test.csv"
    for subject in ("anatomy", "clinical_knowledge", "college_biology", "college_medicine", "medical_genetics",
                    "professional_medicine")
)  # fmt: skip
FILES = (POOL, TEST, *OTHERS, *MMLU)
EXAMS = {"medqa": (TEST,), "mmlu": MMLU}
HELD_OUT = 300
MEASURES = ("lenient", ALL_ORDERS)  # compared with the model before; the p-values of each are corrected over the rows

Settings = dict[str, object]
SHORT: Settings = {"task_options.prompt": "direct", "sampling.max_new_tokens": 16}
REASONING: Settings = {"task_options.prompt": "chat", "sampling.max_new_tokens": 320}
SHARED: Settings = {
    "algorithm": "enhanced_grpo",
    "phases": "[]",
    "rules": "[]",
    "data.max_prompt_length": 2048,
    "task_options.reading": "lenient",
    "task_options.bad_rows": "skip",
    "model.gradient_checkpointing": "false",
    "train.token_budget": 8192,
    "run.checkpoint_every": 0,
    "run.resumable": "false",
    "run.save_rollouts": "false",
    "run.show_samples": 0,
    "run.log_every": 5,
    "run.plot": "false",
}
SFT: Settings = {
    "train.steps": 0,
    "sft.batch_size": 32,
    "sft.epochs": 1,
    "sft.learning_rate": 2e-5,
    "task_options.copies": 2,
}
GRPO: Settings = {
    "train.batch_size": 64,
    "sampling.samples_per_prompt": 8,
    "optimizer.learning_rate": 2e-6,
    "optimizer.embedding_learning_rate": 2e-6,
    "optimizer.warmup_steps": 5,
}


@dataclass(frozen=True)
class Row:
    """A model of the table: what it starts from, how it is trained, and the form in which it is asked."""

    title: str
    form: Settings
    training: Settings = field(default_factory=dict)  # none: the model as it is
    start: str = ""  # the row whose model it starts from
    only_medqa: bool = False  # the other files' questions are left out

    @property
    def base(self) -> str:
        """The row with the same prompt before training."""
        return next(name for name, row in ROWS.items() if not row.training and row.form is self.form)


STEPS: Settings = {"train.steps": 60, "evaluate.every": 30}
ROWS = {
    "base": Row("before, short answers", SHORT),
    "sft": Row("SFT, short answers", SHORT, SFT),
    "grpo": Row("GRPO, short answers", SHORT, GRPO | STEPS),
    "both": Row("SFT, then GRPO, short answers", SHORT, GRPO | STEPS | {"task_options.copies": 2}, start="sft"),
    "reasoning-base": Row("before, reasoning", REASONING),
    "reasoning-grpo": Row(
        "GRPO, reasoning",
        REASONING,
        GRPO | {"train.steps": 84, "evaluate.every": 42, "task_options.copies": 2},
        only_medqa=True,
    ),
    "reasoning-more": Row(  # its reference, for the KL, is the model that it starts from
        "GRPO, reasoning, continued",
        REASONING,
        GRPO
        | {
            "train.steps": 64,
            "evaluate.every": 64,
            "evaluate.before_training": "false",
            "train.seed": 1,
            "task_options.copies": 2,
        },
        start="reasoning-grpo",
        only_medqa=True,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="the folder with the questions")
    parser.add_argument("--out", type=Path, default=Path("runs/medqa"))
    parser.add_argument("--only", nargs="+", choices=list(ROWS), help="only these rows")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", help="a name, a folder or a hub id")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"),
                        help="another value of a setting of training, e.g. --set train.steps 4")  # fmt: skip
    parser.add_argument("--exams", nargs="+", choices=list(EXAMS), default=list(EXAMS), help="ask only these exams")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the table of the rows in this folder")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return
    if args.data is None or (missing := [name for name in FILES if not (args.data / name).exists()]):
        parser.error("name the folder of the questions" if args.data is None else f"{args.data} lacks {missing[0]}")
    args.out.mkdir(parents=True, exist_ok=True)
    train, held_out = split_pool(args.data / POOL, args.out)
    data = {
        "data.train": json.dumps([str(train), *(str(args.data / name) for name in OTHERS)]),
        "data.held_out": str(held_out),
    }
    for name in args.only or ROWS:
        run_row(name, args.out, args.data, data, args.exams, args.model, dict(args.set))


def split_pool(pool: Path, out: Path) -> tuple[Path, Path]:
    """The pool without `HELD_OUT` of its questions with four options, and those questions."""
    lines = pool.read_text().splitlines()
    four = [number for number, line in enumerate(lines) if len(json.loads(line)["options"]) == 4]
    chosen = set(random.Random(0).sample(four, HELD_OUT))
    paths = out / "medqa_train.jsonl", out / "medqa_held_out.jsonl"
    for path, kept in zip(paths, (False, True), strict=True):
        path.write_text("".join(f"{line}\n" for number, line in enumerate(lines) if (number in chosen) == kept))
    return paths


def run_row(
    name: str,
    out: Path,
    data: Path,
    rows: Settings,
    exams: Sequence[str],
    model: str,
    changes: Settings,
) -> None:
    """Train the row's model, unless that is done, and ask it the exams that it has not had."""
    row, folder = ROWS[name], out / name
    source = str(out / row.start / "run" / "model") if row.start else model
    folder.mkdir(exist_ok=True)
    if row.training and not (folder / "run" / "model").exists():
        if row.only_medqa:
            rows = {**rows, "data.train": json.dumps([str(out / "medqa_train.jsonl")])}
        settings = {"model.source": source, **SHARED, **row.form, **rows, **row.training, **changes}
        started = time.monotonic()
        call(folder / "train.log", "train", "--overwrite", {**settings, "run.folder": folder / "run"})
        (folder / "minutes.json").write_text(json.dumps((time.monotonic() - started) / 60))
    if row.training:
        source = str(folder / "run" / "model")
    for exam in exams:
        if not (folder / exam / "report.json").exists():
            held_out = json.dumps([str(data / file) for file in EXAMS[exam]])
            settings = {**SHARED, **row.form, "model.source": source, "data.held_out": held_out}
            call(folder / f"{exam}.log", "eval", f"--report={folder / exam}", settings)
    print(f"{name}: done", flush=True)


def call(log: Path, command: str, option: str, settings: Settings) -> None:
    words = [sys.executable, "-m", "groupwise", command, "usmle", option, *as_options(settings)]
    with open(log, "w") as output:
        done = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"{log}:\n{log.read_text()[-3000:]}")


def table(out: Path) -> str:
    """The finished rows as a Markdown table, each compared with its model before."""
    reports = {
        name: {exam: read_report(out / name / exam) for exam in EXAMS if (out / name / exam).exists()}
        for name in ROWS
        if (out / name / "medqa" / "report.json").exists()
    }
    header = ["", "written", "strict", "likeliest letter", ALL_ORDERS, "p written", "p all orders",
              "same option shuffled", "MMLU", "tokens", "GPU-minutes"]  # fmt: skip
    lines = []
    corrected = {measure: holm(p_values(reports, measure)) for measure in MEASURES}
    for name, exams in reports.items():
        report, row = exams["medqa"], ROWS[name]
        minutes = out / name / "minutes.json"
        lines.append([
            row.title, interval(report.lenient), interval(report.strict), interval(report.letters.accuracy),
            interval(report.averaged_letters.accuracy),
            *(f"{corrected[measure][name]:.2g}" if name in corrected[measure] else "" for measure in MEASURES),
            f"{100 * report.shuffled.consistency.value:.0f} %",
            interval(exams["mmlu"].lenient) if "mmlu" in exams else "",
            f"{sampled_tokens(out / name / 'run') / 1e6:.2f} M" if row.training else "",
            f"{json.loads(minutes.read_text()):.1f}" if minutes.exists() else "",
        ])  # fmt: skip
    return markdown_table(header, lines)


def p_values(reports: dict[str, dict[str, ExamReport]], measure: str) -> dict[str, float]:
    """McNemar's exact test of each trained row against its base."""
    values = {}
    for name, exams in reports.items():
        row = ROWS[name]
        if row.training and row.base in reports:
            changes = compare(reports[row.base]["medqa"], exams["medqa"]).measures
            values[name] = next(change.p_value for change in changes if change.name == measure)
    return values


def holm(values: dict[str, float]) -> dict[str, float]:
    """The p-values, corrected for their number (Holm 1979)."""
    corrected, largest = {}, 0.0
    for rank, (name, value) in enumerate(sorted(values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, value * (len(values) - rank)))
        corrected[name] = largest
    return corrected


def sampled_tokens(run: Path) -> float:
    tokens: Sequence[float] = metric_column(read_metrics(run / "metrics.jsonl"), "num_tokens")[1]
    return tokens[-1] if len(tokens) else 0.0


if __name__ == "__main__":
    main()
