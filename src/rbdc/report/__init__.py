"""Show plans, runs and results to people: in the terminal, as a page, as figures, as a card.

`plan` and `timetable` print plans, `live`, `run` and `watch` print runs, `compare` and `transfer`
print results. `read` reads a run's folder for the page (`page`), the figures and the model card.
"""
