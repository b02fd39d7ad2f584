"""How long torch's threads spin for the next piece of work before they sleep. Import this before torch.

OpenMP's default, some 10 ms, keeps a processor from the very thread that is waited for, on a machine that is shared. Sleeping
at once costs a wake-up at each of a step's 250 parallel regions: with both of two cores free, a step of 8 rows took 47 ms then,
34 with a short spin and 28 with the default; with one core busy, 48, 60 and up to 900 (December 2026). So: a short spin, and
pace.py for the rest.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # GNU's OpenMP, turns
    os.environ.setdefault("KMP_BLOCKTIME", "1")  # Intel's and LLVM's, milliseconds


def available() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def options(threads: int | None) -> tuple[int, ...]:
    """The thread counts that steps may run on, ascending; a number that somebody asked for is the only one."""
    if threads is not None:
        return (threads,)
    most = available()
    return tuple(sorted({1, -(-most // 2), most}))
