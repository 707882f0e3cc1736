"""The training loop: give batches to one training, or to several that train on the same ones.

Trainings on equal batches share one stream: an image is decoded, augmented and copied to the device
once for all of them, and so is a test image. Each training has its own weights, random numbers,
logs and checkpoints, so it ends with the same bits as a training alone; unless they are `fused`.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from rbdc.errors import Interrupted, TrainingError
from rbdc.training.clock import Spent
from rbdc.training.fused import FusedStates
from rbdc.training.progress import Trained
from rbdc.training.session import Session

Outcome = tuple[Session, Trained | TrainingError]
Failures = dict[Session, TrainingError]


def train(session: Session, stopped: Callable[[], bool] = lambda: False) -> Trained:
    """Train one model to the end. See `train_together`."""
    ((_, outcome),) = train_together([session], stopped)
    if isinstance(outcome, TrainingError):
        raise outcome
    return outcome


def train_together(
    sessions: Sequence[Session],
    stopped: Callable[[], bool] = lambda: False,
    *,
    fused: bool = False,
) -> Iterator[Outcome]:
    """Train models on one stream of batches; yield each with its result when it is finished.

    A session that resumed at a later step than another waits until the other has reached it. One
    whose training fails leaves the group, and its outcome is the error. When `stopped` returns
    True, all finish their step, save, and Interrupted is raised; another thread may call it, too.
    Those that are `fused` begin at the same step, take their steps as one model, and save at the
    same steps.
    """
    yield from map(_finish, [session for session in sessions if session.finished])
    running = [session for session in sessions if not session.finished]
    if not running:
        return
    world, take_steps = sessions[0].world, _fused_steps(running) if fused else _separate_steps
    start = min(session.state.step for session in running)
    last = max(session.steps for session in running)
    batches = running[0].problem.batches(start, last, stopped)
    for step in count(start):
        began = Spent.now()
        micro = next(batches)
        waited = Spent.since(began)
        active = [session for session in running if session.state.step == step]
        active[0].decoded += sum(batch.decoded for batch in micro)
        for session in active:
            session.wait(waited * (1 / len(active)))
        failed = take_steps(active, micro)
        failed |= _end_epoch([session for session in active if session not in failed])
        trained = [session for session in active if session not in failed]
        running = [s for s in running if s not in failed and not s.finished]
        interrupted = world.anyone(stopped()) and bool(running)
        failed |= _save(trained, interrupted=interrupted, fused=fused)
        running = [session for session in running if session not in failed]
        yield from failed.items()
        if not running:
            world.settle()
        yield from map(_finish, [s for s in trained if s.finished and s not in failed])
        if interrupted and running:
            raise Interrupted(f"stopped after step {step + 1} of {running[0].steps}")
        if not running:
            return


def _separate_steps(sessions: Sequence[Session], micro: Sequence[Any]) -> Failures:
    """Take a step with one model after the other; return those that failed."""
    failed: Failures = {}
    for session in sessions:
        try:
            with session.timed():
                session.note(micro, session.state.update(micro))
        except TrainingError as error:
            failed[session] = error
    return failed


def _fused_steps(
    group: Sequence[Session],
) -> Callable[[Sequence[Session], Sequence[Any]], Failures]:
    """Return a function that takes a step with all models of the group as one.

    A model that failed stays part of the computation, so that the others keep their bits.
    """
    states = FusedStates([session.state for session in group])

    def take_steps(sessions: Sequence[Session], micro: Sequence[Any]) -> Failures:
        began, failed = Spent.now(), Failures()
        losses = dict(zip(group, states.update(micro), strict=True))
        spent = Spent.since(began) * (1 / len(sessions))
        for session in sessions:
            session.spent += spent
            try:
                session.note(micro, losses[session])
            except TrainingError as error:
                failed[session] = error
        return failed

    return take_steps


def _end_epoch(sessions: Sequence[Session]) -> Failures:
    """Evaluate the sessions whose turn it is in one pass over the test images, and log it."""
    failed: Failures = {}
    ending = [session for session in sessions if session.ends_epoch]
    for session in ending:
        try:
            session.check_losses()
        except TrainingError as error:
            failed[session] = error
    chosen = [session for session in ending if session.evaluates and session not in failed]
    models = [(s, prefix, model) for s in chosen for prefix, model in s.models().items()]
    scores: dict[Session, dict[str, float]] = {session: {} for session in chosen}
    if models:
        began, first = Spent.now(), chosen[0]
        for _, _, model in models:
            first.world.broadcast_buffers(model)
        found = first.problem.evaluate([model for _, _, model in models], first.state.autocast())
        spent = Spent.since(began) * (1 / len(models))
        for (session, prefix, _), values in zip(models, found, strict=True):
            scores[session] |= {prefix + name: value for name, value in values.items()}
            session.spent += spent
    for session in ending:
        if session not in failed:
            with session.timed():
                session.end_epoch(scores.get(session))
    return failed


def _finish(session: Session) -> Outcome:
    try:
        return session, session.finish()
    except TrainingError as error:
        return session, error


def _save(sessions: Sequence[Session], *, interrupted: bool, fused: bool) -> Failures:
    """Save checkpoints that are due; return the sessions whose weights are not finite.

    Fused trainings save all at once, the last step too. So they have a step in common from which
    all can go on, and one that was stopped while the others were written down as finished needs
    them no more.
    """
    due = {session: interrupted or session.due for session in sessions if not session.finished}
    if fused and (any(due.values()) or not due):
        due = dict.fromkeys(sessions, True)
    failed: Failures = {}
    for session, now in due.items():
        if now:
            try:
                with session.timed():
                    session.save()
            except TrainingError as error:
                failed[session] = error
    return failed
