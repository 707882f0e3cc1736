"""Experiments: protocols x budgets x seeds -> jobs -> a table.

`compare` makes the jobs and runs them, `statistics` makes numbers of the results, `reproduce` are
the paper's own experiments.
"""
