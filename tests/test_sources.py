"""docs/sources.md is true: what it names exists, and what the designs name is in it."""

from __future__ import annotations

import pytest

from tests.sources import DESIGNS, PAGE, SECTIONS, Row, design_names, design_text, exists, missing_names, problems, rows

CONTROL = "GRPO against PPO on Gymnasium"
VERL = "Similarity-group GRPO for creative writing (verl, Ray)"


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("section", SECTIONS)
def test_everything_in_the_column_here_exists(page, section):
    assert any(row.section == section for row in rows(page))
    faults = [fault for fault in problems(page) if fault.endswith(f"({section})")]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_name_of_a_design_is_listed(page, section):
    text = design_text(SECTIONS[section])
    if text is None:
        pytest.skip(f"the designs are not here: {DESIGNS}")
    names = design_names(text)
    assert len(names) > 10
    missing = missing_names(names, [row.design for row in rows(page) if row.section == section])
    assert not missing, f"docs/sources.md, section {section!r}, has no row for: {', '.join(missing)}"


# --- the check itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token",
    [
        "core.kl.kl_estimate", "core.kl_estimate", "groupwise.core", "core", "core.policy_loss(logps, clip_low=0.2)",
        "Trainer.steps()", "core.losses.Tokens.advantages", "core.losses.Loss.ratios", "training.trainer.Trainer.order",
        "loss.kl_coef", "loss.kl_coef = 0.01", 'loss.name = "dapo"', 'preference.kind = ["sigmoid", "sft"]',
        "model.lora.rank = 8", 'algorithm = "pg_grpo"', "[[rewards]]", "[sft]", "rewards.weight", 'task = "usmle"',
        'task_options.prompt = "completion"', "reward", "loss/kl", "rewards/chosen", "eval/accuracy", "accuracy_masked",
        "rewards/length_band/mean", "similarity_groups/*", "similarity_groups/n_prompts_split_into_{k}_groups",
        "recipes/quiz.toml", "docs/usmle.md", "groupwise/core/losses.py", "recipes/*.toml", "metrics.jsonl",
        "best.json", "rules.when", "phases.steps", "groupwise train --loss.kl_coef 0",
        "groupwise control compare", "groupwise eval --report", "groupwise sample",
        "groupwise usmle ask", "make test", "--preference.kind_weights", "--resume",
    ],
)  # fmt: skip
def test_what_exists(token):
    assert exists(token)


@pytest.mark.parametrize(
    "token",
    [
        "core.kl.kl_estimat", "kl_estimate", "corr.kl", "core.policy_loss(clip=0.2)", "Trainer.stepps()",
        "core.losses.Tokens.rewards", "core.losses.LOSSES(x)", "loss.kl_coeff", 'loss.kl_coef = "high"',
        'loss.name = "dappo"', 'preference.kind = ["sigmoid", "sgt"]', 'algorithm = "ppo"', "[[phasses]]",
        "rewards.wait", "rules.wen",
        'task_options.prompt = "poem"', "task_options.prompts", "rewardd", "loss/kll", "similarity_group/*", "eval/acc",
        "recipes/quizz.toml", "groupwise/core/loss.py", "metricss.jsonl", "groupwise trian", "groupwise sample --oder",
        "groupwise train --loss.kl_coeff 0", "groupwise control trian", "make tset", "--loss_weights", "--resum",
        "lr", "algorithm.adv_estimator=x", "creating 8 similarity grouper workers", 'order = "mlx"', "not built",
    ],
)  # fmt: skip
def test_what_does_not_exist(token):
    assert not exists(token)


def test_names_of_control_and_verl_count_in_their_sections():
    for token in ("lr", "group_size = 16", 'length_norm = "episode"', "ppo-fast"):
        assert exists(token, CONTROL)
        assert not exists(token, VERL)
    for token in ("lrr", "group_size = 1", 'length_norm = "epsode"'):
        assert not exists(token, CONTROL)
    assert exists("algorithm.adv_estimator=similarity_group_grpo", VERL)
    assert not exists("algorithm.no_such_key=1", VERL)


def test_a_wrong_token_is_reported_with_its_line():
    text = """# A title
## Preference-guided GRPO
| in the design | here | difference |
|---|---|---|
| `a` \\| b | `loss.kl = "k3"`, `"k4"`, `"full"` | `not checked` |
| c | `core.nothing` and `reward` | |

| other | table |
|---|---|
| x | `never checked` |
"""
    assert next(rows(text)) == Row(5, "Preference-guided GRPO", "`a` \\| b", '`loss.kl = "k3"`, `"k4"`, `"full"`')
    assert problems(text) == [
        'docs/sources.md:5: `loss.kl = "k4"` does not exist (Preference-guided GRPO)',
        "docs/sources.md:6: `core.nothing` does not exist (Preference-guided GRPO)",
    ]


def test_names_are_read_from_a_design():
    text = """
`SomeWorker`: a class, with `run(state)` and `similarity_groups/avg_{k}_groups`; not `a + b`, but `self.epsilon_low` and
`ratio = new - old`.
```python
CONFIG = {
    'rate': 1e-5,  # low
    'on': True,
}
class Agent:
    def __init__(self, size):
        pass
    def update(self, buffer: list[int], *,
               clip: float = 0.2) -> dict:
        return {'loss': loss.item(), 'name': name}
```
```typescript
{ topK: null,
  maxLength: 256,  // tokens
}
```
"""
    names = design_names(text)
    assert names == {
        **dict.fromkeys(["SomeWorker", "run", "similarity_groups/avg_{k}_groups", "epsilon_low", "ratio"]),
        **dict.fromkeys(["Agent", "size", "update", "buffer", "clip"]),
        "rate": "1e-5",
        "on": "True",
        "maxLength": "256",
    }
    cells = ["`SomeWorker.run`, `similarity_groups/avg_3_groups`", "`epsilon_low`, `ratio`", "`Agent(size)`, `clip`"]
    assert missing_names(names, [*cells, "`rate` 1e-5, `on` false, `updated`", "`maxLength` 256"]) == [
        "update",
        "buffer",
        "on True",
    ]
