"""A function of the user's, from ``module:function`` or ``path/file.py:function``."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from groupwise.errors import ConfigError
from groupwise.rewards.rows import reason_of
from groupwise.rewards.text import excerpt

_helpers: dict[str, Path] = {}  # modules that loaded files brought along, and the folder of each


def load_function(spec: str, *, what: str = "reward") -> Callable[..., Any]:
    """The function that ``spec`` names; after the colon it may be dotted, as in ``file.py:Class.method``.

    A relative path starts at the current directory. A file is imported under a name of its own, and
    again only when it has changed; a module is searched for in the current directory too. Either can import what lies
    in that folder while it is imported itself, but not later: such imports belong at the top of a file.
    """
    origin, colon, attribute = spec.rpartition(":") if isinstance(spec, str) else ("", "", "")
    if not colon or not origin or not all(part.isidentifier() for part in attribute.split(".")):
        raise ConfigError(f"a {what} is given as module:function or path/file.py:function, got {spec!r}")
    where = f"{what} {spec!r}"
    if origin.endswith(".py") or "/" in origin or "\\" in origin:
        module = _from_file(Path(origin).expanduser(), where)
    else:
        module = _from_path(origin, where)
    found: Any = module
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ConfigError(f"{where}: there is no {name!r} in {_describe(found, name, origin)}") from None
    if not callable(found):
        raise ConfigError(f"{where}: {attribute} is not a function but {excerpt(found)} ({type(found).__name__})")
    function: Callable[..., Any] = found
    return function


def _from_file(path: Path, where: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"{where}: {path} is a folder, not a file" if path.is_dir() else f"{where}: no file {path}")
    state = path.stat()
    version = hashlib.sha256(f"{path}|{state.st_mtime_ns}|{state.st_size}".encode()).hexdigest()[:12]
    name = f"_groupwise_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}_{version}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: {path} is not a Python file; its name has to end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importable(path.parent), _explained(where):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_path(name: str, where: str) -> ModuleType:
    with _importable(Path.cwd()), _explained(where):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # it is there, but something it imports is not
            raise ConfigError(
                f"{where}: there is no module {error.name!r} in {Path.cwd()} or on Python's path; "
                "a file is given as path/file.py:function"
            ) from None


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Put the folder on Python's path for a while.

    Two folders may each have a ``helpers.py``. One that came with a file of another folder is therefore hidden
    meanwhile: otherwise the second file would silently get the first one's.
    """
    twice = {
        name
        for name, home in _helpers.items()
        if home != folder and ((folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists())
    }
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in twice}
    for name in hidden:
        del sys.modules[name]
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file) in (folder / f"{name}.py", folder / name / "__init__.py"):
                _helpers.setdefault(name, folder)
        sys.modules.update(hidden)


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Whatever goes wrong in an import is a `ConfigError` in one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise ConfigError(f"{where}: {error.filename or 'its source'}{line}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: its import {reason_of(error)}") from error


def _describe(holder: Any, name: str, origin: str) -> str:
    names = [each for each in dir(holder) if not each.startswith("_") and callable(getattr(holder, each, None))]
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    place = origin if isinstance(holder, ModuleType) else getattr(holder, "__name__", type(holder).__name__)
    return f"{place}{hint} (functions there: {', '.join(names[:12]) or 'none'}{', …' if len(names) > 12 else ''})"
