"""The first screen: short, and no figure that was not measured."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 130 and max(map(len, lines)) <= 100


def test_figures_of_the_box_are_those_of_the_notebook() -> None:
    """All decimal fractions, and all intervals, of what was measured."""
    box = "\n".join(re.findall(r"^> (.*)$", README, flags=re.MULTILINE))
    table = (ROOT / "docs/notebook.md").read_text().split("## All results")[1].split("\n## ")[0]
    figures = re.findall(r"[+-]?\d+\.\d+(?: (?:±|to) \d+\.\d+)?", box)
    assert len(figures) >= 12
    made_up = [x for x in figures if not re.search(rf"(?<![\d.]){re.escape(x)}(?!\d)", table)]
    assert not made_up
    assert "GPU" in box and "ImageNet" in box and "does not help" in box


def test_the_paper_is_cited_alike_in_both_places() -> None:
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    (entry,) = re.findall(r"```bibtex\n(.*?)```", README, flags=re.DOTALL)
    fields = dict(re.findall(r"(\w+)\s*= \{(.*?)\},$", entry, flags=re.DOTALL | re.MULTILINE))
    names = [f"{one['family-names']}, {one['given-names']}" for one in paper["authors"]]
    plain = re.sub(r"\{\\(.)(\w)\}", lambda found: _accented(*found.groups()), fields["author"])
    assert " ".join(plain.split()).split(" and ") == names
    assert fields["title"] == paper["title"]


def _accented(accent: str, letter: str) -> str:
    return {"`e": "è", "'e": "é"}[accent + letter]
