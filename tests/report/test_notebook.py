"""A run as it goes, shown in a notebook without widgets."""

from types import SimpleNamespace
from typing import Any

import pytest

from rbdc.jobs.engine import Event
from rbdc.report import notebook
from rbdc.report.notebook import NotebookRun, in_notebook
from tests.report.test_live import prepared, progress

__all__ = ["prepared"]  # a fixture


def test_the_output_of_a_cell_is_updated(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    display = pytest.importorskip("IPython.display")
    updates: list[str] = []
    handle = SimpleNamespace(update=lambda html: updates.append(html.data))
    monkeypatch.setattr(display, "display", lambda _html, **_: handle)
    first, *_ = prepared.tree.nodes
    trained = {"kind": "train", "metrics": {"top1": 0.625}, "seconds": 65.0}
    with NotebookRun(prepared.nodes) as live:
        live(Event(kind="note", key="", note="a <note>"))
        live(Event(kind="started", key=first.job.key))
        live(Event(kind="progress", key=first.job.key, progress=progress(10)))
        shown = live.html()
        live(Event(kind="finished", key=first.job.key, result=trained))
    assert 'value="0.5000"' in shown and "epoch 3/4  loss 1.500" in shown
    assert "a &lt;note&gt;" in shown and "left" in shown
    assert "top-1 62.50% after 1:05" in updates[-1] and "epoch" not in updates[-1]


def test_only_a_kernel_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace()
    monkeypatch.setitem(notebook.sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert not in_notebook()
    shell.kernel = "a kernel"
    assert in_notebook()
