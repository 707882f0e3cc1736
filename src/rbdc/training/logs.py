"""The logs of a training: summary.csv, log.jsonl, blocks.jsonl and TensorBoard."""

import csv
import io
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from pydantic import with_config
from typing_extensions import TypedDict

from rbdc.disk import SHAPE, read_lines, write_text

SUMMARY, LOG, BLOCKS, BOARD = "summary.csv", "log.jsonl", "blocks.jsonl", "tensorboard"


@with_config(SHAPE)
class Line(TypedDict):
    """A line of a log; what is logged beside the step is kept."""

    step: int


class Logs:
    """The logs of one training in its folder.

    On resumption, lines logged after the resumed step are removed, so that no step appears twice.
    """

    def __init__(self, folder: Path, *, step: int, gflops: int, tensorboard: bool) -> None:
        self.folder = folder
        self._file, self._blocks = (_open_resumed(folder / name, step) for name in (LOG, BLOCKS))
        # Two folders: TensorBoard purges values after a given step, and GFLOPs are a second axis.
        starts = {"step": step, "gflops": gflops} if tensorboard else {}
        self._boards = {axis: _board(folder / BOARD / axis, at) for axis, at in starts.items()}

    def step(self, values: Mapping[str, float], *, board: bool) -> None:
        """Log one step: `step`, `flops` (of the tree so far), and measurements."""
        self._file.write(json.dumps(values) + "\n")
        if board:
            self._scalars("train", values, ("loss", "lr", "images_per_second"))

    def epoch(self, history: Sequence[Mapping[str, float]], scores: Sequence[str]) -> None:
        """Rewrite the summary of all epochs so far. `scores` name the values for TensorBoard."""
        self.flush()
        text = io.StringIO()
        table = csv.DictWriter(text, list(history[-1]), restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(history)
        write_text(self.folder / SUMMARY, text.getvalue(), durable=True)
        self._scalars("eval", history[-1], scores)

    def blocks(
        self, when: Mapping[str, float], sizes: Mapping[str, Sequence[Sequence[float]]]
    ) -> None:
        """Log the root mean square of the blocks of each weight, to four digits."""
        rounded = {
            name: [[float(f"{size:.4g}") for size in row] for row in rows]
            for name, rows in sizes.items()
        }
        self._blocks.write(json.dumps({**when, "blocks": rounded}) + "\n")
        self._blocks.flush()

    def _scalars(self, group: str, values: Mapping[str, float], names: Sequence[str]) -> None:
        for axis, board in self._boards.items():
            at = int(values["step"] if axis == "step" else values["flops"] / 1e9)
            for name in names:
                if name in values and (axis == "step" or name not in ("lr", "images_per_second")):
                    board.add_scalar(f"{group}/{name}", values[name], at)

    def flush(self) -> None:
        """Wait until all lines are on disk: a checkpoint or a result that follows has its logs."""
        for file in (self._file, self._blocks):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close all files."""
        self.flush()
        self._file.close()
        self._blocks.close()
        for board in self._boards.values():
            board.close()


def _open_resumed(path: Path, step: int) -> TextIO:
    """Open a log for appending, without the lines after `step`, and without damaged ones.

    Nothing needs a log to go on, and the last line of a killed process may be incomplete.
    """
    rows, damaged = read_lines(path, Line) if path.exists() else ([], [])
    if damaged and damaged != [len(rows) + 1]:
        warnings.warn(f"{path}: {len(damaged)} damaged lines are left out", stacklevel=2)
    text = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step)
    write_text(path, text, durable=True)
    return path.open("a")


def _board(folder: Path, step: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation warnings of its dependencies
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(str(folder), purge_step=step + 1)
