"""Decide for every unit of the wide model in which branch it lies.

United units form components. The components of both twins are matched by the slices of tensors in
which they appear. As many in the wide model as in the narrow one are shared by both branches. Twice
as many belong to both: the first half, in order, to the first branch, the second to the second.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rbdc.structure.units import Units

Keys = np.ndarray[tuple[int], np.dtype[np.uint64]]
SHARED, FIRST, SECOND, UNMATCHED, UNKNOWN = 0, 1, 2, -1, -2


class Conflict(Exception):  # noqa: N818 - it is collected, not shown
    """A tensor whose layout cannot be found; the message is the cause."""


@dataclass(frozen=True, slots=True)
class Branches:
    """The branch of each wide unit, and its component in the narrow model."""

    narrow: Tensor
    """Component of each narrow unit."""
    branch: Tensor
    """Keys = np.ndarray[tuple[int], np.dtype[np.uint64]]
SHARED, FIRST, SECOND or UNMATCHED, of each wide unit."""
    source: Tensor
    """Narrow component that each wide unit corresponds to."""

    def parts(self, narrow: Tensor, wide: Tensor, axis: int) -> tuple[Tensor, bool]:
        """Return the branch of each entry along an axis, and whether the twins' orders agree."""
        units = wide.movedim(axis, 0).reshape(wide.shape[axis], -1)
        known = units != 0
        branch = self.branch[units].where(known, torch.tensor(UNKNOWN))
        found = branch.amax(dim=1)
        if not bool(((branch == found[:, None]) | ~known).all()):
            raise Conflict(f"entries of one position on axis {axis} lie in different branches")
        of_narrow = self.narrow[narrow.movedim(axis, 0).reshape(narrow.shape[axis], -1)]
        for which in (FIRST, SECOND):
            own = units[found == which]
            if own.shape == of_narrow.shape and not torch.equal(
                self.source[own].where(own != 0, 0), of_narrow.where(own != 0, 0)
            ):
                return found, False
        return found, True


def runs_of(branch: Tensor, axis: int) -> tuple[int, ...]:
    """Return the sizes of the parts along an axis, each of the first branch, then the second."""
    values, counts = torch.unique_consecutive(branch, return_counts=True)
    if UNMATCHED in values:
        raise Conflict(f"units along axis {axis} have no counterpart in the narrow model")
    if SHARED in values:
        raise Conflict(f"axis {axis} doubles, but both branches share units along it")
    if UNKNOWN in values:
        raise Conflict(f"no operation says in which branch the entries along axis {axis} lie")
    alternate = torch.arange(len(values)) % 2 + FIRST
    if len(values) % 2 or not torch.equal(values.long(), alternate):
        raise Conflict(f"the branches along axis {axis} do not alternate")
    if not torch.equal(counts[::2], counts[1::2]):
        raise Conflict(f"the branches along axis {axis} alternate in parts of different size")
    return tuple(counts[::2].tolist())


def match(narrow: Units, wide: Units) -> Branches:
    """Match the components of both twins."""
    (of_narrow, narrow_classes), (of_wide, wide_classes) = map(_components, (narrow, wide))
    branch = torch.full((len(of_wide),), SHARED, dtype=torch.int64)
    source = torch.zeros(len(of_wide), dtype=torch.int64)
    for fingerprint, members in wide_classes.items():
        known = narrow_classes.get(fingerprint, [])
        if len(members) == len(known):
            source[members] = torch.tensor(known)
        elif len(members) == 2 * len(known):
            branch[members] = torch.tensor([FIRST, SECOND]).repeat_interleave(len(known))
            source[members] = torch.tensor(known).repeat(2)
        else:
            branch[members] = UNMATCHED
    return Branches(of_narrow, branch[of_wide], source[of_wide])


def _components(units: Units) -> tuple[Tensor, dict[int, list[int]]]:
    """Return the component of each unit, and the components with each fingerprint, in order."""
    roots = units.find(torch.arange(len(units.parent)))
    prints = np.zeros(len(roots), dtype=np.uint64)
    if units.seen:
        owners = roots[torch.cat([owner for owner, _ in units.seen])].numpy()
        keys = torch.cat([key for _, key in units.seen]).numpy()
        order = np.lexsort((keys, owners))
        owners, keys = owners[order], keys[order].astype(np.uint64)
        first = np.ones(len(keys), dtype=bool)
        first[1:] = (keys[1:] != keys[:-1]) | (owners[1:] != owners[:-1])
        np.add.at(prints, owners[first], _scrambled(keys[first]))
    classes: dict[int, list[int]] = defaultdict(list)
    for root in torch.unique(roots).tolist():
        if root:
            classes[int(prints[root])].append(root)
    return roots, classes


def _scrambled(keys: Keys) -> Keys:
    """Return well-mixed numbers, whose sums do not collide (the finaliser of splitmix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return keys ^ (keys >> np.uint64(31))
