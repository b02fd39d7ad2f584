"""Streams, consumers and buckets as they must be; declared at every connect and reconnect, drift is put right and told.

The work queue is on file (a request that was accepted survives a broker's restart), and so are finished answers. The token logs
of unfinished ones are in memory: what they lose, their publishers say again.
"""

from typing import Any

import structlog
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError

from schemas import limits, subjects

log = structlog.get_logger()


def _streams(log_bytes: int) -> list[api.StreamConfig]:
    common: dict[str, Any] = {"duplicate_window": limits.DUPLICATE_WINDOW_S, "allow_direct": True}
    logs: dict[str, Any] = {
        "retention": api.RetentionPolicy.LIMITS,
        "storage": api.StorageType.MEMORY,
        "discard": api.DiscardPolicy.OLD,
        "max_age": limits.LOG_AGE_S,
        "max_bytes": log_bytes,
        "max_msg_size": limits.PAYLOAD_BYTES_MAX,
    }
    return [
        api.StreamConfig(
            name=subjects.WORK_STREAM,
            subjects=[subjects.WORK_ALL],
            retention=api.RetentionPolicy.WORK_QUEUE,
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.NEW,
            max_bytes=limits.WORK_BYTES_MAX,
            max_age=limits.WORK_AGE_S,
            max_msg_size=limits.PAYLOAD_BYTES_MAX,
            **common,
        ),
        api.StreamConfig(name=subjects.RAW_STREAM, subjects=[subjects.RAW_ALL], **logs, **common),
        api.StreamConfig(name=subjects.REPLY_STREAM, subjects=[subjects.REPLY_ALL], **logs, **common),
        api.StreamConfig(
            name=subjects.END_STREAM,
            subjects=[subjects.END_ALL],
            retention=api.RetentionPolicy.LIMITS,
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.OLD,
            max_bytes=limits.END_BYTES_MAX,
            max_age=limits.LOG_AGE_S,
            max_msg_size=limits.PAYLOAD_BYTES_MAX,
            **common,
        ),
        api.StreamConfig(
            name=subjects.DEAD_STREAM,
            subjects=[subjects.DEAD_ALL],
            retention=api.RetentionPolicy.LIMITS,
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.OLD,
            max_bytes=limits.DEAD_BYTES_MAX,
            max_age=limits.DEAD_AGE_S,
            max_msg_size=limits.PAYLOAD_BYTES_MAX,
            **common,
        ),
    ]


def _buckets() -> list[api.KeyValueConfig]:
    common: dict[str, Any] = {"storage": api.StorageType.FILE, "direct": True}
    requests: dict[str, Any] = {"ttl": limits.REQUEST_RECORD_S, "max_bytes": limits.REQUEST_BYTES_MAX}
    return [
        api.KeyValueConfig(bucket=subjects.CANCEL_BUCKET, ttl=limits.CANCEL_MARK_S, **common),
        api.KeyValueConfig(bucket=subjects.REQUEST_BUCKET, **requests, **common),
        api.KeyValueConfig(bucket=subjects.IDEMPOTENCY_BUCKET, **requests, **common),
        api.KeyValueConfig(bucket=subjects.PROGRESS_BUCKET, **requests, **common),
    ]


async def declare(js: JetStreamContext, log_bytes: int) -> None:
    """Makes every stream and bucket, or updates one that differs from what is stated here."""
    for wanted in _streams(log_bytes):
        await _declare_stream(js, wanted)
    for bucket in _buckets():
        try:
            await js.create_key_value(bucket)
        except APIError as error:
            if error.err_code != 10058:  # the bucket is there with another configuration
                raise
            log.warning("drift", bucket=bucket.bucket, error=str(error))


async def _declare_stream(js: JetStreamContext, wanted: api.StreamConfig) -> None:
    assert wanted.name is not None
    try:
        found = (await js.stream_info(wanted.name)).config
    except NotFoundError:
        await js.add_stream(wanted)
        return
    changed = {
        name: (getattr(found, name), value)
        for name, value in vars(wanted).items()
        if value is not None and getattr(found, name) != value
    }
    if changed:
        log.warning("drift", stream=wanted.name, changed={k: [str(a), str(b)] for k, (a, b) in changed.items()})
        await js.update_stream(wanted)


async def declare_consumer(js: JetStreamContext, subject: str, consumer: str) -> None:
    """Makes the durable consumer that all replicas of a stage share.

    max_deliver is unlimited: the stage loop ends poison work itself, so that no message ever becomes invisible.
    """
    await js.add_consumer(
        subjects.WORK_STREAM,
        api.ConsumerConfig(
            durable_name=consumer,
            filter_subject=subject,
            ack_policy=api.AckPolicy.EXPLICIT,
            deliver_policy=api.DeliverPolicy.ALL,
            ack_wait=limits.ACK_WAIT_S,
            max_deliver=-1,
            max_ack_pending=limits.ACK_PENDING_MAX,
        ),
    )
