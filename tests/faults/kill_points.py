"""Kills a process at each of its file operations: a driver process forks one child for each, which dies there."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class KillPoint:
    """Kills this process at operation ``number`` on files below ``folder``, or counts them if there are fewer.

    The operations are opening for writing, fsync, renaming, creating and removing. Writing a file of tensors is killed
    with half of the file written.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number, self.names = str(folder), number, []
        self._install()

    def reach(self, name: str, path: Any, before_death: Any = None) -> None:
        if not str(path).startswith(self.folder):
            return
        self.names.append(f"{name} {os.path.relpath(str(path), self.folder)}")
        if len(self.names) == self.number:
            if before_death is not None:
                before_death()
            os.kill(os.getpid(), signal.SIGKILL)

    def _install(self) -> None:
        import safetensors.torch

        fsync, save_file = os.fsync, safetensors.torch.save_file

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and isinstance(arguments[0], (str, os.PathLike)) and (arguments[2] or 0) & WRITING:
                self.reach("open", arguments[0])
            elif event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
                # rmtree gives names relative to a descriptor; only the run's folder is removed from here.
                path = str(arguments[0])
                self.reach(event, path if os.path.isabs(path) else os.path.join(self.folder, path))

        def killing_fsync(descriptor: int) -> None:
            self.reach("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        def killing_save_file(tensors: Any, path: Any, *arguments: Any, **options: Any) -> None:
            def write_half() -> None:
                save_file(tensors, path, *arguments, **options)
                os.truncate(path, os.path.getsize(path) // 2)

            self.reach("save_file", path, write_half)
            save_file(tensors, path, *arguments, **options)

        sys.addaudithook(hook)
        os.fsync, safetensors.torch.save_file = killing_fsync, killing_save_file

    def survived(self) -> None:
        """The child ends here if it was not killed, and leaves the names of the operations beside its folder."""
        Path(self.folder).with_name("points.json").write_text(json.dumps(self.names))
        os._exit(0)


def fork_at_every_point(run: Path, base: Path) -> tuple[Path, KillPoint]:
    """In a child: its copy of the run folder, ``base/killed-N``, and its kill point N. The parent never returns.

    The parent starts one child after another until one survives, and then exits.
    """
    for number in itertools.count(1):
        folder = base / f"killed-{number}"
        # Files are replaced and never modified, except the metrics: links are enough for the others.
        shutil.copytree(run, folder, copy_function=os.link)
        (folder / "metrics.jsonl").unlink()
        shutil.copy(run / "metrics.jsonl", folder)
        child = os.fork()
        if not child:
            return folder, KillPoint(folder, number)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            os._exit(os.WEXITSTATUS(status))
    raise RuntimeError("unreachable")
