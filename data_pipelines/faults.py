"""Bad records: counted, named, set aside, and too many of them stop the job."""

from __future__ import annotations

import warnings
from collections.abc import Mapping


class FaultBudgetError(ValueError):
    """More bad records than the fault budget allows; the message names them with their reasons."""


class FaultWarning(UserWarning):
    """A record was set aside; the message names it and says why."""


class Faults:
    """The records set aside so far, by name with the reason; `budget` is how many may be (each counts once)."""

    def __init__(self, budget: int):
        if budget < 0:
            raise ValueError(f"fault_budget={budget}: use 0 or more")
        self.budget = budget
        self.reasons: dict[str, str] = {}

    def add(self, name: str, reason: str) -> None:
        """Set a record aside. FaultBudgetError once there are more than the budget."""
        if name in self.reasons:
            return
        self.reasons[name] = reason
        warnings.warn(f"record {name} is set aside: {reason}", FaultWarning, stacklevel=2)
        if len(self.reasons) > self.budget:
            listed = "\n".join(f"  {name}: {why}" for name, why in self.reasons.items())
            raise FaultBudgetError(
                f"{len(self.reasons)} bad records, the fault budget is {self.budget}: repair them or raise it\n{listed}"
            )

    def restore(self, reasons: Mapping[str, str]) -> None:
        """Take over the records set aside before a restart."""
        self.reasons = dict(reasons)
