"""Where compiled kernels are kept: one folder for each state of the kernels' sources.

numba looks only at the file of the function that it compiles; the pieces that are built into it lie in other files, and code
compiled before a change there would be found again. Import this before any kernel is defined.
"""

import hashlib
import os
from pathlib import Path

import numba
import structlog

log = structlog.get_logger()

_ENGINE = Path(__file__).parent.parent
_SOURCES = ("model/lanes.py", "model/products.py", "model/row_kernels.py", "attention/cpu_kernels.py")


def _folder() -> Path:
    digest = hashlib.sha256(b"".join((_ENGINE / name).read_bytes() for name in _SOURCES)).hexdigest()[:16]
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "headrace" / "kernels" / digest


if not os.environ.get("NUMBA_CACHE_DIR"):
    try:
        _folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.debug("kernel_cache", error=str(error), instead="a place that numba finds")
    else:
        numba.config.CACHE_DIR = str(_folder())  # type: ignore[attr-defined]
