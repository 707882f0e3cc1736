"""What a training costs: FLOPs (`flops`), epochs from a budget (`schedule`), the plan (`plan`)."""

from rbdc.budget.flops import FLOPS_PER_MAC, CounterName, FlopCount, count_flops, forward_flops
from rbdc.budget.plan import IMAGENET_IMAGES, Plan, Stage, make_plan
from rbdc.budget.schedule import Schedule, training_flops

__all__ = [
    "FLOPS_PER_MAC",
    "IMAGENET_IMAGES",
    "CounterName",
    "FlopCount",
    "Plan",
    "Schedule",
    "Stage",
    "count_flops",
    "forward_flops",
    "make_plan",
    "training_flops",
]
