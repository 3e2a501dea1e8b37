"""Which family a chat template belongs to, by the special tokens that it writes.

The family says how its models call tools, and which templates of this package can take the place of one that changes
earlier turns. A file in ``templates/`` writes the same prompts as the original; it differs in later turns only.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).with_name("templates")


class Family(NamedTuple):
    """``marks``: texts that its templates have, all of them; ``call_format``: a name of `CALL_FORMATS`."""

    name: str
    marks: tuple[str, ...]
    call_format: str
    replacements: tuple[str, ...] = ()  # files in templates/, tried in order

    def templates(self) -> list[str]:
        return [(FOLDER / name).read_text(encoding="utf-8") for name in self.replacements]


# The first one that fits is taken, so special cases come before general ones.
FAMILIES = (
    Family("deepseek", ("<｜Assistant｜>",), "deepseek", ("deepseek_r1.jinja",)),
    Family("llama3", ("<|start_header_id|>",), "llama3"),
    Family("gemma", ("<start_of_turn>",), "gemma"),
    Family("mistral", ("[INST]",), "mistral", ("mistral_v3.jinja", "mistral_tekken.jinja")),
    Family("phi4", ("<|im_sep|>",), "json"),
    Family("phi3", ("<|assistant|>", "<|end|>"), "json"),
    Family("qwen3-coder", ("<|im_start|>", "<function="), "qwen3_coder"),
    Family("smollm3", ("<|im_start|>", "xml_tools"), "hermes"),
    Family("qwen3", ("<|im_start|>", "<tool_response>", "</think>"), "hermes", ("qwen3.jinja",)),
    Family("qwen2.5", ("<|im_start|>", "<tool_call>"), "hermes"),
    Family("chatml", ("<|im_start|>",), "hermes"),
)
UNKNOWN = Family("unknown", (), "hermes")


def family_of(template: str) -> Family:
    """The family of a template; `UNKNOWN` if it has the marks of none. Phi-3.5 builds its marks from the roles."""
    text = template.replace("'<|' + message['role'] + '|>", "<|assistant|>'")
    return next((family for family in FAMILIES if all(mark in text for mark in family.marks)), UNKNOWN)
