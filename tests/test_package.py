"""The wheel: what is inside, and that it works without the checkout."""

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import trove_classifiers

import rbdc
from rbdc.runs.trackers import PACKAGES
from tests.support import made_once

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/rbdc"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is made from the source distribution, as the package index gets both."""

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
        subprocess.run([*command, str(ROOT)], check=True, capture_output=True)

    (found,) = made_once(tmp_path_factory, "dist", build).glob("*.whl")
    return found


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    """Data, templates, recipes, the page's scripts and py.typed are files as any other."""
    ours = {
        path.relative_to(ROOT / "src").as_posix(): path.read_bytes()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    about = {name for name in packed if ".dist-info/" in name}
    assert {name: packed[name] for name in packed.keys() - about} == ours
    assert {"py.typed", "card.md.j2", "page.css", "demo.yaml"} <= {Path(name).name for name in ours}


def test_what_the_package_index_shows(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        about = message_from_bytes(archive.read(name))
    assert about["Version"] == rbdc.__version__
    assert about["Summary"] and about["License-Expression"] == "Apache-2.0"
    classifiers = set(about.get_all("Classifier", []))
    assert classifiers <= trove_classifiers.classifiers
    lowest = int(PROJECT["requires-python"].removeprefix(">=3."))
    versions = {int(v) for c in classifiers for v in re.findall(r"^\w+ Language.*3\.(\d+)$", c)}
    assert min(versions) == lowest and sys.version_info.minor in versions
    assert set(about.get_all("Provides-Extra", [])) == set(EXTRAS)


DEMO = """
import sys
from pathlib import Path
import rbdc
from rbdc.cli import main

assert Path(rbdc.__file__).is_relative_to(sys.prefix), rbdc.__file__
small = "--steps 1 --grow width --baseline-epochs 1 --rounding none --budget 0.5 --batch-size 500"
quick = "--threads 1 --jobs 1 --workers 0 --no-with-baseline --model-kwargs channels=[4,4,4,4]"
if __name__ == "__main__":
    assert main(f"train --recipe demo {small} {quick} stem_width=4".split()) == 0
    assert main("export runs/demo --output model".split()) == 0
    assert main("reproduce growth --dry-run --images-per-second 1000".split()) == 0
    assert Path("runs/demo/report.html").stat().st_size > 1e6 and Path("model/README.md").exists()
"""


def test_the_demo_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """In an environment with the wheel and, from this one, the packages that it depends on."""
    venv.create(tmp_path / "env")
    python = tmp_path / "env/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "-q"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    (site,) = (tmp_path / "env/lib").glob("*/site-packages")
    # A folder in a .pth file is searched last, and its own .pth files, editable installs, are not.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    (tmp_path / "demo.py").write_text(DEMO)

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    version = run(tmp_path / "env/bin/rbdc", "--version")
    assert version.stdout == f"rbdc {rbdc.__version__}\n", version.stderr
    demo = run(python, "demo.py")
    assert demo.returncode == 0, demo.stderr
    assert "RBDC:" in demo.stdout


def test_extras_have_one_name_everywhere() -> None:
    """In errors, pages, scripts and among themselves."""
    named = r"(?:rbdc|\.)\[([a-z,-]+)\]"
    ends = {".py", ".md", ".toml", ".yml", ".ipynb", ".sh", ".sbatch", ""}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = tracked.stdout.split() or [str(path) for path in SOURCE.rglob("*.py")]
    for path in (ROOT / name for name in files):
        if path.suffix in ends and path.is_file():
            for extras in re.findall(named, path.read_text()):
                assert set(extras.split(",")) <= set(EXTRAS), path
    shown = re.findall(named, (ROOT / "docs/install.md").read_text())
    assert set(EXTRAS) - {"docs"} <= set(shown)


def test_an_error_names_the_extra_that_has_the_package() -> None:
    calls = [
        node
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "not_installed"
    ]
    assert len(calls) >= 3 and set(PACKAGES) <= set(EXTRAS)  # a tracker's extra has its name
    for call in calls:
        package, extra = (ast.literal_eval(argument) for argument in call.args[:2])
        assert any(re.match(rf"{package}\b", needed) for needed in EXTRAS[extra]), (package, extra)
