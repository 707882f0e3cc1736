"""What a training costs: FLOPs (`flops`), epochs from a budget (`schedule`), the plan (`plan`).

And how long it takes on a cluster: speed (`scaling`), who gets how many devices (`allocation`), and
when (`timetable`).
"""

from rbdc.budget.allocation import (
    STANDARD,
    ClusterPlan,
    allocate,
    demands_of,
    plan_cluster,
    soonest,
)
from rbdc.budget.flops import FLOPS_PER_MAC, CounterName, FlopCount, count_flops, forward_flops
from rbdc.budget.plan import IMAGENET_IMAGES, Plan, Stage, make_plan
from rbdc.budget.scaling import Hardware, Scaling, scaling_of
from rbdc.budget.schedule import Schedule, training_flops
from rbdc.budget.timetable import Demand, Row, Slot, Timetable, simulate

__all__ = [
    "FLOPS_PER_MAC",
    "IMAGENET_IMAGES",
    "STANDARD",
    "ClusterPlan",
    "CounterName",
    "Demand",
    "FlopCount",
    "Hardware",
    "Plan",
    "Row",
    "Scaling",
    "Schedule",
    "Slot",
    "Stage",
    "Timetable",
    "allocate",
    "count_flops",
    "demands_of",
    "forward_flops",
    "make_plan",
    "plan_cluster",
    "scaling_of",
    "simulate",
    "soonest",
    "training_flops",
]
