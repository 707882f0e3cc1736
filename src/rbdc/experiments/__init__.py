"""Experiments: protocols x budgets x seeds -> jobs -> a table.

`compare` makes the jobs and runs them, `results` are what they leave, `statistics` makes numbers of
them, `reproduce` are the paper's own experiments.
"""
