"""What the documentation shows is what the program understands."""

import re
import shlex
from pathlib import Path

import pytest

from rbdc.options import make_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    """Every indented line that begins with rbdc, continued lines joined."""
    text = "\n".join(page.read_text() for page in PAGES).replace("\\\n", " ")
    return sorted(set(re.findall(r"^ {4}rbdc (.+)$", text, flags=re.MULTILINE)))


def test_there_are_commands_to_check() -> None:
    assert len(commands()) >= 6


@pytest.mark.parametrize("command", commands())
def test_commands_in_the_documentation_are_understood(command: str) -> None:
    make_parser("0").parse_args(shlex.split(command))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for script in re.findall(r"python ((?:benchmarks|scripts)/\w+\.py)", text):
        assert (ROOT / script).exists(), script


def test_the_annotated_tree_names_every_file() -> None:
    tree = (ROOT / "README.md").read_text().split("## The house")[1]
    source = ROOT / "src/rbdc"
    for path in source.rglob("*.py"):
        if path.name != "__init__.py" and path.parent.name not in ("data", "report"):
            assert re.search(rf"^ +{path.name} ", tree, flags=re.MULTILINE), path
