"""A user's function from ``module:function`` or ``path/file.py:function``."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from groupwise.errors import ConfigError, GroupwiseError, did_you_mean, nearest_file
from groupwise.text import excerpt

_helpers: dict[str, Path] = {}  # modules imported by loaded files, and the folder of each


def load_function(spec: str, *, what: str = "reward") -> Callable[..., Any]:
    """The function that ``spec`` names; it may be dotted after the colon, as in ``file.py:Class.method``.

    Paths and modules are looked for from the current directory. A file is imported again only after a change. It can
    import modules of its folder at its top, but not later, inside functions.
    """
    origin, colon, attribute = spec.rpartition(":") if isinstance(spec, str) else ("", "", "")
    if not colon or not origin or not all(part.isidentifier() for part in attribute.split(".")):
        hint = _function_hint(spec) if isinstance(spec, str) and not colon and names_file(spec) else ""
        raise ConfigError(f"a {what} is given as module:function or path/file.py:function, got {spec!r}{hint}")
    where = f"{what} {spec!r}"
    is_file = origin.endswith(".py") or "/" in origin or "\\" in origin
    function: Any = _import_file(Path(origin).expanduser(), where) if is_file else _import_module(origin, where)
    for name in attribute.split("."):
        if not hasattr(function, name):
            raise ConfigError(f"{where}: there is no {name!r} in {_describe(function, name, origin)}")
        function = getattr(function, name)
    if not callable(function):
        raise ConfigError(f"{where}: {attribute} is not a function but {excerpt(function)} ({type(function).__name__})")
    return function  # type: ignore[no-any-return]


def describe_failure(error: BaseException) -> str:
    """Why a user's code failed, with the line of its file: ``raised KeyError: 'a' (rewards.py, line 12)``."""
    text = str(error)
    reason = f"raised {type(error).__name__}" + (f": {text if len(text) <= 300 else text[:299] + '…'}" if text else "")
    ours = [str(Path(__file__).parent / folder) for folder in ("rewards", "training", "evaluate")]
    callers = (__file__, *ours, importlib.__file__, contextlib.__file__, "<frozen importlib")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(callers)]
    if frames:  # the error may come from deep inside a library; the last line of the user's own file says more
        line = [frame for frame in frames if frame.filename == frames[0].filename][-1]
        reason += f" ({Path(line.filename).name}, line {line.lineno})"
    return reason


@contextmanager
def failures_named(what: str) -> Iterator[None]:
    """Within this block, an error of a user's function becomes a sentence that names it. Errors of groupwise, and
    running out of memory, which may be retried, pass unchanged."""
    try:
        yield
    except GroupwiseError:
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        raise ConfigError(f"{what} {describe_failure(error)}") from error


def _import_file(path: Path, where: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"{where}: {_missing_file(path)}")
    state = path.stat()
    version = hashlib.sha256(f"{path}|{state.st_mtime_ns}|{state.st_size}".encode()).hexdigest()[:12]
    name = f"_groupwise_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}_{version}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: {path} is not a Python file; its name has to end in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _importable(path.parent, where):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str, where: str) -> ModuleType:
    with _importable(Path.cwd(), where):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists, but something that it imports does not
            reason = f"there is no module {error.name!r} in {Path.cwd()} or on Python's path"
            raise ConfigError(f"{where}: {reason}; a file is given as path/file.py:function") from None


@contextmanager
def _importable(folder: Path, where: str) -> Iterator[None]:
    """Put the folder on Python's path during an import, and turn whatever goes wrong into a `ConfigError`.

    Two folders may each have a ``helpers.py``: modules that came with files of another folder are hidden meanwhile.
    """

    def has(name: str) -> bool:
        return (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists()

    clashing = {name for name, home in _helpers.items() if home != folder and has(name)}
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in clashing}
    for name in hidden:
        del sys.modules[name]
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    except ConfigError:
        raise
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise ConfigError(f"{where}: {error.filename or 'its source'}{line}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: its import {describe_failure(error)}") from error
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file) in (folder / f"{name}.py", folder / name / "__init__.py"):
                _helpers.setdefault(name, folder)
        sys.modules.update(hidden)


def _describe(holder: Any, name: str, origin: str) -> str:
    values = {entry: getattr(holder, entry, None) for entry in dir(holder) if not entry.startswith("_")}
    module = holder.__name__ if isinstance(holder, ModuleType) else None
    place = origin if module else getattr(holder, "__name__", type(holder).__name__)
    near = did_you_mean(name, [entry for entry, value in values.items() if callable(value)])
    functions = [entry for entry, value in values.items() if callable(value) and _is_function(value, module)]
    return f"{place}{near} (functions there: {_listed(functions)})"


def _is_function(value: Any, module: str | None) -> bool:
    """Whether a callable is a function that the module defines, or an object that can be called; not a class."""
    if isinstance(value, type) or type(value).__module__ == "typing":
        return False
    return module is None or not inspect.isroutine(value) or value.__module__ == module


def names_file(spec: str) -> bool:
    """Whether a name without a colon is that of a Python file, with or without its suffix."""
    return spec.endswith(".py") or (bool(spec) and Path(f"{spec}.py").expanduser().is_file())


def _function_hint(spec: str) -> str:
    """The functions of a file that is named without one; the file is not run."""
    file = spec if spec.endswith(".py") else f"{spec}.py"
    path = Path(file).expanduser()
    if not path.is_file():
        return f"; {_missing_file(path)}"
    try:
        definitions = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # reported once the function is named
        return f"; write {file}:function"
    functions = [node.name for node in definitions if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = [name for name in functions if not name.startswith("_")]
    if len(names) == 1:
        return f"; did you mean {f'{file}:{names[0]}'!r}?"
    return f"; write {file}:function (functions there: {_listed(names)})"


def _missing_file(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder, not a file"
    nearest = nearest_file(path.name, [file.name for file in path.parent.glob("*.py")])
    return f"there is no file {path}{f'; did you mean {nearest}?' if nearest else ''}"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:12]) or 'none'}{', …' if len(names) > 12 else ''}"
