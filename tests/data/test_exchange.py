"""Processes share batches, and nobody can tell: whoever is late, stopped, killed or alone."""

import hashlib
import json
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from rbdc.data import Batch, DataSet, TrainingBatches, batches, exchange, open_data
from rbdc.data.exchange import Content, Exchange, Membership, Request, find_folder
from rbdc.errors import DataError
from rbdc.jobs.engine import stop_requested
from rbdc.settings import Augmentation
from tests.data.pictures import IMAGE, damaged, image_set, make_folder, write
from tests.support import until

IMAGES, BATCH, STEPS = 24, 8, 40
HOW = Augmentation(reprob=0.5, mixup=0.8)
fork = multiprocessing.get_context("fork")
seeds = count(1000 * os.getpid())  # tests that run at the same time do not meet


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    folder = tmp_path_factory.mktemp("data")
    return open_data(str(make_folder(folder, IMAGES, 7, kind="jpg")))


@pytest.fixture(autouse=True)
def _small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "WINDOW_BYTES", 0)  # four batches


def digest(micro: list[Batch]) -> str:
    found = hashlib.sha256()
    for batch in micro:
        for tensor in (batch.images, batch.targets, batch.indices):
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()


@dataclass
class Sibling:
    """A process that reads batches, and writes a line about each."""

    process: ForkProcess
    log: Path

    def lines(self) -> list[tuple[int, str, int]]:
        text = self.log.read_text() if self.log.exists() else ""
        return [tuple(json.loads(line)) for line in text.splitlines() if line.endswith("]")]

    def wait(self, lines: int) -> None:
        until(lambda: len(self.lines()) >= lines)

    def end(self) -> list[tuple[int, str, int]]:
        self.process.join(60)
        assert self.process.exitcode == 0
        return self.lines()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid or 0, number)


class Group:
    """Siblings on one stream of batches."""

    def __init__(self, data: DataSet, folder: Path, **options: Any) -> None:
        self.data, self.folder = data, folder
        self.options = {"seed": next(seeds), "batch_size": BATCH, **options}
        self.siblings: list[Sibling] = []
        self.expected = [digest(micro) for micro in self.make(share=False).from_step(0, STEPS)]

    def make(self, **options: Any) -> TrainingBatches:
        return TrainingBatches(self.data, HOW, IMAGE, **(self.options | options))

    def start(self, start: int = 0, *, pause: float = 0.0, gate: Any = None, **options: Any) -> Any:
        log = self.folder / f"{len(self.siblings)}.jsonl"

        def read() -> None:
            warnings.simplefilter("ignore")
            if gate:
                batches.Membership = _meeting(gate)  # type: ignore[misc]
            with log.open("w") as file, stop_requested() as stopped:
                read = self.make(**options).from_step(start, STEPS, stopped)
                for step, micro in enumerate(read, start):
                    row = [step, digest(micro), sum(batch.decoded for batch in micro)]
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    time.sleep(pause)
                    if stopped():
                        return

        process = fork.Process(target=read)
        process.start()
        self.siblings.append(Sibling(process, log))
        return self.siblings[-1]

    def check(self, lines: list[tuple[int, str, int]], start: int = 0) -> int:
        """Check the batches of a sibling, and return the number of images that it decoded."""
        assert [step for step, _, _ in lines] == [*range(start, STEPS)]
        assert [found for _, found, _ in lines] == self.expected[start:]
        return sum(decoded for _, _, decoded in lines)

    def is_gone(self) -> bool:
        folder = find_folder(self.make().content())
        assert folder is not None
        return not folder.exists()


def _meeting(gate: Any) -> type[Membership]:
    class Meeting(Membership):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            gate.wait(60)

    return Meeting


@pytest.fixture
def group(data: DataSet, tmp_path: Path) -> Iterator[Group]:
    made = Group(data, tmp_path)
    yield made
    for sibling in made.siblings:
        if sibling.process.is_alive():
            sibling.process.kill()
            sibling.process.join()


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("micro", [(1, (0,)), (2, (0, 1))])
def test_siblings_decode_each_image_once(
    data: DataSet, tmp_path: Path, workers: int, micro: Any
) -> None:
    group, gate = Group(data, tmp_path, micro_batches=micro, workers=workers), fork.Barrier(3)
    for pause in (0.0, 0.002, 0.01):  # not equally fast
        group.start(pause=pause, gate=gate)
    decoded = [group.check(sibling.end()) for sibling in group.siblings]
    assert sum(decoded) == STEPS * BATCH
    assert group.is_gone()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_sibling_comes_back_at_another_step(group: Group, workers: int) -> None:
    gate = fork.Barrier(2)
    killed, other = (group.start(workers=workers, pause=0.02, gate=gate) for _ in range(2))
    killed.wait(10)
    killed.signal(signal.SIGKILL)
    killed.process.join()
    before = killed.lines()
    assert 10 <= len(before) < STEPS
    back = group.start(5, workers=workers)
    assert [found for _, found, _ in before] == group.expected[: len(before)]
    decoded = sum(line[2] for line in before)
    decoded += group.check(other.end()) + group.check(back.end(), 5)
    # one pass, what the killed one did in its last moments, and what came back had to read again
    assert decoded <= BATCH * (STEPS + (len(before) + 1 + 2 * workers - 5) + 8)
    until(group.is_gone, 20)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_sibling_is_waited_for_and_then_left_behind(
    group: Group, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "PATIENCE", (1.0, 1.0))
    monkeypatch.setattr(exchange, "SILENCE", 0.5)
    gate = fork.Barrier(2)
    stopped, other = (group.start(workers=workers, pause=0.02, gate=gate) for _ in range(2))
    stopped.wait(5)
    stopped.signal(signal.SIGSTOP)
    other.wait(7)
    reached = len(other.lines())
    group.check(other.end())
    assert reached < STEPS
    assert len(stopped.lines()) < 20
    stopped.signal(signal.SIGCONT)
    group.check(stopped.end())
    assert group.is_gone()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stop_signal_is_answered_while_a_stopped_sibling_is_waited_for(
    group: Group, workers: int
) -> None:
    """A sibling that stands still is waited for at least a minute, but not after SIGTERM."""
    gate = fork.Barrier(2)
    still, other = (group.start(workers=workers, pause=0.02, gate=gate) for _ in range(2))
    still.wait(5)
    still.signal(signal.SIGSTOP)
    reached = _stalled(other)
    assert reached < STEPS
    began = time.monotonic()
    other.signal(signal.SIGTERM)
    lines = other.end()
    assert time.monotonic() - began < 5 < exchange.PATIENCE[0]
    assert len(lines) == reached + 1  # it ends after the step that it waited for
    assert [found for _, found, _ in lines] == group.expected[: reached + 1]
    still.signal(signal.SIGCONT)
    group.check(still.end())
    assert group.is_gone()


def _stalled(sibling: Sibling) -> int:
    """Return the batches that a sibling has when it gets no more for a while."""
    found, since = -1, time.monotonic()
    while time.monotonic() - since < 1:
        if len(sibling.lines()) != found:
            found, since = len(sibling.lines()), time.monotonic()
        time.sleep(0.01)
    return found


def test_a_stopped_worker_that_decodes_is_not_waited_for(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "SILENCE", 0.3)
    members = _members(group, 2)
    claimed, began = fork.Event(), time.monotonic()

    def stop(_: Request) -> Content:
        claimed.set()
        os.kill(os.getpid(), signal.SIGSTOP)
        raise AssertionError

    process = fork.Process(target=lambda: Exchange(members[0]).get((0, 0), list, stop))
    process.start()
    try:
        assert claimed.wait(30)
        assert (members[0].folder / "0.0").exists()
        found, facts = Exchange(members[1]).get((0, 0), list, _decode)
        assert (int(found), facts) == (0, ["decoded"])
        assert time.monotonic() - began < 10
    finally:
        process.kill()
        process.join()
        _leave(members)


def test_a_batch_of_a_killed_worker_is_decoded_at_once_by_another(group: Group) -> None:
    members = _members(group, 2)

    def die(_: Request) -> Content:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    process = fork.Process(target=lambda: Exchange(members[0]).get((0, 0), list, die))
    process.start()
    process.join()
    assert (members[0].folder / "0.0").exists()  # claimed, and never written
    one, other = (Exchange(member) for member in members)
    began = time.monotonic()
    assert one.get((0, 0), list, _decode)[1] == ["decoded"]
    assert time.monotonic() - began < exchange.SILENCE / 2
    assert int(other.get((0, 0), list, _refuse)[0]) == 0
    _leave(members)
    assert group.is_gone()


def test_a_killed_process_is_no_member_though_its_workers_live(group: Group) -> None:
    pids = fork.Queue()

    def member() -> None:
        (made,) = _members(group, 1)
        worker = fork.Process(target=lambda: time.sleep(60))
        worker.start()
        pids.put((str(made.folder / made.name), worker.pid))
        time.sleep(60)

    process = fork.Process(target=member)
    process.start()
    path, worker = pids.get(timeout=30)
    try:
        assert exchange._read_member(Path(path)) is not None
        process.kill()
        process.join()
        os.kill(worker, 0)
        assert exchange._read_member(Path(path)) is None
    finally:
        os.kill(worker, signal.SIGKILL)
    _leave(_members(group, 1))
    assert group.is_gone()


def test_what_all_have_read_is_removed(group: Group) -> None:
    members = _members(group, 2)
    one, other = (Exchange(member) for member in members)
    for step in range(12):
        one.get((step, 0), list, _decode)
        other.get((step, 0), list, _refuse)
        files = {path.name for path in members[0].folder.iterdir() if "." in path.name}
        assert files == {f"{step}.0", f"{max(0, step - 1)}.0"}
        for member in members:
            member.move(step)
    _leave(members)


def test_a_batch_written_in_part_is_decoded_again(group: Group) -> None:
    members = _members(group, 2)
    one, other = (Exchange(member) for member in members)
    one.get((0, 0), list, _decode)
    path = members[0].folder / "0.0"
    whole = path.read_bytes()
    path.write_bytes(bytes(24) + whole[24:-1])  # killed before the mark
    assert other.get((0, 0), list, _decode)[1] == ["decoded"]
    assert path.read_bytes() == whole
    _leave(members)


def test_a_late_sibling_is_waited_for(group: Group) -> None:
    first = group.start(pause=0.03)
    first.wait(10)
    assert sum(line[2] for line in first.lines()) >= 10 * BATCH  # alone so far
    late = group.start()
    decoded = group.check(first.end()) + group.check(late.end())
    assert decoded < 1.7 * STEPS * BATCH
    assert group.is_gone()


def test_a_process_does_not_wait_for_itself(group: Group) -> None:
    one, other = (group.make().from_step(0, STEPS) for _ in range(2))
    began = time.monotonic()
    found = [digest(next(one))]
    found += [digest(micro) for micro in other]
    found += [digest(micro) for micro in one]
    assert found == [group.expected[0], *group.expected, *group.expected[1:]]
    assert time.monotonic() - began < 20
    assert group.is_gone()


def test_one_process_alone_writes_no_batch(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exchange, "_take", None)
    lines = [
        (step, digest(m), m[0].decoded) for step, m in enumerate(group.make().from_step(0, 40))
    ]
    assert group.check(lines) == STEPS * BATCH


def test_while_one_batch_is_decoded_elsewhere_the_next_one_is_decoded(group: Group) -> None:
    members = _members(group, 2)
    begun, done = fork.Event(), fork.Event()

    def slow(request: Request) -> Content:
        begun.set()
        assert done.wait(30)
        return _decode(request)

    process = fork.Process(target=lambda: Exchange(members[0]).get((0, 0), list, slow))
    process.start()
    assert begun.wait(30)
    decoded = []

    def decode(request: Request) -> Content:
        decoded.append(request)
        if request == (2, 0):
            done.set()
        if request == (1, 0):
            raise DataError("it is damaged", "Mend it.")  # not the batch that is asked for
        return _decode(request)

    mine = Exchange(members[1])
    assert int(mine.get((0, 0), lambda: [(1, 0), (2, 0), (9, 0)], decode)[0]) == 0
    process.join()
    assert decoded == [(1, 0), (2, 0)]
    assert int(mine.get((2, 0), list, _refuse)[0]) == 2
    with pytest.raises(DataError, match="damaged"):
        mine.get((1, 0), list, decode)
    _leave(members)


def test_when_memory_is_full_each_decodes_for_itself_and_says_so_once(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "FREE_SHARE", 1.1)
    other = group.start(pause=0.05)
    other.wait(1)
    with pytest.warns(UserWarning, match="has no room for batches") as warned:
        lines = [
            (step, digest(micro), micro[0].decoded)
            for step, micro in enumerate(group.make(workers=2).from_step(0, STEPS))
        ]
    assert len(warned) == 1
    assert str(warned[0].message).endswith("; this process decodes all images itself")
    assert STEPS * BATCH <= group.check(lines) <= (STEPS + 2) * BATCH
    group.check(other.end())
    assert group.is_gone()


def test_what_killed_processes_left_is_removed_when_someone_joins(group: Group) -> None:
    (member,) = _members(group, 1)
    left = member.folder.with_name("0" * 32)
    write(left / "member-1-dead", bytes(16))
    write(left / "3.0", b"half a batch")
    write(member.folder / "member-2-dead", bytes(16))
    again = _members(group, 1)
    assert not left.exists()
    assert member.folder.exists()
    _leave([member, *again])
    assert group.is_gone()


@pytest.mark.parametrize("kind", ["open", "link"])
def test_a_folder_of_others_is_not_used(
    group: Group, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MEMORY", tmp_path)
    root = tmp_path / f"rbdc-{os.getuid()}"
    if kind == "open":
        root.mkdir()
        root.chmod(0o755)
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="batches are not shared. Remove it"):
        found = [digest(micro) for micro in group.make().from_step(0, 3)]
    assert found == group.expected[:3]


def test_damage_is_found_by_all_at_the_same_step(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "spoiled", IMAGES, 6)
    write(root / "train/bee/001.png", damaged("png"))
    data = open_data(str(root))
    group = Group.__new__(Group)
    group.data, group.options = data, {"seed": 0, "batch_size": BATCH, "workers": 2}
    found = []
    for share in (False, True):
        members = _members(group, 1) if share else []  # somebody else is there
        read = []
        with pytest.raises(DataError, match=r"001.png cannot be decoded"):
            for micro in group.make(share=share).from_step(0, 3):
                read.append(digest(micro))
        found.append(read)
        _leave(members)
    assert found[0] == found[1]


def test_only_equal_streams_meet(data: DataSet) -> None:
    def key(**options: Any) -> str:
        given: dict[str, Any] = {"data": data, "settings": HOW, "image": IMAGE, **options}
        made = TrainingBatches(**({"seed": 0, "batch_size": BATCH} | given))
        return json.dumps(made.content())

    other = replace(data, fingerprint="other")
    keys = [
        key(),
        key(seed=1),
        key(batch_size=4),
        key(micro_batches=(2, (0,))),
        key(micro_batches=(2, (1,))),
        key(data=other),
        key(settings=replace(HOW, hflip=0.1)),
        key(settings=replace(HOW, decode="full")),
        key(image=replace(IMAGE, width=16)),
    ]
    assert len(set(keys)) == len(keys)
    assert key(workers=3, share=False) == key()


def test_images_in_memory_are_not_decoded() -> None:
    memory = batches.DataSet(
        name="memory",
        train=image_set(IMAGES),
        test=image_set(3),
        class_names=("ant", "bee", "cow"),
        fingerprint="memory",
    )
    for how in (HOW, Augmentation(scale=None, color_jitter=0.0)):
        made = TrainingBatches(memory, how, IMAGE, seed=0, batch_size=BATCH)
        assert [micro[0].decoded for micro in made.from_step(0, 3)] == [0, 0, 0]


def _members(group: Group, number: int) -> list[Membership]:
    folder = find_folder(group.make().content())
    assert folder is not None
    return [Membership(folder, position=0, window=4) for _ in range(number)]


def _leave(members: list[Membership]) -> None:
    for member in members:
        member.leave()


def _decode(request: Request) -> Content:
    return torch.tensor([request[0]], dtype=torch.uint8), ["decoded"]


def _refuse(request: Request) -> Content:
    raise AssertionError(f"{request} is there already")
