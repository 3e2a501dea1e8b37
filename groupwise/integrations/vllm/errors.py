"""What may go wrong with a vLLM server."""

from __future__ import annotations

from groupwise.errors import ConfigError, GroupwiseError


class VllmError(GroupwiseError, RuntimeError):
    """vLLM cannot sample: no server answers, or one answers with something else than completions."""


class ServerError(VllmError):
    """One server failed. Another one may be asked, or the same again later."""


class ReplyError(ServerError):
    """A server answered, but not with what was asked for: asking again seldom helps."""


class ServerSetupError(ConfigError):
    """A server was started in a way that cannot work, such as another model: trying again does not help."""
