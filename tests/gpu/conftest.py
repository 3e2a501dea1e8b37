"""Warnings of torch.compile do not fail a test."""

from __future__ import annotations

import warnings

import pytest


@pytest.fixture(autouse=True)
def _quiet_compiler() -> None:
    warnings.filterwarnings("ignore", module=r"torch\._(dynamo|inductor|functorch).*")
    warnings.filterwarnings("ignore", message="Synchronization debug mode")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
