"""A user's function from ``module:function`` or ``path/file.py:function``, and hashes of its source files."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from groupwise.errors import ConfigError, GroupwiseError, UserCodeError, did_you_mean, nearest_file
from groupwise.paths import FILE, MEGABYTE, kind_of, read_file, user_path
from groupwise.text import excerpt, printable

LARGEST = 10 * MEGABYTE  # of a Python file

_helpers: dict[str, Path] = {}  # modules imported by loaded files, and the folder of each
_loaded: dict[str, str] = {}  # what `load_function` has loaded, and the name of its module
_hashes: dict[str, dict[str, str]] = {}  # of these modules' files, when they were loaded


def load_function(spec: str, *, what: str = "reward") -> Callable[..., Any]:
    """The function that ``spec`` names; it may be dotted after the colon, as in ``file.py:Class.method``.

    Paths and modules are looked for from the current directory. A file is imported again only after a change. It can
    import modules of its folder at its top, but not later, inside functions.
    """
    origin, colon, attribute = spec.rpartition(":") if isinstance(spec, str) else ("", "", "")
    if not colon or not origin or not all(part.isidentifier() for part in attribute.split(".")):
        hint = _function_hint(spec) if isinstance(spec, str) and not colon and names_file(spec) else ""
        given = excerpt(spec, 200)
        raise ConfigError(f"a {what} is given as module:function or path/file.py:function, got {given}{hint}")
    where = f"{what} {excerpt(spec, 200)}"
    is_file = origin.endswith(".py") or "/" in origin or "\\" in origin
    module = _import_file(user_path(origin), where) if is_file else _import_module(origin, where)
    _loaded[spec] = module.__name__
    if module.__name__ not in _hashes:
        _hashes[module.__name__] = _module_hashes(module)
    function: Any = module
    for name in attribute.split("."):
        if not hasattr(function, name):
            raise ConfigError(f"{where}: there is no {name!r} in {_describe(function, name, origin)}")
        function = getattr(function, name)
    if not callable(function):
        raise ConfigError(f"{where}: {attribute} is not a function but {excerpt(function)} ({type(function).__name__})")
    return function  # type: ignore[no-any-return]


@contextmanager
def failures_named(where: str, *, is_ours: Callable[[BaseException], bool] = lambda error: False) -> Iterator[None]:
    """Within this block, a failure of a user's code is a `UserCodeError` that names it; SystemExit is one, too.

    Errors of groupwise, Ctrl-C, and errors that the caller handles (``is_ours``) are raised unchanged.
    """
    try:
        yield
    except (GroupwiseError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if is_ours(error):
            raise
        raise UserCodeError(f"{where} {describe_failure(error)}") from error


def guarded(function: Callable[..., Any], where: str) -> Callable[..., Any]:
    """A user's function with its failures named, see `failures_named`."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with failures_named(where):
            return function(*arguments, **options)

    return call


def source_hashes(function: str | Callable[..., Any]) -> dict[str, str]:
    """Hashes of the file of a function and of the modules in its folder that it imports, by their paths.

    function: what `load_function` was given, with the hashes of that time, or the function itself. A function that is
    defined in a script or a notebook is hashed alone, as the rest of such a file may change. One of an installed
    package has the package's version; one of groupwise, or whose source is not known, has nothing.
    """
    if isinstance(function, str):
        return _hashes.get(_loaded.get(function, ""), {})
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(getattr(inner, "__func__", inner))
    if not inspect.isroutine(inner) and not isinstance(inner, type):
        inner = type(inner)
    name = getattr(inner, "__module__", None) or ""
    if name == "__main__":
        try:
            source = textwrap.dedent(inspect.getsource(inner))
        except (OSError, TypeError, IndentationError):
            return {}
        return {inner.__qualname__: _hash(source.encode())}
    return _module_hashes(sys.modules[name]) if name in sys.modules else {}


def _module_hashes(module: ModuleType) -> dict[str, str]:
    package = module.__name__.partition(".")[0]
    if package == "groupwise" or getattr(module, "__file__", None) is None:
        return {}
    file = Path(str(module.__file__)).resolve()
    if file.is_relative_to(sysconfig.get_path("stdlib")) or {"site-packages", "dist-packages"} & set(file.parts):
        names = [package, *importlib.metadata.packages_distributions().get(package, ())]
        versions = (_version(name) for name in names)
        return {package: next(filter(None, versions), sys.version.split()[0])}
    hashes: dict[str, str] = {}
    files = [file]
    for path in files:  # grows
        try:
            content = path.read_bytes()
        except OSError:
            continue
        hashes[str(path)] = _hash(content)
        files += dict.fromkeys(
            other for other in _imported_files(content, path, module.__package__ or "") if other not in files
        )
    return hashes


def _imported_files(content: bytes, path: Path, package: str) -> Iterator[Path]:
    """The files of modules in a file's folder that it imports, wherever in the file."""
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level <= 1:
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
        for name in names:
            parts = name.removeprefix(f"{package}.").split(".")
            for length in range(1, len(parts) + 1):
                module = path.parent.joinpath(*parts[:length])
                candidates = (module.parent / f"{module.name}.py", module / "__init__.py")
                yield from (candidate for candidate in candidates if candidate.is_file())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _hash(source: bytes) -> str:
    """A hash of source code that does not depend on its line endings."""
    return hashlib.sha256(source.replace(b"\r\n", b"\n")).hexdigest()[:16]


def describe_failure(error: BaseException) -> str:
    """Why a user's code failed, with the line of its file: ``raised KeyError: 'a' (rewards.py, line 12)``."""
    text = printable(str(error))
    reason = f"raised {type(error).__name__}" + (f": {text if len(text) <= 300 else text[:299] + '…'}" if text else "")
    folders = ("rewards", "training", "evaluate", "environments", "conversations")
    ours = [str(Path(__file__).parent / folder) for folder in folders]
    callers = (__file__, *ours, importlib.__file__, contextlib.__file__, "<frozen importlib")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(callers)]
    if frames:  # the error may come from deep inside a library; the last line of the user's own file says more
        line = [frame for frame in frames if frame.filename == frames[0].filename][-1]
        reason += f" ({Path(line.filename).name}, line {line.lineno})"
    return reason


def _import_file(path: Path, where: str) -> ModuleType:
    try:
        kind = kind_of(path, ConfigError)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    path = path.resolve()
    if kind != FILE:
        raise ConfigError(f"{where}: {_missing_file(path, kind)}")
    state = path.stat()
    if state.st_size > LARGEST:
        raise ConfigError(f"{where}: {path} has more than {LARGEST // MEGABYTE} MB, which is too large for Python code")
    file = f"{path}|{state.st_mtime_ns}|{state.st_size}".encode("utf-8", "backslashreplace")
    version = hashlib.sha256(file).hexdigest()[:12]
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
        return os.path.exists(folder / f"{name}.py") or os.path.exists(folder / name / "__init__.py")

    clashing = {name for name, home in _helpers.items() if home != folder and has(name)}
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in clashing}
    for name in hidden:
        del sys.modules[name]
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    except (ConfigError, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise ConfigError(f"{where}: {error.filename or 'its source'}{line}: {error.msg}") from error
    except BaseException as error:  # SystemExit, too
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
    return spec.endswith(".py") or (bool(spec) and os.path.isfile(user_path(f"{spec}.py")))


def _function_hint(spec: str) -> str:
    """The functions of a file that is named without one; the file is not run."""
    file = spec if spec.endswith(".py") else f"{spec}.py"
    path = user_path(file)
    try:
        kind = kind_of(path, ConfigError)
        if kind != FILE:
            return f"; {_missing_file(path, kind)}"
        definitions = ast.parse(read_file(path, ConfigError, limit=LARGEST)).body
    except (ConfigError, SyntaxError, ValueError, RecursionError, MemoryError):  # reported once the function is named
        return f"; write {file}:function" if len(file) < 200 else ""
    functions = [node.name for node in definitions if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = [name for name in functions if not name.startswith("_")]
    if len(names) == 1:
        return f"; did you mean {f'{file}:{names[0]}'!r}?"
    return f"; write {file}:function (functions there: {_listed(names)})"


def _missing_file(path: Path, kind: str | None) -> str:
    if kind is not None:
        return f"{path} is a {kind}, not a file"
    nearest = nearest_file(path.name, [file.name for file in path.parent.glob("*.py")])
    return f"there is no file {path}{f'; did you mean {nearest}?' if nearest else ''}"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:12]) or 'none'}{', …' if len(names) > 12 else ''}"
