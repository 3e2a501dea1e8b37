"""Environments and tools for conversations of several turns. Nothing here knows tokens or models."""

from groupwise.environments.arithmetic import arithmetic
from groupwise.environments.code_tool import code_tool
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
from groupwise.environments.openenv import OpenEnvEnvironment
from groupwise.environments.sandbox import Sandbox, SandboxResult
from groupwise.environments.tool_environment import ToolEnvironment
from groupwise.environments.tools import Tool, make_tools
from groupwise.environments.verifiers_environment import VerifiersEnvironment
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
    "OpenEnvEnvironment",
    "Reply",
    "Sandbox",
    "SandboxResult",
    "Schema",
    "Tool",
    "ToolCall",
    "ToolEnvironment",
    "ToolResult",
    "VerifiersEnvironment",
    "arithmetic",
    "code_tool",
    "make_tools",
    "watched",
    "with_opening",
]
