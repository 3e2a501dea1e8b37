"""Writes new files for a user; an existing file is never overwritten."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from groupwise.errors import ConfigError
from groupwise.paths import is_folder, kind_of, show_path
from groupwise.text import error_reason


def write_new_files(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write ``files``, by their paths below ``folder``, which is created; returns their paths.

    Raises an error before anything is written if one of them exists already.
    """
    kind_of(folder, ConfigError)  # an error for a name that no folder can have
    paths = {folder / name: contents for name, contents in files.items()}
    for parent in (folder, *folder.parents):
        if os.path.lexists(parent) and not is_folder(parent, ConfigError):
            raise ConfigError(f"{parent} is a file, not a folder; name another folder")
    in_the_way = [str(path) for path in paths if os.path.lexists(path)]
    if in_the_way:
        exist = "exists already" if len(in_the_way) == 1 else "exist already"
        raise ConfigError(f"{', '.join(in_the_way)} {exist}, and nothing is overwritten; name another folder")
    for path, contents in paths.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as file:
                file.write(contents)
        except OSError as error:
            raise ConfigError(f"{show_path(path)} cannot be written: {error_reason(error)}") from error
    return list(paths)
