"""An event loop on a manual clock, and processes on it that can be killed and frozen between any two steps.

Time stands still while anything is ready to run and then jumps to the next timer, so hours cost milliseconds, and a run depends
on its seed alone. Whatever was started in a process's context belongs to that process: a dead one is never stepped again
(nothing is cleaned up), a frozen one is stepped when it thaws.
"""

import asyncio
import contextvars
import functools
import heapq
from collections.abc import Callable, Coroutine
from typing import Any, Literal

OWNER: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("OWNER", default=None)

THREAD_S = 0.001
STEPS_MAX = 1_000_000  # a run that needs more turns in a circle


class Stuck(AssertionError):
    """Everybody waits for somebody, and no timer is set; or somebody turns in a circle."""


class Process:
    """What one operating system process would be: all that runs in its context."""

    def __init__(self, loop: "VirtualTimeLoop", name: str) -> None:
        self.name = name
        self.state: Literal["running", "frozen", "dead"] = "running"
        self.on_kill: list[Callable[[], None]] = []
        self.held: list[asyncio.Handle] = []
        self._loop = loop
        loop.processes.append(self)
        self._context = contextvars.copy_context()
        self._context.run(OWNER.set, self)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine in the process."""
        return self._loop.create_task(work, context=self._context)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function in the process, at once; not from within the process."""
        return self._context.run(function, *arguments)

    def kill(self) -> None:
        """It is gone between two steps: no handler runs, nothing is closed."""
        if self.state != "dead":
            self.state = "dead"
            for callback in self.on_kill:
                callback()

    def freeze(self) -> None:
        """It is stopped; the world goes on."""
        if self.state == "running":
            self.state = "frozen"

    def thaw(self, timers_first: bool) -> None:
        """It goes on, with the timers that ran out meanwhile before or after the messages that came meanwhile."""
        if self.state == "frozen":
            self.state = "running"
            held, self.held = self.held, []
            held.sort(key=lambda handle: isinstance(handle, asyncio.TimerHandle) != timers_first)
            self._loop.make_ready(held)


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Runs callbacks in order of their time. errors: what callbacks and tasks raised and nobody looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[dict[str, Any]] = []
        self.processes: list[Process] = []
        self._now = 0.0
        self._steps = 0
        self._ghosts = False  # at the end dead processes are cleaned up after all, for Python's sake
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now

    def make_ready(self, handles: list[asyncio.Handle]) -> None:
        """Runs these next, in this order."""
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """A thread's work is done at once, and known a moment later."""
        answer = self.create_future()
        try:
            settle = functools.partial(answer.set_result, func(*args))
        except Exception as error:
            settle = functools.partial(answer.set_exception, error)
        self.call_later(THREAD_S, lambda: None if answer.done() else settle())
        return answer

    def finish(self) -> None:
        """Ends every task, those of dead and frozen processes too, so that nothing is left to the garbage collector."""
        self._ghosts, self._steps = True, 0
        for _ in range(5):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                break
            for process in self.processes:
                self.make_ready(process.held)
                process.held = []
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=30.0))
        self.close()

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            if not scheduled:
                raise Stuck("everybody waits for somebody, and no timer is set")
            self._now = max(self._now, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self._now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                self._step(handle)

    def _step(self, handle: asyncio.Handle) -> None:
        self._steps += 1
        if self._steps > STEPS_MAX:
            raise Stuck(f"{STEPS_MAX} steps by {self._now} s; the last: {handle}")
        owner = handle._context.get(OWNER)  # type: ignore[attr-defined]
        if owner is None or owner.state == "running" or self._ghosts:
            handle._run()
        else:
            owner.held.append(handle)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when their time comes."""

    def _process_events(self, event_list: Any) -> None:
        """There is no I/O."""

    def _write_to_self(self) -> None:
        """There is nobody to wake."""
