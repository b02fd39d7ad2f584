"""headrace up: everything on one machine, by one command."""

import fcntl
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx

from gateway.listener import StartError
from runtime import model_files
from runtime.settings import Settings
from scripts.stack import Stack

READY_PATIENCE_S = 180.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class UpError(Exception):
    """The stack cannot be started; the message says why in one line."""


def say(line: str) -> None:
    """Progress goes to stderr: stdout is for answers."""
    print(line, file=sys.stderr, flush=True)


def serve(settings: Settings) -> int:
    """Starts the stack, prints its URLs, and serves until SIGINT or SIGTERM."""
    try:
        with _running(settings) as stack:
            _announce(stack)
            while not _stop.asked:
                if stack.tend():
                    _write_state(stack)
                time.sleep(0.2)
            say("stopping (streams in flight are finished first)")
    except UpError as error:
        say(f"headrace up: {error}")
        return 1
    return 0


def answer_once(settings: Settings, prompt: str) -> int:
    """Answers one prompt on stdout: by the stack that runs on this home, else by one started for it."""
    from scripts.chat import stream_answer

    running = running_url(settings.home)
    if running is not None:
        return stream_answer(running, [{"role": "user", "content": prompt}])
    try:
        with _running(settings.model_copy(update={"port": 0})) as stack:
            for name in STOP_SIGNALS:
                signal.signal(name, signal.default_int_handler)
            return stream_answer(stack.url, [{"role": "user", "content": prompt}])
    except UpError as error:
        say(f"headrace up: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


def running_url(home: Path) -> str | None:
    """The gateway's URL of the stack that holds this home, if one does."""
    return _running_state(home).get("url")


def running_nats_url(home: Path) -> str | None:
    """The broker's URL of the stack that holds this home, if one does."""
    return _running_state(home).get("nats_url")


def _running_state(home: Path) -> dict[str, str]:
    lock_path, state_path = home / "lock", home / "run.json"
    if not lock_path.exists() or not state_path.exists():
        return {}
    with open(lock_path, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            state: dict[str, str] = json.loads(state_path.read_text())
            return state
    return {}


class _Stop:
    """Set by the first SIGINT or SIGTERM."""

    asked = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Signal handler; a second signal does not wait for streams to end."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


_stop = _Stop()


@contextmanager
def _running(settings: Settings) -> Iterator[Stack]:
    """A stack that is ready, stopped at the end whatever happens."""
    for name in STOP_SIGNALS:
        signal.signal(name, _stop.ask)
    try:
        settings.home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UpError(f"home {settings.home} cannot be made: {error.strerror}") from error
    with open(settings.home / "lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another headrace starts or runs on {settings.home}; wait for it, or set HEADRACE_HOME to another folder"
            raise UpError(message) from None
        if settings.model_path is None:
            model_files.ensure(model_files.CHAT, say, settings.models)
        elif not settings.model_path.exists():
            raise UpError(f"model_path {settings.model_path} does not exist")
        model_files.ensure(model_files.EMBEDDER, say, settings.models)
        try:
            stack = Stack(settings, say)
        except StartError as error:
            taken = isinstance(error.__cause__, OSError)
            raise UpError(f"{error}; name another port with --port or HEADRACE_PORT" if taken else str(error)) from error
        stack.start()
        state = settings.home / "run.json"
        try:
            _wait_ready(stack)
            _write_state(stack)
            yield stack
        finally:
            state.unlink(missing_ok=True)
            _stop_stack(stack, settings.drain_s + 5)


def _stop_stack(stack: Stack, patience_s: float) -> None:
    """Stops in order; by force once a signal comes while we wait."""
    try:
        stack.stop(patience_s)
    except KeyboardInterrupt:
        say("stopping at once")
        stack.kill()


def _write_state(stack: Stack) -> None:
    """Says where the stack is, for other commands on this home; put in place whole."""
    state = stack.home / "run.json"
    draft = state.with_suffix(".new")
    draft.write_text(json.dumps({"url": stack.url, "nats_url": stack.nats_url, "pids": stack.pids()}))
    draft.replace(state)


def _wait_ready(stack: Stack) -> None:
    """Waits until the gateway can serve, saying what is still missing; UpError when a child cannot start."""
    give_up = time.monotonic() + READY_PATIENCE_S
    shown = ""
    while not _stop.asked:
        stack.tend()
        _fail_on_broken_child(stack)
        missing = _missing(stack.url)
        if not missing:
            return
        line = "starting: waiting for " + ", ".join(missing)
        if line != shown:
            say(line)
            shown = line
        if time.monotonic() > give_up:
            raise UpError(f"not ready after {READY_PATIENCE_S:.0f} s; logs are in {stack.home / 'logs'}")
        time.sleep(0.1)
    raise UpError("stopped before it was ready")


def _fail_on_broken_child(stack: Stack) -> None:
    for child in stack.children:
        if child.failures >= 3:
            raise UpError(f"{child.name} does not start; its log is {stack.log_of(child.name)}")


def _missing(url: str) -> list[str]:
    try:
        answer = httpx.get(url + "/readyz", timeout=2.0)
        return [] if answer.status_code == 200 else list(answer.json().get("missing", ["the gateway"]))
    except (httpx.HTTPError, ValueError):
        return ["the gateway"]


def _announce(stack: Stack) -> None:
    say(f"headrace is ready at {stack.url}")
    say(f"  playground   {stack.url}/")
    say(f"  OpenAI API   {stack.url}/v1")
    say(f"  WebSocket    {stack.url.replace('http', 'ws')}/v1/ws")
    say(f"  metrics      {stack.url}/metrics")
    say("Ctrl-C stops it")
