"""Jobs with parents, a store of finished ones, and engines that run the rest on this machine.

`job` is the interface, `train` and `grow` are the jobs of a tree; `method` is what a growth method
implements. Nothing is imported here, so that a run's folder can be read (`layout`, `lock`) without
loading torch.
"""
