"""A run: what is computed (`Run`), where (`Where`), and one function that brings them together.

`rbdc train`, `compare`, `reproduce` and `transfer` each build a `Run`; everything else is shared.
Nothing is imported here, so that a run's folder can be read (`record`) without loading torch.
"""
