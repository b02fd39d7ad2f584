"""On how many threads the next kernel runs. A kernel's result does not depend on it."""

import threading

import numba

_MOST = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


class _State(threading.local):
    limit = _MOST
    now = 0


_state = _State()


def limit(count: int) -> None:
    """Kernels that this thread calls from now on run on at most so many threads."""
    _state.limit = min(count, _MOST)


def use(alone: bool) -> None:
    """The next kernel runs on one thread (alone), because its work is small, or on as many as the limit allows."""
    count = 1 if alone else _state.limit
    if _state.now != count:
        numba.set_num_threads(count)
        _state.now = count
