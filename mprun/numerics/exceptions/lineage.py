"""Where the numbers that are not finite come from: each has an origin, and hands it on.

An op that makes such a number out of finite ones is an origin. What it spoils, and what is computed
from that, has the same origin, so that at the end of a step the gradient that is NaN names the op
it all began with, and an infinity that served as a mask is told from one that did harm.

Only tensors that are not finite are kept track of, by their memory, which views share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, UntypedStorage

from mprun._torch import StorageWeakRef
from mprun.numerics.exceptions.found import FpException, WrongResult
from mprun.numerics.exceptions.tensors import numbers


@dataclass(eq=False)
class Origin:
    """An op that made numbers that are not finite, or another source of them."""

    exception: FpException
    reached: dict[str, None] = field(default_factory=dict)
    """What it spoiled that outlasts the step, in order."""
    owner: str = ""
    """The first parameter or buffer among that, by its name."""

    upward: bool = False
    """Whether it is an overflow to +inf or NaN."""
    distorts: bool = False
    """Whether a finite number that was made of it is wrong: x / inf is 0."""
    wrong: WrongResult | None = None
    """The first such number; None where float64 could not tell."""
    lasts: bool = False
    """Whether that outlasts a step that was skipped, too."""

    def makes(self, result: WrongResult) -> None:
        """A finite number that was made of it is wrong."""
        self.distorts = True
        self.wrong = self.wrong or result

    def unchecked(self) -> None:
        """What is made of it cannot be compared with float64.

        Minus infinity is what masks are made of, and right as a rule; anything else is not.
        """
        self.distorts |= self.upward

    @property
    def module(self) -> str:
        """The path of the module of `owner`."""
        return self.owner.rpartition(".")[0]

    @property
    def deliberate(self) -> bool:
        """Whether the program wrote it, or it was there before: no fault where it does no harm."""
        return self.exception.kind in ("constant", "outside")


def reach(origins: Iterable[Origin], what: str, owner: str = "") -> None:
    """Note that `what`, which outlasts the step, was spoiled by these.

    A mask beside a fault is not to blame, nor is one beside an infinity from outside.

    Args:
        origins: those of `what`.
        what: a gradient, a parameter, the loss.
        owner: the name of the parameter it is or belongs to.
    """
    every = list(origins)
    faults = [x for x in every if not x.deliberate]
    outside = [x for x in every if x.exception.kind == "outside"]
    for origin in faults or outside or every:
        origin.reached[what] = None
        origin.owner = origin.owner or owner


class Lineage:
    """The origins of what is in memory."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[StorageWeakRef, frozenset[Origin]]] = {}

    def of(self, x: Tensor) -> frozenset[Origin]:
        """The origins of a tensor that is not finite; none where it was not met before."""
        kept = self._of.get(memory(x))
        return frozenset() if kept is None else kept[1]

    def put(self, x: Tensor, origins: Iterable[Origin]) -> None:
        """A tensor has these origins, beside those it had."""
        # The reference keeps the address from being given out again, not the memory.
        reference = StorageWeakRef(storage(x))
        self._of[memory(x)] = (reference, self.of(x) | frozenset(origins))

    def forget_dead(self) -> None:
        """Let go of memory that was freed."""
        self._of = {key: kept for key, kept in self._of.items() if not kept[0].expired()}


def storage(x: Tensor) -> UntypedStorage:
    """The memory that a tensor's numbers are in."""
    values = numbers(x)
    return (x if values is None else values).untyped_storage()


def memory(x: Tensor) -> int:
    """The address of a tensor's memory, the same for its views."""
    return int(storage(x)._cdata)
