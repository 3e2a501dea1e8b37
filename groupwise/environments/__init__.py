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
from groupwise.environments.gym_environment import GymEnvironment
from groupwise.environments.method_environment import MethodEnvironment
from groupwise.environments.tool_environment import ToolEnvironment
from groupwise.environments.tools import Tool, make_tools
from groupwise.environments.watch import watched

__all__ = [
    "AssistantTurn",
    "Environment",
    "EnvironmentFactory",
    "EnvironmentFailed",
    "GymEnvironment",
    "Limits",
    "Message",
    "MethodEnvironment",
    "Reply",
    "Schema",
    "Tool",
    "ToolCall",
    "ToolEnvironment",
    "ToolResult",
    "make_tools",
    "watched",
    "with_opening",
]
