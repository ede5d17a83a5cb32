"""What a compiled program moves between devices, read from its text: each collective as often as its loops run it."""

import collections
import re

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_BYTES = {"pred": 1, "bf16": 2, "c64": 8}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
_TIMES = re.compile(r"known_trip_count\D*(\d+)")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")


def collectives(text: str) -> dict[str, int]:
    """Bytes of the results of each kind of collective on one device, over one run of the program.

    A loop whose number of turns the compiler does not know counts once.
    """
    computations, entry = _computations(text)
    known: dict[str, collections.Counter[str]] = {}

    def moved(name: str) -> collections.Counter[str]:
        if name not in known:
            total: collections.Counter[str] = collections.Counter()
            for line in computations.get(name, ()):
                match = _INSTRUCTION.match(line)
                if match is None:
                    continue
                result, operation = match.groups()
                kind = operation.removesuffix("-done")
                if kind in KINDS:
                    total[kind] += _size(result)
                # The done half of a pair names the computation of its start again.
                if operation in ("async-done", "async-update"):
                    continue
                times = _TIMES.search(line) if operation == "while" else None
                for one, several in _CALLED.findall(line):
                    for called in (one, *re.findall(r"[\w.\-]+", several)):
                        for what, count in moved(called).items():
                            total[what] += count * (int(times[1]) if times else 1)
            known[name] = total
        return known[name]

    return {kind: moved(entry)[kind] for kind in KINDS if moved(entry)[kind]}


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of each computation, and the name of the entry."""
    found: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        match = _COMPUTATION.match(line)
        if match is not None:
            current = found.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line.strip())
    return found, entry


def _size(result: str) -> int:
    """Bytes of the arrays in the text of a result's type."""
    total = 0
    for dtype, shape in _ARRAY.findall(result):
        size = _BYTES.get(dtype) or max(1, int(re.search(r"\d+", dtype)[0]) // 8)  # pyright: ignore[reportOptionalSubscript]
        for extent in filter(None, shape.split(",")):
            size *= int(extent)
        total += size
    return total
