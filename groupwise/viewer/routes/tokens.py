"""One answer token by token: what was recorded of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.analysis.run_reader import RunReader
from groupwise.errors import CheckpointError
from groupwise.training.store.token_files import TokenRow
from groupwise.viewer.api import Query, run_route
from groupwise.viewer.routes.sample import sample_fields
from groupwise.viewer.runs import ServedRun


@run_route("tokens")
def tokens(run: ServedRun, query: Query) -> dict[str, Any]:
    """The tokens of one answer; if they were not recorded, ``missing`` says what is, and which setting records more."""
    reader = run.reader
    steps = reader.token_steps
    step = query.integer("step", steps[-1] if steps else 0)
    if step not in steps:
        return {"steps": steps, "missing": _missing(reader, step)}
    rows = reader.tokens(step)
    prompts = {row.prompt_number: row.row for row in rows}
    number = query.integer("prompt", next(iter(prompts), 0))
    siblings = [row for row in rows if row.prompt_number == number]
    if not siblings:
        recorded = ", ".join(map(str, prompts))
        return {
            "steps": steps,
            "missing": f"Of step {step}, the tokens of prompt {number} were not recorded, only those of prompt "
            f"{recorded}. {_remedy(reader)}",
        }
    sample = query.integer("sample", siblings[0].sample)
    chosen = next((row for row in siblings if row.sample == sample), None)
    if chosen is None:
        return {"steps": steps, "missing": f"Prompt {number} of step {step} has no answer {sample}."}
    samples = _samples(reader, step, siblings)
    references: Sequence[float | None] = chosen.ref_logps or [None] * len(chosen.ids)
    return {
        "steps": steps,
        "step": step,
        "prompt": number,
        "sample": sample,
        "prompts": [{"prompt": prompt, "row": row} for prompt, row in prompts.items()],
        "prompt_text": next((row["prompt"] for row in samples if row.get("prompt")), ""),
        "siblings": [{"sample": row["sample"], "advantage": row.get("advantage")} for row in samples],
        "facts": next(sample_fields(row, samples) for row in samples if row["sample"] == sample),
        "tokens": [
            {
                "id": token,
                "text": text,
                "sampler_logp": sampler,
                "logp": policy,
                "entropy": entropy,
                "ref_logp": reference,
            }
            for token, text, sampler, policy, entropy, reference in zip(
                chosen.ids,
                chosen.texts,
                chosen.sampler_logps,
                chosen.policy_logps,
                chosen.entropy,
                references,
                strict=True,
            )
        ],
    }


def _samples(reader: RunReader, step: int, siblings: Sequence[TokenRow]) -> list[dict[str, Any]]:
    """The rollouts of these answers; only what the tokens' file knows if those cannot be read."""
    try:
        rows = {(row["prompt_number"], row["sample"]): row for row in reader.rollouts(step)}
    except CheckpointError:
        rows = {}
    return [
        rows.get((row.prompt_number, row.sample))
        or {"sample": row.sample, "completion": row.completion, "completion_tokens": len(row.ids)}
        for row in siblings
    ]


def _missing(reader: RunReader, step: int) -> str:
    if not reader.token_steps:
        return f"This run has recorded no tokens. {_remedy(reader)}"
    return f"The tokens of step {step} were not recorded. {_remedy(reader)}"


def _remedy(reader: RunReader) -> str:
    every, prompts = (reader.settings.get(f"run.save_tokens_{name}") for name in ("every", "prompts"))
    if every is None:
        return "run.save_tokens_every = 10 records them in every tenth step, of run.save_tokens_prompts prompts."
    often = "no step" if not every else "every step" if every == 1 else f"one of {every} steps"
    return (
        f"run.save_tokens_every = {every} records {often}, with run.save_tokens_prompts = {prompts} the prompts whose "
        "rewards differ most; run.save_tokens_every = 1 records every step."
    )
