"""Reads a script with TRL's `GRPOTrainer` without running it: which arguments its config and its trainer get.

Values are known if they are literals, constants assigned once, or simple expressions of these (arithmetic, f-strings,
`dict(…)`, `os.path.join`, torch dtypes). Everything else is reported as not known, with its line and its text. Nothing
of the script is executed or imported.
"""

from __future__ import annotations

import ast
import dataclasses
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from groupwise.errors import ConfigError, shorten
from groupwise.integrations.trl.config import GRPOConfig
from groupwise.paths import read_file, show_path

CONFIG, TRAINER, DROP_IN = "GRPOConfig", "GRPOTrainer", "groupwise.trl"
TRAINER_ARGUMENTS = (
    *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    *("reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config", "tools"),
    *("rollout_func", "environment_factory"),
)
PARSERS = ("TrlParser", "HfArgumentParser")
FOLLOWED = ("LoraConfig", "load_dataset")  # calls whose arguments are of interest too
KNOWN_NAMES = (CONFIG, TRAINER, *PARSERS, *FOLLOWED)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.With, ast.AsyncWith, ast.Match)
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
    imports: tuple[str, ...]  # the lines that import `GRPOConfig` and `GRPOTrainer` from the drop-in


def read_script(path: str | Path) -> Script:
    """The script in a file; an error if it is not one with exactly one `GRPOTrainer`."""
    path = Path(path)
    source = read_file(path, ConfigError)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error) or "it is nested too deeply"
        raise ConfigError(f"{show_path(path)}{line}: not valid Python: {reason}") from error
    try:
        return _ScriptReader(path, tree).read()
    except RecursionError:
        raise ConfigError(f"{show_path(path)} is nested too deeply to be read") from None


class _ScriptReader:
    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path, self.tree = path, tree
        self.parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
        self.imports = dict(self._imports())
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
        # By the function or module that assigns them. None: more than once, or in a branch.
        self.assigned: dict[tuple[ast.AST, str], ast.expr | None] = {}
        self._assignments()

    def read(self) -> Script:
        trainers = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and self._is_trainer(node)]
        if len(trainers) != 1:
            raise ConfigError(self._trainer_problem([node.lineno for node in trainers]))
        (node,) = trainers
        trainer = self._call(node, TRAINER_ARGUMENTS)
        config, parser = self._config(self._argument(node, "args", TRAINER_ARGUMENTS.index("args")))
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

    def _trainer_problem(self, lines: list[int]) -> str:
        where = show_path(self.path)
        if lines:
            listed = ", ".join(map(str, sorted(lines)))
            return f"{where} makes {len(lines)} trainers (lines {listed}); give a script that makes one {TRAINER}"
        others = sorted(name for name in self.imports.values() if name.endswith("Trainer") and name != TRAINER)
        found = f"; it imports {', '.join(others)}" if others else ""
        return f"{where} is not a script with TRL's {TRAINER}: it calls none{found}"

    # -- names -------------------------------------------------------------------------------------------------------

    def _imports(self) -> Iterator[tuple[str, str]]:
        """Names of the script, and what they stand for: of TRL's classes the bare name, of others the dotted one."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    yield alias.asname or first, alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    full = alias.name if alias.name in KNOWN_NAMES else f"{node.module or ''}.{alias.name}"
                    yield alias.asname or alias.name, full

    def name_of(self, node: ast.AST) -> str | None:
        """What a name or a dotted name stands for; `trl.GRPOConfig` is `GRPOConfig`."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        first = self.imports.get(node.id, node.id)
        name = ".".join([first, *reversed(parts)])
        last = name.rpartition(".")[2]
        return last if last in KNOWN_NAMES else name

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

    # -- assignments -------------------------------------------------------------------------------------------------

    def _assignments(self) -> None:
        for node in ast.walk(self.tree):
            targets: Sequence[ast.expr] = ()
            value: ast.expr | None = None
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
                targets, value = [node.target], node.value
            elif isinstance(node, (ast.AugAssign, ast.For, ast.AsyncFor, ast.comprehension)):
                targets = [node.target]
            elif isinstance(node, ast.arg):  # of a function: anything
                self._assign(node, node.arg, None)
            elif isinstance(node, ast.Global):
                for name in node.names:
                    self.assigned[self.tree, name] = None
            for target in targets:
                if isinstance(target, ast.Name):
                    self._assign(node, target.id, None if self._in_branch(node) else value)
                elif isinstance(target, (ast.Tuple, ast.List)):
                    for part in ast.walk(target):
                        if isinstance(part, ast.Name):
                            self._assign(node, part.id, value if isinstance(value, ast.Call) else None)

    def _assign(self, node: ast.AST, name: str, value: ast.expr | None) -> None:
        place = self._scope(node), name
        self.assigned[place] = None if place in self.assigned else value

    def _scope(self, node: ast.AST) -> ast.AST:
        """The function, class or module that a line belongs to."""
        while not isinstance(node := self.parents.get(node, self.tree), (*FUNCTIONS, ast.ClassDef, ast.Module)):
            pass
        return node

    def _assignment(self, name: ast.Name) -> ast.expr | None:
        """What a name was assigned, in its function or around it; None if that is not known."""
        scope: ast.AST = name
        while scope is not self.tree:
            scope = self._scope(scope)
            if (scope, name.id) in self.assigned:
                return self.assigned[scope, name.id]
        return None

    def _made_by(self, node: ast.expr | None) -> ast.Call | None:
        """The call whose result an expression is, by itself or by its name."""
        made = self._assignment(node) if isinstance(node, ast.Name) else node
        return made if isinstance(made, ast.Call) else None

    def _in_branch(self, node: ast.AST) -> bool:
        while (node := self.parents.get(node)) is not None:  # type: ignore[assignment]
            if isinstance(node, BRANCHES) and "__name__" not in ast.unparse(getattr(node, "test", ast.Constant(0))):
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
            unpacked = self._value(keyword.value)
            if unpacked.known and isinstance(unpacked.value, dict):
                for name, value in unpacked.value.items():
                    call.arguments[str(name)] = ScriptValue(repr(value), unpacked.line, value)
            else:
                call.unread.append(unpacked)
        return call

    def _argument(self, node: ast.Call, name: str, position: int) -> ast.expr | None:
        for keyword in node.keywords:
            if keyword.arg == name:
                return keyword.value
        return node.args[position] if len(node.args) > position else None

    def _config(self, node: ast.expr | None) -> tuple[ScriptCall | None, str | None]:
        """The call that makes the trainer's config, or the parser that does."""
        made = self._made_by(node)
        name = "" if made is None else self.name_of(made.func) or ""
        if made is None or (name != CONFIG and name not in self.configs):
            return None, self._parser()
        call = self._call(made, [entry.name for entry in dataclasses.fields(GRPOConfig)])
        call.own = self.configs.get(name, frozenset())
        for assignment in ast.walk(self.tree):
            if isinstance(assignment, ast.Assign) and len(assignment.targets) == 1:
                self._set_attribute(call, made, assignment, assignment.targets[0])
        return call, None

    def _set_attribute(self, call: ScriptCall, made: ast.Call, node: ast.Assign, target: ast.expr) -> None:
        """``args.beta = 0.04`` after the config was made."""
        if isinstance(target, ast.Attribute) and self._made_by(target.value) is made:
            value = self._value(node.value)
            if self._in_branch(node):
                value = replace(value, value=None, known=False)
            call.arguments[target.attr] = value

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
        elif isinstance(node, ast.Name) and isinstance(made := self._assignment(node), (ast.List, ast.Constant)):
            yield from self._names(made)
        else:
            yield (
                node.value
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
                else (self.name_of(node) or "")
            )

    def _followed(self, node: ast.expr) -> ScriptCall | None:
        made = self._made_by(node)
        return self._call(made, ()) if made is not None and self.name_of(made.func) in FOLLOWED else None

    def _evaluate(self, node: ast.expr, seen: tuple[str, ...]) -> Any:
        def value(part: ast.expr) -> Any:
            return self._evaluate(part, seen)

        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple() | ast.Set():
                return [value(entry) for entry in node.elts]
            case ast.Dict():
                if None in node.keys:
                    raise NotKnown
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
            case ast.IfExp():
                return value(node.body) if value(node.test) else value(node.orelse)
            case ast.Subscript():
                return value(node.value)[value(node.slice)]
            case ast.Name() if node.id not in seen and (known := self._assignment(node)) is not None:
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
