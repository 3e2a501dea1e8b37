"""Conversations of several turns as tokens: chat templates turn by turn, and what the model said, parsed."""

from __future__ import annotations

from groupwise.conversations.call_formats import CALL_FORMATS
from groupwise.conversations.families import FAMILIES, Family, family_of
from groupwise.conversations.parsed_turn import ParsedTurn, parse_turn
from groupwise.conversations.plain_text import PlainTextTemplate
from groupwise.conversations.segments import Conversation, GivenTokens, SampledTurn, Segment
from groupwise.conversations.template import TurnTemplate
from groupwise.conversations.tool_calls import ToolCall

__all__ = [
    "CALL_FORMATS",
    "FAMILIES",
    "Conversation",
    "Family",
    "GivenTokens",
    "ParsedTurn",
    "PlainTextTemplate",
    "SampledTurn",
    "Segment",
    "ToolCall",
    "TurnTemplate",
    "family_of",
    "parse_turn",
]
