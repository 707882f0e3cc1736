"""A tree of trainings: jobs with parents, a store of finished ones, engines that run the rest."""

from rbdc.tree.engine import Engine, Event, InProcess, SideBySide, Watcher
from rbdc.tree.jobs import CoupleJob, Job, TrainJob
from rbdc.tree.nodes import Node, Tree, grow_tree
from rbdc.tree.prepare import Prepared, prepare
from rbdc.tree.store import Store

__all__ = [
    "CoupleJob",
    "Engine",
    "Event",
    "InProcess",
    "Job",
    "Node",
    "Prepared",
    "SideBySide",
    "Store",
    "TrainJob",
    "Tree",
    "Watcher",
    "grow_tree",
    "prepare",
]
