"""Reads a script with TRL's `GRPOTrainer` without running it: which arguments its config and its trainer get.

Values are known if they are literals, constants assigned once, or simple expressions of these (arithmetic, f-strings,
`dict(…)`, `os.path.join`, torch dtypes). Everything else is reported as not known, with its line and its text. Nothing
of the script is executed or imported.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from groupwise.errors import ConfigError, shorten
from groupwise.integrations.trl.config import GRPOConfig
from groupwise.integrations.trl.script_names import (
    CONFIG,
    COPIES,
    FOLLOWED,
    FUNCTIONS,
    PARSERS,
    TRAINER,
    ScriptNames,
    constant_text,
)
from groupwise.paths import read_file, show_path

DROP_IN = "groupwise.trl"
TRAINER_ARGUMENTS = (
    *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    *("reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config", "tools"),
    *("rollout_func", "environment_factory"),
)
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
CALLS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "dict": dict,
    "list": list,
    "len": len,
    "min": min,
    "max": max,
    "Path": lambda *parts: os.path.join(*parts),
    "os.path.join": os.path.join,
}
REPLACES = ("dataclasses.replace", "replace")
MAGIC = re.compile(rb"^(\s*)(?:[\w, ]+=\s*)?(?:[!%]|\?\w).*$|^(\s*)\w[\w.]*\?{1,2}\s*$")  # of a notebook: !pip, %cd, x?
LARGEST = 10**12  # of a computed number
LONGEST = 100_000  # of a computed text or list


class NotKnown(Exception):
    """An expression whose value a reader cannot know."""


@dataclass(frozen=True)
class ScriptValue:
    """An argument: its text and its line; its value if it is known; the names or the call that it refers to."""

    text: str
    line: int
    value: Any = None
    known: bool = True
    names: tuple[str, ...] = ()  # of a name or a list of names and texts
    call: ScriptCall | None = None


@dataclass
class ScriptCall:
    """A call, such as of `GRPOConfig`: its arguments by name, and ``*`` and ``**`` arguments that are not known."""

    function: str
    line: int
    arguments: dict[str, ScriptValue] = field(default_factory=dict)
    unread: list[ScriptValue] = field(default_factory=list)
    own: frozenset[str] = frozenset()  # fields that a class of the script adds to the config


@dataclass
class Script:
    """What a script says about its run. ``parser``: the config's fields come from the command line or from YAML."""

    path: Path
    trainer: ScriptCall
    config: ScriptCall | None
    parser: str | None
    subclass: str | None  # of GRPOTrainer, defined in the script
    guarded: bool  # importing the script does not train
    changed: bool  # it imports groupwise.trl already
    functions: frozenset[str]  # defined at its top
    classes: frozenset[str]
    imports: tuple[str, ...]  # the lines that import `GRPOConfig` and `GRPOTrainer` from the drop-in


def read_script(path: str | Path) -> Script:
    """The script in a file; an error if it is not one with exactly one `GRPOTrainer`."""
    scripts = read_scripts(path)
    if len(scripts) != 1:
        lines = ", ".join(str(script.trainer.line) for script in scripts)
        raise ConfigError(
            f"{show_path(Path(path))} makes {len(scripts)} trainers (lines {lines}); give a script that makes one "
            f"{TRAINER}"
        )
    return scripts[0]


def read_scripts(path: str | Path) -> list[Script]:
    """The script in a file, or in a notebook, once for each `GRPOTrainer` that it makes; an error if it makes none."""
    path = Path(path)
    source = read_file(path, ConfigError)
    try:
        tree = _parse(_notebook_code(source, path) if path.suffix == ".ipynb" else source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error) or "it is nested too deeply"
        raise ConfigError(f"{show_path(path)}{line}: not valid Python: {reason}") from error
    try:
        return _ScriptReader(path, tree).read()
    except RecursionError:
        raise ConfigError(f"{show_path(path)} is nested too deeply to be read") from None


def _notebook_code(source: bytes, path: Path) -> str:
    """The code of a notebook's cells, one after the other."""
    try:
        cells = [cell["source"] for cell in json.loads(source)["cells"] if cell["cell_type"] == "code"]
        return "\n".join("".join(cell) for cell in cells)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{show_path(path)} is not a notebook: it has no list of cells") from error


def _parse(source: bytes | str) -> ast.Module:
    """The lines of a script, without those of a notebook that are no Python, such as ``!pip install trl``."""
    try:
        return ast.parse(source)
    except SyntaxError:
        code = source.encode() if isinstance(source, str) else source
        lines = [MAGIC.sub(lambda found: (found[1] or found[2] or b"") + b"pass", line) for line in code.split(b"\n")]
        if b"\n".join(lines) == code:
            raise
    return ast.parse(b"\n".join(lines))


class _ScriptReader(ScriptNames):
    def __init__(self, path: Path, tree: ast.Module) -> None:
        super().__init__(tree)
        self.path = path
        self.subclasses = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and any(self.name_of(base) == TRAINER for base in node.bases)
        }
        self.configs = {
            node.name: frozenset(part.target.id for part in node.body if _is_field(part))
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and any(self.name_of(base) == CONFIG for base in node.bases)
        }

    def read(self) -> list[Script]:
        trainers = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and self._is_trainer(node)]
        if not trainers:
            raise ConfigError(self._no_trainer())
        return [self._read(node) for node in sorted(trainers, key=lambda node: (node.lineno, node.col_offset))]

    def _read(self, node: ast.Call) -> Script:
        trainer = self._call(node, TRAINER_ARGUMENTS)
        given = self._argument(node, "args", TRAINER_ARGUMENTS.index("args"))
        config = None if given is None else self._config(given)
        parser = self._parser() if config is None and (given is not None or trainer.unread) else None
        name = self.name_of(node.func)
        return Script(
            path=self.path,
            trainer=trainer,
            config=config,
            parser=parser,
            subclass=name if name in self.subclasses else None,
            guarded=self._is_guarded(node),
            changed=any(isinstance(part, ast.ImportFrom) and part.module == DROP_IN for part in ast.walk(self.tree)),
            functions=frozenset(
                entry.name for entry in self.tree.body if isinstance(entry, (ast.FunctionDef, ast.AsyncFunctionDef))
            ),
            classes=frozenset(entry.name for entry in self.tree.body if isinstance(entry, ast.ClassDef)),
            imports=tuple(self._changed_imports()),
        )

    def _changed_imports(self) -> Iterator[str]:
        """The script's imports of TRL's trainer and config, from the drop-in instead; other names stay in them."""
        modules = {ast.unparse(node.value) for node in ast.walk(self.tree) if _is_drop_in(node)}  # of trl.GRPOConfig
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name == "trl" and (alias.asname or alias.name) in modules:
                        yield f"import {DROP_IN} as {alias.asname or alias.name}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trl":
                names = {alias.name for alias in node.names}
                if names & {CONFIG, TRAINER}:
                    yield ast.unparse(ast.ImportFrom(DROP_IN, node.names, 0))

    def _no_trainer(self) -> str:
        where = show_path(self.path)
        others = sorted(name for name in self.imports.values() if name.endswith("Trainer") and name != TRAINER)
        found = f"; it imports {', '.join(others)}" if others else ""
        return f"{where} is not a script with TRL's {TRAINER}: it calls none{found}"

    def _is_trainer(self, node: ast.Call) -> bool:
        name = self.name_of(node.func)
        return name == TRAINER or name in self.subclasses

    def _is_guarded(self, node: ast.AST) -> bool:
        """Whether the line is inside a function, or below ``if __name__ == "__main__"``."""
        while (node := self.parents.get(node)) is not None:  # type: ignore[assignment]
            if isinstance(node, FUNCTIONS):
                return True
            if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
                return True
        return False

    # -- calls -------------------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call, positions: Sequence[str]) -> ScriptCall:
        call = ScriptCall(self.name_of(node.func) or "", node.lineno)
        for number, argument in enumerate(node.args):
            if number < len(positions) and not isinstance(argument, ast.Starred):
                call.arguments[positions[number]] = self._value(argument)
            elif not positions:
                call.arguments[f"{number}"] = self._value(argument)
            else:
                call.unread.append(self._value(argument))
        for keyword in node.keywords:
            if keyword.arg is not None:
                call.arguments[keyword.arg] = self._value(keyword.value)
                continue
            if (entries := self.entries_of(keyword.value)) is None:
                call.unread.append(self._value(keyword.value))
                continue
            for name, value in entries.items():
                unknown = ScriptValue(f"{ast.unparse(keyword.value)}[{name!r}]", node.lineno, None, False)
                call.arguments[name] = unknown if value is None else self._value(value)
        return call

    def _argument(self, node: ast.Call, name: str, position: int) -> ast.expr | None:
        for keyword in node.keywords:
            if keyword.arg == name:
                return keyword.value
            if keyword.arg is None and (found := (self.entries_of(keyword.value) or {}).get(name)) is not None:
                return found
        return node.args[position] if len(node.args) > position else None

    def _config(self, node: ast.expr, depth: int = 0) -> ScriptCall | None:
        """The call that makes a config, with what is changed in it afterwards; None if it is made in another way."""
        made = self.made_by(node)
        name = "" if made is None else self.name_of(made.func) or ""
        if made is None or depth > 20:
            return None
        call: ScriptCall | None = None
        if name == CONFIG or name in self.configs:
            call = self._call(made, [entry.name for entry in dataclasses.fields(GRPOConfig)])
            call.own = self.configs.get(name, frozenset())
        elif (name in REPLACES or name in COPIES) and made.args:
            call = self._config(made.args[0], depth + 1)
            if call is not None:
                changes = self._call(ast.Call(made.func, [], made.keywords, lineno=made.lineno, col_offset=0), ())
                call.arguments |= changes.arguments
                call.unread += changes.unread
        elif (returned := self._returned(name)) is not None:
            call = self._config(returned, depth + 1)
        if call is not None:
            self._add_changes(call, made)
        return call

    def _returned(self, function: str) -> ast.expr | None:
        """What a function of the script returns, if that is written once."""
        defined = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef) and node.name == function]
        if len(defined) != 1:
            return None
        returns = [
            node for node in ast.walk(defined[0]) if isinstance(node, ast.Return) and self.scope_of(node) is defined[0]
        ]
        return returns[0].value if len(returns) == 1 else None

    def _add_changes(self, call: ScriptCall, made: ast.Call) -> None:
        """``args.beta = 0.04`` and ``setattr(args, "beta", 0.04)`` after the config was made."""
        for node in ast.walk(self.tree):
            target: ast.expr | None = None
            name, value = "", None
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                field = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(field, ast.Attribute):
                    target, name, value = field.value, field.attr, node.value
            elif isinstance(node, ast.Call) and self.name_of(node.func) == "setattr" and len(node.args) == 3:
                target, key, value = node.args
                name = constant_text(key) or ""
            if target is None or value is None or self.made_by(target) is not made:
                continue
            read = self._value(value)
            if not name:
                call.unread.append(read)
                continue
            if not self.holds(self.block_of(node), made) or isinstance(node, ast.AugAssign):
                read = replace(read, value=None, known=False)
            call.arguments[name] = read

    def _parser(self) -> str | None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and self.name_of(node.func) in PARSERS:
                return self.name_of(node.func)
        return None

    # -- values ------------------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr) -> ScriptValue:
        text, names, call = shorten(ast.unparse(node), 100), tuple(self._names(node)), self._followed(node)
        try:
            return ScriptValue(text, node.lineno, self._evaluate(node, ()), names=names, call=call)
        except (NotKnown, ArithmeticError, ValueError, TypeError, LookupError):
            return ScriptValue(text, node.lineno, None, False, names, call)

    def _names(self, node: ast.expr) -> Iterator[str]:
        if isinstance(node, (ast.List, ast.Tuple)):
            for entry in node.elts:
                yield from self._names(entry) if not isinstance(entry, (ast.List, ast.Tuple)) else ("",)
        elif isinstance(node, ast.Name) and isinstance(made := self.assigned_to(node), (ast.List, ast.Constant)):
            yield from self._names(made)
        else:
            yield (
                node.value
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
                else (self.name_of(node) or "")
            )

    def _followed(self, node: ast.expr) -> ScriptCall | None:
        made = self.made_by(node)
        return self._call(made, ()) if made is not None and self.name_of(made.func) in FOLLOWED else None

    def _evaluate(self, node: ast.expr, seen: tuple[str, ...]) -> Any:
        def value(part: ast.expr) -> Any:
            return self._evaluate(part, seen)

        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple() | ast.Set():
                return [value(entry) for entry in node.elts]
            case ast.Dict() if None in node.keys:
                if (entries := self.entries_of(node)) is None or None in entries.values():
                    raise NotKnown
                return {key: value(entry) for key, entry in entries.items() if entry is not None}
            case ast.Dict():
                return {value(key): value(entry) for key, entry in zip(node.keys, node.values, strict=True) if key}
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.UnaryOp(op=ast.Not()):
                return not value(node.operand)
            case ast.BinOp():
                return self._compute(node.op, value(node.left), value(node.right))
            case ast.JoinedStr():
                return "".join(value(part) for part in node.values)
            case ast.FormattedValue(conversion=-1):
                form = value(node.format_spec) if node.format_spec else ""
                return _limited(format(value(node.value), form if len(form) < 10 else ""))
            case ast.BoolOp(op=ast.And() | ast.Or()):
                for part in node.values:
                    result = value(part)
                    if bool(result) == isinstance(node.op, ast.Or):
                        break
                return result
            case ast.IfExp():
                return value(node.body) if value(node.test) else value(node.orelse)
            case ast.Subscript():
                return value(node.value)[value(node.slice)]
            case ast.Name() if node.id not in seen and (known := self.assigned_to(node)) is not None:
                return self._evaluate(known, (*seen, node.id))
            case ast.Attribute() if (self.name_of(node) or "").startswith("torch."):
                return node.attr
            case ast.Call() if (function := CALLS.get(self._function(node))) is not None:
                arguments = [value(argument) for argument in node.args]
                keywords = {keyword.arg: value(keyword.value) for keyword in node.keywords}
                if None in keywords:
                    raise NotKnown
                return _limited(function(*arguments, **{str(name): entry for name, entry in keywords.items()}))
        raise NotKnown

    def _function(self, node: ast.Call) -> str:
        name = self.name_of(node.func) or ""
        return "Path" if name == "pathlib.Path" else name

    def _compute(self, op: ast.operator, left: Any, right: Any) -> Any:
        numbers = all(isinstance(part, (int, float)) for part in (left, right))
        joined = isinstance(op, ast.Add) and type(left) is type(right) and isinstance(left, (str, list))
        if type(op) not in OPERATORS or not (numbers or joined):
            raise NotKnown
        if numbers and (max(abs(left), abs(right)) > LARGEST or (isinstance(op, ast.Pow) and abs(right) > 30)):
            raise NotKnown
        return _limited(OPERATORS[type(op)](left, right))


def _is_field(node: ast.AST) -> TypeGuard[Any]:
    """Whether a line of a class is the field of a dataclass, such as ``benchmarks: list[str] | None = None``."""
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _is_drop_in(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr in (CONFIG, TRAINER)


def _limited(value: Any) -> Any:
    """The value, unless it is so large that a script would not have meant it."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) > LARGEST:
        raise NotKnown
    if isinstance(value, (str, list, dict)) and len(value) > LONGEST:
        raise NotKnown
    return value
