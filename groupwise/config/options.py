"""Tables that belong to a plug-in, such as ``[task_options]``, validated by the plug-in's own pydantic class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from groupwise.config.faults import option_fault
from groupwise.errors import ConfigError

Options = TypeVar("Options", bound=BaseModel)


def read_options(model: type[Options], table: Mapping[str, Any], where: str) -> Options:
    """The table as an instance of ``model``; an error begins with ``where``."""
    try:
        return model.model_validate(dict(table))
    except ValidationError as error:
        faults = dict.fromkeys(option_fault(fault, table, model) for fault in error.errors())
        raise ConfigError(f"{where}: {'; '.join(faults)}") from error
