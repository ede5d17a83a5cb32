"""Whether an event that was asked for is seen: shares by kind, and which kinds are taken for which."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

# Pictures shown to the classifier: the last one before an event's first picture, and these many after it.
OFFSETS = (-1, 3, 7, 15, 27, 43)


def pictures_of(first: int, count: int) -> np.ndarray:
    """Indices of the pictures that show an event which begins at picture `first` of a video of `count` pictures."""
    return np.clip(first + np.asarray(OFFSETS), 0, count - 1)


@dataclasses.dataclass(frozen=True)
class Score:
    """`right` has an entry an event, 1 where the right kind was seen; `by_kind` groups them."""

    right: list[float]
    by_kind: dict[str, list[float]]
    confusion: np.ndarray  # [asked for, seen], counts


def score(asked: Sequence[int], seen: Sequence[int], kinds: Sequence[str]) -> Score:
    """Score events by their kinds' numbers."""
    confusion = np.zeros((len(kinds), len(kinds)), int)
    by_kind: dict[str, list[float]] = {}
    right = []
    for wanted, found in zip(asked, seen, strict=True):
        confusion[wanted, found] += 1
        right.append(float(wanted == found))
        by_kind.setdefault(kinds[wanted], []).append(right[-1])
    return Score(right, by_kind, confusion)


def categories(by_kind: Mapping[str, Sequence[float]], table: Mapping[str, Sequence[str]]) -> dict[str, list[float]]:
    """`by_kind` by category, where `table` lists the kinds of each."""
    return {name: [value for kind in kinds for value in by_kind.get(kind, ())] for name, kinds in table.items()}
