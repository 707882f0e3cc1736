"""Many machines: the Ray engine, the resources of each job, and the simulator behind `rbdc plan`.

`allocation` decides how many devices each model gets and `timetable` simulates when it trains.
`ray_engine` runs jobs on a Ray cluster. Nothing is imported here: the actor in `board` has to start
quickly, without torch.
"""
