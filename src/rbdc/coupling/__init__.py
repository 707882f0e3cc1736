"""Couple two narrow models into one wide model. Pure functions: no files, no global state.

Read in this order: `layout` (how the models couple, from `rbdc.structure`), `rules` (the paper's
equations), `couple` (two models into a third), `checks` (preconditions), `verify` (numerical proof
of the result), `moments` (the optimizer's state), `blocks` (norms of the weight blocks during
training).
"""

from rbdc.coupling.blocks import block_sizes
from rbdc.coupling.checks import ClassNames, check_whole, class_names, set_class_names
from rbdc.coupling.couple import OffDiagonal, check_exact, couple
from rbdc.coupling.layout import (
    check_conflicts,
    example_for,
    layout_of,
    structure_of,
    tokens_for,
)
from rbdc.coupling.moments import COUNTERS, check_slots, couple_moments, degree_of
from rbdc.coupling.rules import couple_tensor
from rbdc.coupling.verify import TOLERANCE, CouplingProof, verify_coupling
from rbdc.structure import Axes, Layout, Structure, evaluating
