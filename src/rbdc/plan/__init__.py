"""Plan a training and its cost.

`flops` counts FLOPs, `schedule` computes epochs from a budget, `plan` combines them, and `scaling`
models the training speed on one device and on several.
"""

from rbdc.plan.flops import FLOPS_PER_MAC, CounterName, FlopCount, count_flops, forward_flops
from rbdc.plan.plan import IMAGENET_IMAGES, Plan, Stage, make_plan
from rbdc.plan.scaling import Hardware, Scaling, scaling_of
from rbdc.plan.schedule import Schedule, training_flops
