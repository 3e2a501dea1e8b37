"""The model families of the tests: a template in the family's documented form, and a tokenizer with its tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conversations.tokenizers import byte_level, sentencepiece

TEMPLATES = Path(__file__).with_name("templates")
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CALL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINK_TAGS = ("<think>", "</think>")
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


@dataclass(frozen=True)
class ModelFamily:
    """``calls``: how many calls a turn may have; ``thinking``: a block of it before an answer is part of the turn."""

    name: str
    family: str
    make: Callable[[], Any]
    end: str
    system: bool = True
    calls: int = 0
    tool_role: bool = False
    shows_tools: bool = False
    thinking: bool = False
    is_replaced: bool = False
    trims: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    template: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def chat_template(self) -> str:
        return (TEMPLATES / f"{self.template or self.name}.jinja").read_text()

    def tokenizer(self) -> Any:
        tokenizer = _made(self.make)
        tokenizer.chat_template = self.chat_template
        return tokenizer


@functools.cache
def _made(make: Callable[[], Any]) -> Any:
    return make()


def _chatml() -> Any:
    return byte_level(CHATML, eos_token="<|im_end|>")


def _qwen() -> Any:
    return byte_level(CHATML, (*CALL_TAGS, *THINK_TAGS), eos_token="<|im_end|>")


def _llama() -> Any:
    special = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id", "python_tag")
    tokens = [f"<|{name}|>" for name in special]
    return byte_level(tokens, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def _mistral() -> Any:
    tags = ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS")
    special = ["<s>", "</s>", "[TOOL_CALLS]", *(f"[{slash}{tag}]" for tag in tags for slash in ("", "/"))]
    return sentencepiece(special, prepend=True, bos_token="<s>", eos_token="</s>")


def _tekken() -> Any:
    tags = ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS")
    special = ["<s>", "</s>", "[TOOL_CALLS]", *(f"[{slash}{tag}]" for tag in tags for slash in ("", "/"))]
    return byte_level(special, bos_token="<s>", eos_token="</s>")


def _gemma() -> Any:
    special = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
    return sentencepiece(special, ("\n\n", "<table>"), bos_token="<bos>", eos_token="<eos>")


def _phi3() -> Any:
    special = ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    return sentencepiece(special, prepend=True, rstrip=True, bos_token="<s>", eos_token="<|endoftext|>")


def _phi4() -> Any:
    return byte_level([*CHATML, "<|im_sep|>"], eos_token="<|endoftext|>")


def _deepseek() -> Any:
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    tags = ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep")
    tags += ("tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end")
    special = [begin, end]
    markers = ["<｜User｜>", "<｜Assistant｜>", *(f"<｜{tag}｜>" for tag in tags), *THINK_TAGS]
    return byte_level(special, markers, bos_token=begin, eos_token=end)


FAMILIES = [
    ModelFamily("chatml", "chatml", _chatml, "<|im_end|>", tool_role=True),
    ModelFamily("smollm2", "chatml", _chatml, "<|im_end|>", tool_role=True),
    ModelFamily("qwen2_5", "qwen2.5", _qwen, "<|im_end|>", calls=3, tool_role=True, shows_tools=True),
    ModelFamily(
        "qwen3", "qwen3", _qwen, "<|im_end|>", calls=3, tool_role=True, shows_tools=True,
        thinking=True, is_replaced=True,
    ),
    ModelFamily(
        "qwen3-without-thinking", "qwen3", _qwen, "<|im_end|>", calls=3, tool_role=True, shows_tools=True,
        is_replaced=True, kwargs={"enable_thinking": False}, template="qwen3",
    ),
    ModelFamily("llama3", "llama3", _llama, "<|eot_id|>", calls=1, tool_role=True, shows_tools=True, trims=True),
    ModelFamily("mistral", "mistral", _mistral, "</s>", calls=3, tool_role=True, shows_tools=True, is_replaced=True),
    ModelFamily(
        "mistral_tekken", "mistral", _tekken, "</s>", calls=3, tool_role=True, shows_tools=True, is_replaced=True
    ),
    ModelFamily("gemma", "gemma", _gemma, "<end_of_turn>", trims=True),
    ModelFamily("smollm3", "smollm3", _qwen, "<|im_end|>", tool_role=True, thinking=True),
    ModelFamily(
        "smollm3-without-thinking", "smollm3", _qwen, "<|im_end|>", tool_role=True,
        kwargs={"enable_thinking": False}, template="smollm3",
    ),
    ModelFamily("phi3", "phi3", _phi3, "<|end|>"),
    ModelFamily("phi4", "phi4", _phi4, "<|im_end|>", tool_role=True),
    ModelFamily(
        "deepseek_r1", "deepseek", _deepseek, "<｜end▁of▁sentence｜>", tool_role=True, thinking=True, is_replaced=True
    ),
]  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}
