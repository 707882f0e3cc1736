"""Find how an architecture couples, by running it at two widths.

Read in this order: `layout` (how a tensor is built from its parents'), `tape` (the operations of a
forward pass), `units` and `rules` (what belongs together), `solve` (which branch it lies in),
`exact` (what is not exact), `structure` (all of it in one value).
"""

from rbdc.structure.layout import Axes, Layout, Split
from rbdc.structure.structure import EntryUnits, Structure, find_structure, find_units, unwrapped
from rbdc.structure.tape import call, evaluating
