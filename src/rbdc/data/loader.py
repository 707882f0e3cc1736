"""Read batches in worker processes."""

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

PREFETCHED = 2  # batches that each worker reads in advance
LOST_WORKERS = 3  # give up after this many worker deaths in a row; memory is the usual cause


def read_batches(
    samples: Dataset[Any], tokens: Callable[[], Iterator[Any]], workers: int
) -> Iterator[Any]:
    """Yield `samples.__getitems__(batch)` for each batch of tokens, in order.

    With 0 workers this process reads the batches itself. A worker returns a DataError instead of
    raising it, and it is raised here, because torch would turn an exception into a string. A batch
    depends only on its tokens, so after a worker dies a new loader reads the remaining batches.
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
            if not str(error).startswith("DataLoader worker (pid"):  # torch's for a dead worker
                raise
            lost += 1
            if lost == LOST_WORKERS:
                raise DataError(
                    f"data workers keep dying: {error}",
                    "Too little memory is the usual cause: use fewer workers. The same command "
                    "resumes from the last checkpoint.",
                ) from None
            warnings.warn(f"a data worker died and is replaced: {error}", stacklevel=2)


def _loader(samples: Dataset[Any], tokens: Iterator[Any], workers: int) -> Iterator[Any]:
    """Return an iterator over torch's DataLoader, with its SIGCHLD handler removed.

    That handler would raise an error at an arbitrary point of the main thread when a worker dies.
    Without it, the loader notices the death while it waits for a batch.
    """
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_sampler=tokens,
        num_workers=workers,
        collate_fn=_as_it_is,
        prefetch_factor=PREFETCHED,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # otherwise the loader would draw from the global generator
        # Forked workers start at once and end when their parent is killed. Workers of a fork server
        # do neither, and would be the default in a training that a fork server started.
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
