"""Show the progress of a run in a Jupyter notebook, without widgets: one output that is updated."""

import sys
import time
from collections.abc import Sequence
from html import escape
from io import StringIO
from typing import Any, Self

from rich.console import Console

from rbdc.jobs.engine import Event
from rbdc.jobs.job import Node
from rbdc.report.live import LiveRun

SECONDS = 0.5  # between two updates at least
LINES = 12  # that are shown of what has happened


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class NotebookRun(LiveRun):
    """Receives the events of an engine, and updates a cell's output."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__(nodes, Console(file=StringIO(), force_jupyter=False, width=100))
        self.lines: list[str] = []
        self.now: dict[str, str] = {}  # what each running training is at
        self.shown = 0.0

    def __enter__(self) -> Self:
        from IPython.display import HTML, display

        self.handle: Any = display(HTML(""), display_id=True)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.update()

    def __call__(self, event: Event) -> None:
        """Take in one event, and update the output if the last update is a while ago."""
        super().__call__(event)
        if event.kind in ("finished", "failed"):
            self.now.pop(event.key, None)
        if event.kind != "progress" or time.monotonic() - self.shown > SECONDS:
            self.update()

    def update(self) -> None:
        """Show the bars and the last lines."""
        from IPython.display import HTML

        self.shown = time.monotonic()
        self.handle.update(HTML(self.html()))

    def html(self) -> str:
        """Return the bars, the whole run's first, and the last lines."""
        whole = self.share()
        left = "" if whole >= 1 else f"left {self.left()}"
        bars = [_bar("tree", whole, left)]
        bars += [_bar(self.named(key), self.done[key], text) for key, text in self.now.items()]
        lines = "\n".join(escape(line) for line in self.lines[-LINES:])
        return f"{''.join(bars)}<pre>{lines}</pre>"

    def tell(self, key: str, what: str, left: str) -> None:
        self.now[key] = f"{what}, left {left}"

    def say(self, text: str) -> None:
        self.lines.append(text)


def _bar(name: str, share: float, text: str) -> str:
    return (
        f'<div>{escape(name)} <progress max="1" value="{share:.4f}"></progress> '
        f"{share:.0%} {escape(text)}</div>"
    )
