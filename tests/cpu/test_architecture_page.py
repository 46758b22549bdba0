"""docs/architecture.md: its tree is made from the layers that test_imports enforces, in the modules' own words."""

import ast

from tests.cpu.test_imports import FILES, LAYERS, PACKAGE
from tests.generated_docs import DOCS, check


def purpose(unit: str) -> str:
    """The first sentence of the module's or package's docstring."""
    module = next(name for name in (f"{PACKAGE}.{unit}", f"{PACKAGE}.{unit}.__init__") if name in FILES)
    text = (ast.get_docstring(ast.parse(FILES[module].read_text())) or "").partition("\n\n")[0].replace("\n", " ")
    return text.partition(". ")[0].removesuffix(".")


def tree() -> str:
    lines = ["| layer | module | what it is |", "|---|---|---|"]
    for number, units in enumerate(LAYERS):
        for unit in sorted(units):
            is_folder = f"{PACKAGE}.{unit}.__init__" in FILES
            folder = "models/" if unit == "models" else f"{unit}/" if is_folder else f"{unit}.py"
            lines.append(f"| {number} | `{folder}` | {purpose(unit).replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def test_every_unit_has_a_purpose():
    assert all(purpose(unit) for units in LAYERS for unit in units)


def test_the_tree_is_as_the_code():
    check("architecture.md", "tests/cpu/test_architecture_page.py", tree())


def test_the_pages_link_to_what_is_there():
    for page in ("architecture.md", "porting.md", "troubleshooting.md", "plans.md"):
        for part in (DOCS / page).read_text().split("](")[1:]:
            target = part.partition(")")[0].partition("#")[0]
            if "://" not in target:
                assert (DOCS / target).resolve().exists(), f"{page} links to {target}"
