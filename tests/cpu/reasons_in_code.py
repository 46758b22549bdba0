"""Every text in the code that can become the reason for the plain path or a failed start-up, read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "fastdeploy_fusion"
MODULES = ("probe", "opening", "workspace", "self_test", "deadline", "topology", "faults", "channel", "groups")
FILES = (*sorted((ROOT / "backends").rglob("*.py")), *(ROOT / f"{name}.py" for name in MODULES))
FUNCTIONS = ("refuse", "why_not", "compare", "too_small", "find_way")
NAMES = ("refusal", "reason", "_REASON", "unavailable", "error")
CALLS = ("UnknownApi", "_break")
COMPOSED = {"0: 0", "rank 0: 0", "0 failed: 0: 0"}
"""A rank or a step in front of another text, which has a remedy of its own."""
EXAMPLES = {"0: 0 (0)": "cuInit: no CUDA-capable device is detected (100)"}
"""Texts whose words all come from elsewhere."""


def reasons() -> Iterator[tuple[str, str]]:
    """``(place, text)``, each text once; what an f-string fills in is ``0``."""
    seen = set(COMPOSED)
    for file in FILES:
        for text, line in _texts(ast.parse(file.read_text())):
            text = EXAMPLES.get(text, text)
            if text and text not in seen:
                seen.add(text)
                yield f"{file.relative_to(ROOT)}:{line}", text


def _texts(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        for value in _values(node):
            for text in _strings(value):
                yield text, getattr(node, "lineno", 0)


def _values(node: ast.AST) -> Iterator[ast.AST | None]:
    """The expressions in ``node`` that are reasons."""
    if isinstance(node, ast.FunctionDef) and any(part in node.name for part in FUNCTIONS):
        yield from (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return))
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(map(_names_a_reason, targets)):
            yield node.value
    elif isinstance(node, ast.Dict):
        keys = (key.value if isinstance(key, ast.Constant) else None for key in node.keys)
        yield from (value for key, value in zip(keys, node.values, strict=True) if key in NAMES)
    elif isinstance(node, ast.keyword) and node.arg in NAMES:
        yield node.value
    elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and not _is_wrong_argument(node.exc):
        yield from node.exc.args[:1]
    elif isinstance(node, ast.Call) and _name(node.func) in CALLS:
        yield from node.args[:1]


def _names_a_reason(target: ast.AST) -> bool:
    if isinstance(target, ast.Subscript):
        return isinstance(target.slice, ast.Constant) and target.slice.value in NAMES
    return _name(target) in NAMES


def _name(node: ast.AST) -> str | None:
    return getattr(node, "id", None) or getattr(node, "attr", None)


def _is_wrong_argument(error: ast.Call) -> bool:
    """A mistake in the caller's program, shown as it is; no reason for anything at run time."""
    return _name(error.func) in ("ValueError", "TypeError")


def _strings(value: ast.AST | None) -> Iterator[str]:
    """The texts that an expression can be."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in value.values)
    elif isinstance(value, ast.IfExp):
        yield from _strings(value.body)
        yield from _strings(value.orelse)
    elif isinstance(value, ast.BoolOp):
        for part in value.values:
            yield from _strings(part)
    elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        yield "".join(next(_strings(side), "0") for side in (value.left, value.right))
    elif isinstance(value, ast.Tuple):
        for part in value.elts:
            yield from _strings(part)
