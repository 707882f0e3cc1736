"""Where a command's jobs run, from its options."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rbdc.commands.options import given_settings
from rbdc.settings import Cluster, Machine

if TYPE_CHECKING:
    from rbdc.runs.run import Where


@contextmanager
def joined(options: Namespace) -> Iterator["Where"]:
    """Join the processes that torchrun started, if any; yield where jobs run; leave them.

    What is automatic is chosen for the device of the jobs.
    """
    from rbdc.runs.run import Where, settle
    from rbdc.training import join_world
    from rbdc.training.world import leave_world

    machine = Machine(**given_settings(options, Machine))
    try:
        yield settle(
            Where(
                machine=machine,
                cluster=Cluster(**given_settings(options, Cluster)),
                jobs=options.jobs,
                world=join_world(machine.device),
                node=getattr(options, "node", None),
            )
        )
    finally:
        leave_world()
