"""Batches read by worker processes, whatever is in them."""

import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from rbdc.data.randomness import preserve_generators
from rbdc.errors import DataError

LOST_WORKERS = 3  # a loader whose workers die this often has no memory left


def read_batches(
    samples: Dataset[Any], tokens: Callable[[], Iterator[list[Any]]], workers: int
) -> Iterator[Any]:
    """What `samples.__getitems__` gives for each batch of tokens, read by workers or by this
    process. An error is given, too, and raised here: raised there, torch would make a text of it.

    Batches are the same whoever reads them, so that a killed worker is no loss: the loader is made
    again for the rest of them.
    """
    if not workers:
        for batch in tokens():
            with preserve_generators():
                read = samples.__getitems__(batch)  # type: ignore[attr-defined]
            yield _checked(read)
        return
    done, lost = 0, 0
    while True:
        try:
            for read in _loader(samples, islice(tokens(), done, None), workers):
                done, lost = done + 1, 0
                yield _checked(read)
            return
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker (pid"):  # torch's words for a dead one
                raise
            lost += 1
            if lost == LOST_WORKERS:
                raise DataError(
                    f"data workers keep dying: {error}",
                    "Often memory is short: use fewer workers. The same command goes on from the "
                    "last checkpoint.",
                ) from None
            warnings.warn(f"a data worker died and is replaced: {error}", stacklevel=2)


def _loader(samples: Dataset[Any], tokens: Iterator[list[Any]], workers: int) -> Iterator[Any]:
    """torch's loader. It would raise a worker's death wherever the main thread happens to be, from
    a signal handler; without that handler it finds out when it waits for a batch."""
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_sampler=tokens,
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # else the loader would draw from the global one
        # Forked workers start at once and see when their parent was killed. A server's do neither,
        # and would be the default in a training that a server started itself.
        multiprocessing_context="fork" if sys.platform == "linux" else None,
    )
    before = signal.getsignal(signal.SIGCHLD)
    batches = iter(loader)
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, before)
    return batches


def _as_it_is(read: Any) -> Any:
    return read


def _checked(read: Any) -> Any:
    if isinstance(read, DataError):
        raise DataError(read.problem, read.remedy)
    return read
