"""Paths that a user gives: what is there, and what a file holds. Whatever is wrong becomes one sentence.

`Path.exists` raises for a folder that may not be searched and for a name that is too long, and `os.path.exists` says
that there is no such file; opening a named pipe waits for its writer, and reading a device may never end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from groupwise.errors import GroupwiseError, InputError
from groupwise.text import error_reason

FILE, FOLDER = "file", "folder"
KINDS = {
    stat.S_IFREG: FILE,
    stat.S_IFDIR: FOLDER,
    stat.S_IFIFO: "named pipe",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
}
STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # what a shell passes: `<(command)`, or standard input
SHOWN = 200  # characters of a path in a message
MEGABYTE = 1_000_000


def user_path(path: str | Path) -> Path:
    """The path with ``~`` replaced; one of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))


def kind_of(path: str | Path, error: type[GroupwiseError] = InputError) -> str | None:
    """What is at a path: ``"file"``, ``"folder"``, the name of something else such as ``"device"``, or None.

    Raises ``error`` if that cannot be known: a folder on the way may not be searched, symbolic links go in a circle, or
    no file can have this name.
    """
    try:
        return KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "special file")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as reason:
        raise error(f"{show_path(path)} cannot be used: {path_reason(reason)}") from reason


def is_file(path: str | Path, error: type[GroupwiseError] = InputError) -> bool:
    return kind_of(path, error) == FILE


def is_folder(path: str | Path, error: type[GroupwiseError] = InputError) -> bool:
    return kind_of(path, error) == FOLDER


def open_file(path: str | Path, error: type[GroupwiseError] = InputError, *, stream: bool = False) -> BinaryIO:
    """A file, opened to be read; with ``stream`` also a pipe that a shell passes. Anything else is an ``error``."""
    kind = kind_of(path, error)
    is_stream = stream and kind == "named pipe" and str(path).startswith(STREAMS)
    if kind not in (FILE, None) and not is_stream:
        raise error(f"{show_path(path)} is a {kind}, not a file")
    try:
        return open(path, "rb")
    except OSError as reason:
        raise error(f"{show_path(path)} cannot be read: {path_reason(reason)}") from reason


def read_file(
    path: str | Path, error: type[GroupwiseError] = InputError, *, limit: int = 10 * MEGABYTE, stream: bool = False
) -> bytes:
    """The content of a file; an ``error`` names it if it cannot be read or has more than ``limit`` bytes."""
    with open_file(path, error, stream=stream) as file:
        try:
            content = file.read(limit + 1)
        except OSError as reason:
            raise error(f"{show_path(path)} cannot be read: {path_reason(reason)}") from reason
    if len(content) > limit:
        raise error(f"{show_path(path)} has more than {limit // MEGABYTE} MB, which is too large for such a file")
    return content


def check_writable(path: str | Path, error: type[GroupwiseError] = InputError) -> None:
    """Raise ``error`` if a file or folder cannot be created at a path, before hours of work for it."""
    for place in (Path(path), *Path(path).absolute().parents):
        kind = kind_of(place, error)
        if kind is None and os.path.islink(place):
            raise error(f"{show_path(path)} cannot be written: {show_path(place)} is a link to nothing")
        if kind == FOLDER:
            if not os.access(place, os.W_OK | os.X_OK):
                raise error(f"{show_path(path)} cannot be written: {show_path(place)} may not be written to")
            return
        if kind is not None and (kind != FILE or place != Path(path)):
            raise error(f"{show_path(path)} cannot be written: {show_path(place)} is a {kind}")


def show_path(path: str | Path) -> str:
    """A path for a message: in quotes if it has unusual characters, and without its middle if it is very long."""
    text = str(path)
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]}…{text[-SHOWN // 2 :]}"
    return text if text.isprintable() and text else repr(text)


def path_reason(error: BaseException) -> str:
    """Why a path cannot be used: the operating system's words, or what is wrong with its name."""
    if isinstance(error, UnicodeError):
        return "its name is not valid Unicode"
    if isinstance(error, ValueError):
        return "its name contains a NUL character" if "null" in str(error) else error_reason(error)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many files are open; raise the limit (ulimit -n)"
    return error_reason(error)
