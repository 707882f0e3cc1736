"""Find what makes a coupled model differ from the mean of its parents.

A layer whose inputs double and whose outputs do not, as a head, returns the mean of both branches
(Eq. 6). What follows must be linear. A tensor that both branches share is the mean of its parents',
which is exact only as a bias that is added to such a mean.
"""

from collections.abc import Mapping

from rbdc.structure.layout import Layout
from rbdc.structure.tape import Op, Tape
from rbdc.structure.units import Ids, Units

_CONTRACTIONS = frozenset({"mm", "bmm", "convolution", "embedding"})
_LINEAR = frozenset({"add", "sub", "neg", "mean", "sum", "cat", "stack", "avg_pool2d"})
_BY_CONSTANTS = frozenset({"mul", "div"})

Origins = Mapping[int, tuple[str, ...]]


def inexact_uses(tape: Tape, units: Units, layout: Layout) -> dict[str, str]:
    """Return the tensors that make the coupling inexact, each with the cause."""
    means: dict[int, tuple[str, ...]] = {}
    found: dict[str, str] = {}
    for op in tape.ops:
        ids = {ref.number: units.ids.get(ref.number, Ids()) for ref in op.inputs}
        names = [name for one in ids.values() for name in one.weights if name in layout]
        if op.outputs and units.ids.get(op.outputs[0].number, Ids()).weights:
            continue  # weights alone: they are used later
        origin = tuple(dict.fromkeys(n for number in ids for n in means.get(number, ())))
        shared = [name for name in names if not layout[name].scaled]
        if op.name in _CONTRACTIONS:
            heads = [n for n in names if layout[n].is_head and op.name != "embedding"]
            keeps, origin = not shared and not origin, (*origin, *heads)
        else:
            active = [n for n, one in ids.items() if one.units is not None or one.weights]
            apart = any(n not in means and ids[n].units is not None for n in active)
            keeps = not (shared or origin) or (bool(origin) and _linear(op, active, apart=apart))
            origin = (*origin, *shared) if origin else ()
        if not keeps:
            found.update(dict.fromkeys(shared, "both branches share it"))
            after = dict.fromkeys(origin, f"{op} follows the mean of both branches")
            found.update({name: why for name, why in after.items() if name not in found})
        elif origin:
            means.update(dict.fromkeys((ref.number for ref in op.outputs), origin))
    return found


def _linear(op: Op, active: list[int], *, apart: bool) -> bool:
    """Return whether the operation on a mean is linear, with nothing of one branch beside it."""
    if apart:
        return False
    if op.name in _BY_CONSTANTS:
        return len(active) == 1
    return op.name in _LINEAR or op.func is None or op.func.is_view or op.name == "_unsafe_view"
