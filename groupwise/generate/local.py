"""What generators share that sample with the very model that is trained, in this process."""

from __future__ import annotations

from groupwise.generate.types import Progress


class LocalGenerator:
    """Its weights are always the current ones, so that an update only changes the version."""

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.remote = False
        self.version = 0
        self.progress: Progress | None = None

    def update_weights(self, version: int) -> None:
        self.version = version

    def check_health(self) -> None:
        """There is nothing outside this process that could fail."""

    def release(self) -> None:
        """There is nothing to free."""

    def close(self) -> None:
        self.release()
