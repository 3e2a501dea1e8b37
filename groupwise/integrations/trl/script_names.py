"""What the names in a script stand for: imports, assignments, the entries of dicts. Nothing of it is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CONFIG, TRAINER = "GRPOConfig", "GRPOTrainer"
PARSERS = ("TrlParser", "HfArgumentParser")
FOLLOWED = ("LoraConfig", "load_dataset")  # calls whose arguments are of interest too
KNOWN_NAMES = (CONFIG, TRAINER, *PARSERS, *FOLLOWED)
COPIES = ("copy.copy", "copy.deepcopy", "deepcopy")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.Try,
    ast.ExceptHandler,
    ast.With,
    ast.AsyncWith,
    ast.match_case,
)
LOOPS = (ast.For, ast.AsyncFor, ast.While)

_Block = tuple[ast.AST, str]  # a branch or a loop, and which of its lists of lines


@dataclass(frozen=True)
class _Assignment:
    """What a name is assigned in some line; None if it cannot be known."""

    node: ast.AST
    value: ast.expr | None
    block: _Block | None = None  # the branch or loop that it is in

    @property
    def place(self) -> tuple[int, int]:
        return getattr(self.node, "lineno", 0), getattr(self.node, "col_offset", 0)


class ScriptNames:
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
        self.imports = dict(self._imports())
        # By the function or module that assigns them; attributes by their text, such as "self.args".
        self.assigned: dict[tuple[ast.AST, str], list[_Assignment]] = {}
        self.attributes: dict[str, list[_Assignment]] = {}
        self._assignments()

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
            elif isinstance(node, (ast.With, ast.AsyncWith)):
                targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
            elif isinstance(node, ast.arg):  # of a function: anything
                self._assign(node, node.arg, None)
            elif isinstance(node, ast.Global):
                for name in node.names:
                    self.assigned.setdefault((self.tree, name), []).extend([_Assignment(node, None)] * 2)
            for target in targets:
                if isinstance(target, ast.Name):
                    self._assign(node, target.id, value)
                elif isinstance(target, (ast.Tuple, ast.List)):
                    for part in ast.walk(target):
                        if isinstance(part, ast.Name):
                            self._assign(node, part.id, value if isinstance(value, ast.Call) else None)
                elif isinstance(target, ast.Attribute):
                    self.attributes.setdefault(ast.unparse(target), []).append(
                        _Assignment(node, value, self.block_of(node))
                    )

    def _assign(self, node: ast.AST, name: str, value: ast.expr | None) -> None:
        self.assigned.setdefault((self.scope_of(node), name), []).append(_Assignment(node, value, self.block_of(node)))

    def scope_of(self, node: ast.AST) -> ast.AST:
        """The function, class or module that a line belongs to."""
        while not isinstance(node := self.parents.get(node, self.tree), (*FUNCTIONS, ast.ClassDef, ast.Module)):
            pass
        return node

    def assigned_to(self, name: ast.Name) -> ast.expr | None:
        """What a name was assigned, in its function or around it; None if that is not known.

        If it is assigned several times, the last one above counts, where lines run one after the other.
        """
        scope: ast.AST = name
        while scope is not self.tree:
            is_own = scope is name
            scope = self.scope_of(scope)
            if not (found := self.assigned.get((scope, name.id))):
                continue
            if len(found) > 1:
                place = name.lineno, name.col_offset
                above = [entry for entry in found if entry.place < place and not _is_within(name, entry.node)]
                if not is_own or not above or self._in_loop(name) or any(entry.place == (0, 0) for entry in found):
                    return None
                found = [max(above, key=lambda entry: entry.place)]
            return found[0].value if self.holds(found[0].block, name) else None
        return None

    def _in_loop(self, node: ast.AST) -> bool:
        while (node := self.parents.get(node)) is not None and not isinstance(node, FUNCTIONS):  # type: ignore[assignment]
            if isinstance(node, LOOPS):
                return True
        return False

    def made_by(self, node: ast.expr | None) -> ast.Call | None:
        """The call whose result an expression is, by itself, by its name, or as an attribute that is set once."""
        made = self.assigned_to(node) if isinstance(node, ast.Name) else node
        if isinstance(node, ast.Attribute) and len(found := self.attributes.get(ast.unparse(node), [])) == 1:
            made = found[0].value if self.holds(found[0].block, node) else None
            made = self.assigned_to(made) if isinstance(made, ast.Name) else made
        return made if isinstance(made, ast.Call) else None

    def entries_of(self, node: ast.expr, depth: int = 0) -> dict[str, ast.expr | None] | None:
        """The entries of a dict that is unpacked, None for an unknown value; None if its keys are not known."""
        if depth > 20:
            return None
        parts: list[tuple[str | None, ast.expr]] = []
        own: dict[str, ast.expr | None] = {}
        function = self.name_of(node.func) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                text = constant_text(key)
                if key is not None and text is None:
                    return None
                parts.append((text, value))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            parts = [(None, node.left), (None, node.right)]
        elif isinstance(node, ast.Call) and (function == "dict" or function in COPIES):
            parts = [*((None, value) for value in node.args), *((part.arg, part.value) for part in node.keywords)]
        elif isinstance(node, ast.Name) and (made := self.assigned_to(node)) is not None:
            parts = [(None, made)]
        else:
            return None
        for name, value in parts:
            if name is not None:
                own[name] = value
            elif (inner := self.entries_of(value, depth + 1)) is None:
                return None
            else:
                own |= inner
        if isinstance(node, ast.Name) and not self._changed_entries(node, made, own):  # type: ignore[arg-type]
            return None
        return own

    def _changed_entries(self, name: ast.Name, made: ast.expr, entries: dict[str, ast.expr | None]) -> bool:
        """Add what ``name[…] = …`` and ``name.update(…)`` change above; whether all of it can be read."""
        for node in ast.walk(self.tree):
            target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
            more: dict[str, ast.expr | None] | None = {}
            if isinstance(target, ast.Subscript) and self._is_same(target.value, name, made):
                key = constant_text(target.slice)
                more = None if key is None or not isinstance(node, ast.Assign) else {key: node.value}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr not in ("update", "pop", "setdefault", "clear"):
                    continue
                if not self._is_same(node.func.value, name, made):
                    continue
                more = {part.arg: part.value for part in node.keywords if part.arg is not None}
                for value in (*node.args, *(part.value for part in node.keywords if part.arg is None)):
                    inner = self.entries_of(value) if node.func.attr == "update" else None
                    more = None if inner is None or more is None else more | inner
            if more is None:
                return False
            if more:
                entries |= more if self.holds(self.block_of(node), name) else dict.fromkeys(more)
        return True

    def _is_same(self, node: ast.expr, name: ast.Name, made: ast.expr) -> bool:
        above = (getattr(node, "lineno", 0), 0) < (name.lineno, 0)
        return above and isinstance(node, ast.Name) and node.id == name.id and self.assigned_to(node) is made

    def block_of(self, node: ast.AST) -> _Block | None:
        """The innermost lines around a line that may not run, or run several times."""
        return next(self._blocks(node), None)

    def _blocks(self, node: ast.AST) -> Iterator[_Block]:
        while (outer := self.parents.get(node)) is not None:
            if isinstance(outer, BRANCHES) and "__name__" not in ast.unparse(getattr(outer, "test", ast.Constant(0))):
                lists = [name for name, value in ast.iter_fields(outer) if isinstance(value, list) and node in value]
                yield outer, lists[0] if lists else ""
            node = outer

    def holds(self, block: _Block | None, where: ast.AST) -> bool:
        """Whether what is done in a block has been done for certain in a line further down."""
        return block is None or block in self._blocks(where)


def _is_within(node: ast.AST, outer: ast.AST) -> bool:
    return any(part is node for part in ast.walk(outer))


def constant_text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
