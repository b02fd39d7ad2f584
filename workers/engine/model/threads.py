"""How the threads of one process wait: asleep, not spinning. Import this before torch.

A step has some 250 parallel regions. On a machine shared with a broker and other workers a thread that spins at a region's end
keeps the processor from the very thread that it waits for: measured on a 2-core Xeon with one core busy elsewhere (December
2026), the linear layers of one step took 22 ms with sleeping threads and 25 to 900 ms with spinning ones.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")  # the same for Intel's and LLVM's OpenMP


def available() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
