"""The fault matrix: what is promised of runs, tried with faults until it holds or breaks.

    python -m benchmarks.faults                          all kinds, at their full counts
    python -m benchmarks.faults --kinds kill-memory,flip --count 50 --seed 1
    python -m benchmarks.faults --only flip:0:17         one case again, with all that it says

Cases are written to a journal, so that the same command goes on where it stopped. At the end, and
with `--table`, it prints for each kind: faults tried, survived with the same bits, refused clearly
(two lines, exit code 2), failed. `matrix` has the journal and the table, `child` starts processes,
`small` has the runs that faults are made in; each other file has some kinds.
"""
