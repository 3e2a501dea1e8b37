"""Environments and tools for conversations of several turns. Nothing here knows tokens or models."""

from groupwise.environments.contract import (
    AssistantTurn,
    Environment,
    EnvironmentFactory,
    EnvironmentFailed,
    Limits,
    Message,
    Reply,
    Schema,
    ToolCall,
    ToolResult,
    with_opening,
)

__all__ = [
    "AssistantTurn",
    "Environment",
    "EnvironmentFactory",
    "EnvironmentFailed",
    "Limits",
    "Message",
    "Reply",
    "Schema",
    "ToolCall",
    "ToolResult",
    "with_opening",
]
