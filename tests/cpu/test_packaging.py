"""The wheel: the package, the models under its name, and nothing else at the top of site-packages."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that no build folder appears in the checkout and no stale one gets into the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("fastdeploy_fusion", "models", "tests", "tools"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "data"))
    for name in ("setup.py", "README.md", "LICENSE"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    done = subprocess.run(command, cwd=source, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


def read(wheel, ending):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(ending))
        return archive.read(name).decode()


def test_what_lands_in_site_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"fastdeploy_fusion"}


def test_every_source_file_is_there(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {path.relative_to(ROOT) for path in (ROOT / "fastdeploy_fusion").rglob("*.py")}
    models = {Path("fastdeploy_fusion", path.relative_to(ROOT)) for path in (ROOT / "models").rglob("*.py")}
    assert names == {str(path) for path in package | models} | {"fastdeploy_fusion/py.typed"}
    assert "fastdeploy_fusion/models/__init__.py" in names


def test_metadata(wheel):
    metadata = read(wheel, ".dist-info/METADATA")
    assert "Requires-Python: >=3.10\n" in metadata
    needs = re.findall(r"^Requires-Dist: ([\w-]+)([^;\n]*)$", metadata, re.MULTILINE)
    assert {name for name, _ in needs} >= {"paddlepaddle", "numpy", "safetensors", "tokenizers", "tqdm"}
    assert ("paddlepaddle", ">=3.3") in needs
    assert set(re.findall(r"^Provides-Extra: (\w+)$", metadata, re.MULTILINE)) == {"gpu", "serve", "test"}
    assert "fastdeploy-fusion = fastdeploy_fusion.cli:main" in read(wheel, ".dist-info/entry_points.txt")
    assert "Apache License" in read(wheel, "LICENSE")


def test_the_version_is_the_packages(wheel):
    import fastdeploy_fusion

    assert f"-{fastdeploy_fusion.__version__}-" in wheel.name


def test_an_installed_wheel_imports_from_anywhere(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import sys, importlib.util as u; sys.path.insert(0, sys.argv[1]); import fastdeploy_fusion as f; "
        "print(f.__file__, u.find_spec('fastdeploy_fusion.models').origin, u.find_spec('models'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(site)], cwd=tmp_path, text=True, capture_output=True, check=True
    )
    package = site / "fastdeploy_fusion"
    assert done.stdout.split() == [str(package / "__init__.py"), str(package / "models" / "__init__.py"), "None"]


def test_the_top_level_of_the_repository():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    allowed = {"setup.py", "fastdeploy_fusion", "models", "tests", "tools", "docs", "README.md", "LICENSE"}
    assert {name for name in top if not name.startswith(".")} <= allowed
