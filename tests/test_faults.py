"""The fault matrix, in short: some cases of each kind of `python -m benchmarks.faults`."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults import __main__ as faults
from benchmarks.faults import small
from benchmarks.faults.matrix import Journal, Kind, Outcome, failed, missing, refused, same
from rbdc.models import memory

pytestmark = pytest.mark.xdist_group("faults")  # one reference run for all of them
CASES = {
    "kill-operation": (60, 200),
    "kill-memory": (0,),
    "kill-two": (0,),
    "power": (150, 310),
    "full": (3,),
    "read-only": (2,),
    "clock": (0,),
    "flip": range(4),
    "truncate": range(2),
    "zero": range(2),
    "hostile-model": (100,),
    "hostile-language": (0, 25, 35),
    "hostile-run": (0, 1, 2),
    "hostile-data": (0, 45),
    "hostile-yaml": (0, 1, 50),
    "http": (0,),
    "fuzz": range(0, 1000, 100),
}
"""The cases of each kind. Kinds with several processes of a training have tests of their own."""


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Kind]]:
    """The kinds, whose runs lie in a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RBDC_FAULTS", str(tmp_path_factory.mktemp("faults")))
        patch.setenv("HOME", os.environ["HOME"])  # both are changed, and changed back
        patch.setattr(memory, "FOLDER", memory.FOLDER)
        small.prepare()
        yield {kind.name: kind for kind in faults.all_kinds()}


@pytest.mark.parametrize("name", CASES)
def test_no_case_fails(name: str, kinds: dict[str, Kind]) -> None:
    for number in CASES[name]:
        outcome = faults.attempt(kinds[name], 0, number)
        assert outcome.verdict != "failed", f"{name}:0:{number}: {outcome.why}"


def test_every_kind_is_tried_here_or_has_tests_of_its_own(kinds: dict[str, Kind]) -> None:
    others = {"kill-folder", "kill-ddp", "kill-fsdp", "kill-ray"}
    assert set(kinds) == {*CASES, *others}


def test_a_stopped_matrix_goes_on_and_the_last_outcome_of_a_case_counts(tmp_path: Path) -> None:
    def attempt(_number: int, _draw: random.Random) -> Outcome:
        return same()

    kinds = [Kind(name=n, text="", cases=c, attempt=attempt) for n, c in (("a", 2), ("b", 1))]
    journal = Journal(tmp_path / "faults.jsonl")
    journal.add("a:0:0", failed("once"), 1)
    journal.add("a:0:0", refused("now"), 1)
    with journal.path.open("a") as file:
        file.write('{"case": "b:0:0", "ver')  # killed while it was writing
    assert {case: row["verdict"] for case, row in journal.rows().items()} == {"a:0:0": "refused"}
    left = [(kind.name, number) for kind, number in missing(kinds, None, 0, journal.rows())]
    assert left == [("b", 0), ("a", 1)]
