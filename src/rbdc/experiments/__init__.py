"""Trials of protocols: one (`train`), many (`compare`), or the paper's own (`reproduce`).

`setting` opens data and model, `results` makes rows and tables of finished trials, `statistics`
means, intervals and crossings.
"""
