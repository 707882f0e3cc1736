"""Plan a training and its cost.

`growth` says which models the stages have, `flops` counts FLOPs, `schedule` computes epochs from a
budget, `make` combines them into a `plan`. `speeds` has the training speed of each level on one
device, `table` reads it from timm's benchmark results, and `hours` computes hours and money.
`scaling` models the speed on several devices.
"""

from rbdc.plan.flops import FLOPS_PER_MAC, CounterName, FlopCount, count_flops, forward_flops
from rbdc.plan.growth import Growth
from rbdc.plan.hours import Hours, check_equal_flops, fewest_hours, hours_by_steps
from rbdc.plan.make import IMAGENET_IMAGES, make_plan
from rbdc.plan.plan import Plan, Rounding, Stage
from rbdc.plan.scaling import Hardware, Scaling, scaling_of
from rbdc.plan.schedule import Schedule, training_flops
from rbdc.plan.speeds import LevelSpeed, Speeds, assumed_speeds
from rbdc.plan.table import table_speeds
