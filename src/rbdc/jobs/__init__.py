"""A tree of trainings: jobs with parents, a store of finished ones, engines that run the rest.

Start reading at `prepare`. Nothing is imported here, so that a run's folder can be looked at
(`places`, `lock`) without loading torch.
"""
