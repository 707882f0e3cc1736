"""The training loop: give batches to one training, or to several that train on the same ones.

Trainings on equal batches share one stream: an image is decoded, augmented and copied to the device
once for all of them, and so is a test image. Each training has its own weights, random numbers,
logs and checkpoints, so it ends with the same bits as a training alone.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from rbdc.errors import Interrupted, TrainingError
from rbdc.training.progress import Trained
from rbdc.training.session import Session

Outcome = tuple[Session, Trained | TrainingError]


def train(session: Session, stopped: Callable[[], bool] = lambda: False) -> Trained:
    """Train one model to the end. See `train_together`."""
    ((_, outcome),) = train_together([session], stopped)
    if isinstance(outcome, TrainingError):
        raise outcome
    return outcome


def train_together(
    sessions: Sequence[Session], stopped: Callable[[], bool] = lambda: False
) -> Iterator[Outcome]:
    """Train models on one stream of batches; yield each with its result when it is finished.

    A session that resumed at a later step than another waits until the other has reached it. One
    whose training fails leaves the group, and its outcome is the error. When `stopped` returns
    True, all finish their step, save, and Interrupted is raised.
    """
    world, running = sessions[0].world, list(sessions)
    start = min(session.state.step for session in sessions)
    batches = sessions[0].problem.batches(start, max(session.steps for session in sessions))
    for step in count(start):
        if not running:
            return
        began = time.monotonic()
        micro = next(batches)
        waited = time.monotonic() - began
        active = [session for session in running if session.state.step == step]
        active[0].decoded += sum(batch.decoded for batch in micro)
        failed: dict[Session, TrainingError] = {}
        for session in active:
            session.wait(waited / len(active))
            try:
                with session.timed():
                    session.advance(micro)
            except TrainingError as error:
                failed[session] = error
        failed |= _evaluate([session for session in active if session not in failed])
        done = [session for session in active if session not in failed and session.finished]
        running = [session for session in running if session not in (*failed, *done)]
        interrupted = world.anyone(stopped()) and bool(running)
        for session in running:
            if session in active or interrupted:
                with session.timed():
                    session.checkpoint(now=interrupted)
        yield from failed.items()
        if done and not running:
            world.settle()
        for session in done:
            yield session, session.finish()
        if interrupted:
            raise Interrupted(f"stopped after step {step + 1} of {running[0].steps}")


def _evaluate(sessions: Sequence[Session]) -> dict[Session, TrainingError]:
    """Evaluate the sessions whose turn it is in one pass over the test images; end the epoch."""
    failed: dict[Session, TrainingError] = {}
    for session in sessions:
        if session.ends_epoch:
            try:
                session.check_losses()
            except TrainingError as error:
                failed[session] = error
    chosen = [s for s in sessions if s.evaluates and s not in failed]
    models = [(s, prefix, model) for s in chosen for prefix, model in s.models().items()]
    scores: dict[Session, dict[str, float]] = {session: {} for session in chosen}
    if models:
        began, first = time.monotonic(), chosen[0]
        for _, _, model in models:
            first.world.broadcast_buffers(model)
        found = first.problem.evaluate([model for _, _, model in models], first.state.autocast())
        for (session, prefix, _), values in zip(models, found, strict=True):
            scores[session] |= {prefix + name: value for name, value in values.items()}
            session.seconds += (time.monotonic() - began) / len(models)
    for session in sessions:
        if session.ends_epoch and session not in failed:
            with session.timed():
                session.end_epoch(scores.get(session))
    return failed
