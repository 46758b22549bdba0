"""The layering: imports point down only, importing does nothing, and heavy modules stay where they belong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "fastdeploy_fusion"

# From the ground up. A module may import from its own layer and from those below; no cycles inside a layer.
LAYERS = [
    {"errors", "config", "env", "faults", "sites", "policy", "tuned", "deadline", "topology", "metrics", "hardware"}
    | {"remedies"},
    {"launch", "channel", "groups", "partial", "reference", "host_values"},
    {"backends"},
    {"probe", "self_test", "opening", "workspace", "ledger", "fusion", "parallel", "forecast", "diagnosis"},
    {"layers"},
    {"checkpoint", "weights", "tokenizer", "integrations", "models", "tuning"},
    {"serve"},
    {"supervise", "cli", "__main__"},
    {"__init__"},  # the public names, each imported when first asked for
]
WITHOUT_PADDLE = {"__init__", "__main__", "cli", "launch", "supervise", *LAYERS[0]}
TYPES_ONLY = "TYPE_CHECKING"
ONLY_IN_FLASHINFER = ("flashinfer", "torch", "tvm_ffi")


def files():
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        yield PACKAGE + "." + ".".join(path.relative_to(ROOT / PACKAGE).with_suffix("").parts), path
    for path in sorted((ROOT / "models").rglob("*.py")):
        yield f"{PACKAGE}.models." + ".".join(path.relative_to(ROOT / "models").with_suffix("").parts), path


FILES = dict(files())


def unit_of(module):
    """The name in LAYERS of a module: the part below the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(module, path):
    """(imported module, at import time?) for every import statement, relative ones resolved."""
    package = module.split(".")[:-1]
    tree = ast.parse(path.read_text())
    in_functions = ids_below(tree, lambda node: isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    for_types_only = ids_below(tree, lambda node: isinstance(node, ast.If) and ast.unparse(node.test) == TYPES_ONLY)
    for node in ast.walk(tree):
        if id(node) in for_types_only:
            continue
        at_import = id(node) not in in_functions
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, at_import
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                yield (name if is_module(name) else origin), at_import


def ids_below(tree, matches):
    return {id(node) for top in ast.walk(tree) if matches(top) for node in ast.walk(top)}


def is_module(name):
    return name in FILES or f"{name}.__init__" in FILES


def layer_of(unit):
    found = [number for number, units in enumerate(LAYERS) if unit in units]
    assert found, f"{unit} has no place in LAYERS of tests/cpu/test_imports.py: decide where it belongs"
    return found[0]


def edges():
    for module, path in FILES.items():
        for target, at_import in imports_of(module, path):
            if target.split(".")[0] == PACKAGE:
                yield module, target, at_import


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module):
    for target, _ in imports_of(module, FILES[module]):
        if target.split(".")[0] != PACKAGE:
            continue
        here, there = unit_of(module), unit_of(target)
        if here == "__init__" and module == f"{PACKAGE}.__init__":
            continue
        assert layer_of(there) <= layer_of(here), f"{module} imports {target}, which lies above it"
        assert there != "models" or here in ("models", "cli"), f"{module} imports {target}: only cli may"


def test_no_cycles_at_import_time():
    graph = {}
    for module, target, at_import in edges():
        if at_import and target != PACKAGE:
            name = target if target in FILES else f"{target}.__init__"
            graph.setdefault(module, set()).add(name)
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            path.append(module)
            for target in sorted(graph.get(module, ())):
                visit(target)
            done.add(path.pop())

    for module in sorted(graph):
        visit(module)


@pytest.mark.parametrize("module", FILES)
def test_heavy_modules_stay_where_they_belong(module):
    for target, at_import in imports_of(module, FILES[module]):
        top = target.split(".")[0]
        if top in ONLY_IN_FLASHINFER:
            assert module.startswith(f"{PACKAGE}.backends.flashinfer"), f"{module} imports {top}"
            assert not at_import, f"{module} imports {top} when it is imported"
        if top in ("paddle", "numpy") and at_import:
            assert unit_of(module) not in WITHOUT_PADDLE, f"{module} imports {top} when it is imported"
        assert top != "tools" and top != "tests", f"{module} imports {top}"


def test_nothing_imports_tools():
    for path in sorted((ROOT / "tests").rglob("*.py")):
        assert not any(target.split(".")[0] == "tools" for target, _ in imports_of("tests.x", path)), path.name


# Statements that may stand at module level: everything else would do something when imported.
HARMLESS = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
)


@pytest.mark.parametrize("module", FILES)
def test_importing_does_nothing(module):
    for node in ast.parse(FILES[module].read_text()).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        guard = isinstance(node, ast.If) and ast.unparse(node.test) in ("__name__ == '__main__'", TYPES_ONLY)
        assert docstring or guard or isinstance(node, HARMLESS), (
            f"{module}, line {node.lineno}: {ast.unparse(node)[:80]!r} runs when the module is imported"
        )


def test_the_package_and_the_command_line_load_without_paddle():
    code = (
        "import sys, fastdeploy_fusion, fastdeploy_fusion.cli, fastdeploy_fusion.supervise; "
        "print([m for m in ('paddle', 'numpy', 'torch', 'flashinfer', 'tokenizers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True).stdout == "[]\n"
