"""The engine's numbers in Prometheus' text format."""

import resource

from wp2_jax.serve.engine import Numbers

_GAUGES = {
    "worlds_playing": "Worlds that have a place.",
    "worlds_waiting": "Worlds in the queue.",
    "snapshot_bytes": "States kept to fork from.",
    "turn_busy_seconds": "How long the present turn has taken.",
    "ready": "1 if the engine makes chunks.",
    "connections": "Clients connected.",
    "resident_bytes": "Memory of the process.",
}
_COUNTERS = {
    "pictures": "Pictures made.",
    "worlds": "Worlds asked for.",
    "restarts": "Restarts of the engine after a failure.",
}
_QUANTILES = (0.5, 0.9, 0.99)


def text(numbers: Numbers, connections: int) -> str:
    """All metrics; `connections` clients are connected."""
    lines: list[str] = []

    def add(name: str, kind: str, said: str, *samples: tuple[str, float]) -> None:
        lines.append(f"# HELP wp2_{name} {said}")
        lines.append(f"# TYPE wp2_{name} {kind}")
        lines.extend(f"wp2_{name}{label} {value!r}" for label, value in samples)

    for name, value in (numbers.gauges | {"connections": connections, "resident_bytes": resident_bytes()}).items():
        add(name, "gauge", _GAUGES[name], ("", value))
    seconds = sorted(numbers.seconds)
    quantiles = [(f'{{quantile="{q}"}}', seconds[int(q * (len(seconds) - 1))]) for q in _QUANTILES if seconds]
    totals = (("_sum", numbers.seconds_total), ("_count", numbers.counts["chunks"]))
    add("chunk_seconds", "summary", "Seconds that a chunk took; quantiles of the latest.", *quantiles, *totals)
    for name, said in _COUNTERS.items():
        add(f"{name}_total", "counter", said, ("", numbers.counts[name]))
    ended = [(key.removeprefix("ended_"), count) for key, count in sorted(numbers.counts.items()) if "ended_" in key]
    add("worlds_ended_total", "counter", "Worlds ended.", *((f'{{reason="{reason}"}}', n) for reason, n in ended))
    return "\n".join(lines) + "\n"


def resident_bytes() -> int:
    """Of this process, now; the most it ever had where that is not known."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
