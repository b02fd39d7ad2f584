"""The only file with names of subjects, streams, consumers and buckets.

    hr.work.<stage>                      work queue (file): rails, retrieval, guard
    hr.work.engine.<model>.<class>       work queue (file): generation, one lane a model and priority class
    hr.raw.<request>                     tokens before the output rails   ┐ plain subjects, captured by
    hr.reply.<request>                   tokens and the terminal event    ┘ bounded streams
    hr.end.<raw|reply>.<request>         a finished answer as a whole (file): what a broker's death may not take
    hr.dead.<stage>                      work that failed its last attempt, with cause
    hr.ctl.cancel.<request>              broadcast: stop this request (a body names the only stage meant)
    hr.ctl.alive.<stage>.<worker>        broadcast: a worker says that it is there, and how it is
    hr.ctl.rollcall                      broadcast: everybody say that you are there

    bucket hr_cancel                     <request>: it was cancelled
    bucket hr_request                    <request>: whose it is and how it was asked
    bucket hr_idempotency                <digest of tenant and key>: the request that a key stands for
    bucket hr_progress                   <raw|reply>.<request>: the last repeated attempt that brought it forward

Names from outside never become subject tokens raw: request ids are ours, models map to checked slugs.
"""

import hashlib
import re
import secrets
from typing import Literal

Stage = Literal["rails", "retrieval", "engine", "guard"]
Priority = Literal["interactive", "standard", "batch"]

STAGES: tuple[Stage, ...] = ("rails", "retrieval", "engine", "guard")
PRIORITIES: tuple[Priority, ...] = ("interactive", "standard", "batch")

WORK_STREAM = "HR_WORK"
RAW_STREAM = "HR_RAW"
REPLY_STREAM = "HR_REPLY"
END_STREAM = "HR_END"
DEAD_STREAM = "HR_DEAD"
CANCEL_BUCKET = "hr_cancel"
REQUEST_BUCKET = "hr_request"
IDEMPOTENCY_BUCKET = "hr_idempotency"
PROGRESS_BUCKET = "hr_progress"

WORK_ALL = "hr.work.>"
RAW_ALL = "hr.raw.*"
REPLY_ALL = "hr.reply.*"
END_ALL = "hr.end.*.*"
DEAD_ALL = "hr.dead.*"
CANCEL_ALL = "hr.ctl.cancel.*"
ALIVE_ALL = "hr.ctl.alive.*.*"
ROLLCALL = "hr.ctl.rollcall"

_REQUEST_ID = re.compile(r"[0-9a-f]{32}")
_SLUG = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def new_request_id() -> str:
    """128 random bits as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def is_request_id(text: str) -> bool:
    """Whether text could be one of our request ids."""
    return _REQUEST_ID.fullmatch(text) is not None


def slug(name: str) -> str:
    """A subject-safe, stable name for a name from outside: itself when safe, else a readable start and a digest."""
    if _SLUG.fullmatch(name):
        return name
    start = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:12]
    return f"{start or 'x'}-{digest}"


def work(stage: Stage, model: str | None = None, priority: Priority | None = None) -> str:
    """The subject that carries work to a stage; the engine's has the model's slug and the priority class."""
    if stage != "engine":
        return f"hr.work.{stage}"
    assert model is not None, "engine work names its model"
    assert priority is not None, "engine work names its class"
    return f"hr.work.engine.{slug(model)}.{priority}"


def work_consumer(stage: Stage, model: str | None = None, priority: Priority | None = None) -> str:
    """The durable consumer behind work(...): shared by all replicas of the stage, filters disjoint."""
    return work(stage, model, priority).removeprefix("hr.work.").replace(".", "-")


def raw(request_id: str) -> str:
    """Tokens of a request before its output rails."""
    return f"hr.raw.{request_id}"


def reply(request_id: str) -> str:
    """Tokens and the terminal event of a request, as its client gets them."""
    return f"hr.reply.{request_id}"


def end(subject: str) -> str:
    """Where the whole of a finished answer is kept that was published on a raw or reply subject."""
    return "hr.end." + subject.removeprefix("hr.")


def progress(subject: str) -> str:
    """The bucket key of how far the attempts at a raw or reply subject came."""
    return subject.removeprefix("hr.")


def replied(subject: str) -> str | None:
    """Whose reply subject this is; None for any other subject."""
    return subject.removeprefix(REPLY_ALL[:-1]) if subject.startswith(REPLY_ALL[:-1]) else None


def failures(stage: Stage, request_id: str) -> str:
    """The bucket key of how often a stage's work on a request failed and said so."""
    return f"failures.{stage}.{request_id}"


def ended(request_id: str) -> str:
    """The bucket key that says that a request has ended, for when its log is gone."""
    return f"ended.{request_id}"


def dead(stage: Stage) -> str:
    """Where work goes that failed its last attempt."""
    return f"hr.dead.{stage}"


def cancel(request_id: str) -> str:
    """Broadcast that stops one request."""
    return f"hr.ctl.cancel.{request_id}"


def alive(stage: Stage, worker_id: str) -> str:
    """Broadcast by which a worker says that it is there."""
    return f"hr.ctl.alive.{stage}.{worker_id}"


def idempotency(tenant: str, key: str) -> str:
    """The bucket key of a tenant's Idempotency-Key."""
    return hashlib.sha256(f"{tenant}\n{key}".encode(errors="surrogatepass")).hexdigest()


def last_token(subject: str) -> str:
    """The last token of a subject: the request id of a raw, reply or cancel subject."""
    return subject.rsplit(".", 1)[1]
