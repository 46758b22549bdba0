"""Packaging of fastdeploy_fusion; the only packaging file.

`models/` lies beside the package in the repository and is installed as `fastdeploy_fusion.models`. A link of that name
lies in the package, so that the checkout works as it stands, whatever kind of editable install pip makes.
Packages are listed under the two folders by hand, so nothing called `models`, `tools` or `tests` is ever installed.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
PACKAGE = "fastdeploy_fusion"


def packages() -> list[str]:
    """Names of all installed packages: the package's own, and `models/` under the package's name."""
    found = find_packages(str(ROOT / PACKAGE), exclude=["models", "models.*"])  # the link for runs from the checkout
    own = [PACKAGE] + [f"{PACKAGE}.{name}" for name in found]
    models = [f"{PACKAGE}.models"] + [f"{PACKAGE}.models.{name}" for name in find_packages(str(ROOT / "models"))]
    return own + models


def version() -> str:
    (found,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / PACKAGE / "__init__.py").read_text(), re.MULTILINE)
    return str(found)


def long_description() -> str:
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


SERVE = ["fastapi", "uvicorn", "jinja2"]

setup(
    name="fastdeploy-fusion",
    version=version(),
    description="Fused all-reduce + residual add + RMSNorm for tensor-parallel inference with Paddle",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=packages(),
    package_dir={PACKAGE: PACKAGE, f"{PACKAGE}.models": "models"},
    package_data={PACKAGE: ["py.typed"]},
    zip_safe=False,
    install_requires=[
        "paddlepaddle>=3.3",
        "numpy",
        "safetensors",
        "tokenizers",
        "tqdm",
        "ml_dtypes",
    ],
    extras_require={
        "gpu": ["flashinfer-python", "apache-tvm-ffi"],
        "serve": SERVE,
        "test": [
            *["pytest", "pytest-timeout", "ruff", "mypy", "matplotlib", "apache-tvm-ffi", "setuptools>=70.1"],
            *[*SERVE, "openai", "httpx"],
        ],
    },
    entry_points={"console_scripts": ["fastdeploy-fusion=fastdeploy_fusion.cli:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Typing :: Typed",
    ],
)
