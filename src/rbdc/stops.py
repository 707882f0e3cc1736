"""Stop signals outside of training: one line, and exit code 75, from the first moment to the last.

While a training runs, an engine takes these signals, saves and ends (`rbdc.jobs.engine`). At any
other moment nothing is unsaved, so a command ends as soon as what it has half-written is removed.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
EXIT_CODE = 75  # EX_TEMPFAIL: try again later
GRACE_SECONDS = 10.0  # to remove half-written files; a library may have swallowed the exception


class Stopped(KeyboardInterrupt):
    """A stop signal arrived outside of training.

    No Exception: libraries catch those, and would go on.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")


@contextmanager
def stopping() -> Iterator[None]:
    """Raise Stopped at the first stop signal; end the process some seconds later in any case."""

    def stop(number: int, _frame: FrameType | None) -> None:
        for ignored in STOP_SIGNALS:
            signal.signal(ignored, signal.SIG_IGN)
        end = threading.Timer(GRACE_SECONDS, os._exit, [EXIT_CODE])
        end.daemon = True
        end.start()
        ends.append(end.cancel)
        raise Stopped(number)

    ends: list[Callable[[], Any]] = []
    with signals(stop):
        try:
            yield
        finally:
            for cancel in ends:
                cancel()


@contextmanager
def signals(handler: Any) -> Iterator[None]:
    """Replace the handler of the stop signals for a while."""
    if threading.current_thread() is not threading.main_thread():  # only it may handle signals
        yield
        return
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
