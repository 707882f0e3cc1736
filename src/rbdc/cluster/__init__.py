"""Many machines: the Ray engine, the resources of each job, and the simulator behind `rbdc plan`.

`allocation` decides how many devices each model gets and `timetable` simulates when it trains.
`ray_engine` runs jobs on a Ray cluster; it is imported only where Ray is used.
"""

from rbdc.cluster.allocation import STANDARD, ClusterPlan, demands_of, plan_cluster, soonest
from rbdc.cluster.timetable import Demand, Row, Slot, Timetable, simulate
