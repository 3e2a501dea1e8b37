"""Conversations of several turns: chat templates turn by turn, what the model said, and episodes with environments or
rollout functions."""

from __future__ import annotations

from groupwise.conversations.call_formats import CALL_FORMATS
from groupwise.conversations.chat_requests import RequestRefused
from groupwise.conversations.episodes import OUTCOMES, Episode, EpisodeLimits, EpisodeTurn, SampledTokens
from groupwise.conversations.families import FAMILIES, Family, family_of
from groupwise.conversations.formats import ChatFormat, PlainFormat, TurnFormat
from groupwise.conversations.parsed_turn import ParsedTurn, parse_turn
from groupwise.conversations.plain_text import PlainTextTemplate
from groupwise.conversations.rollout_function import RolloutFunction, RolloutModel
from groupwise.conversations.sampler import EpisodeSampler, EpisodeStart, share_prompt
from groupwise.conversations.segments import Conversation, GivenTokens, SampledTurn, Segment
from groupwise.conversations.template import TurnTemplate

__all__ = [
    "CALL_FORMATS",
    "FAMILIES",
    "OUTCOMES",
    "ChatFormat",
    "Conversation",
    "Episode",
    "EpisodeLimits",
    "EpisodeSampler",
    "EpisodeStart",
    "EpisodeTurn",
    "Family",
    "GivenTokens",
    "ParsedTurn",
    "PlainFormat",
    "PlainTextTemplate",
    "RequestRefused",
    "RolloutFunction",
    "RolloutModel",
    "SampledTokens",
    "SampledTurn",
    "Segment",
    "TurnFormat",
    "TurnTemplate",
    "family_of",
    "parse_turn",
    "share_prompt",
]
