"""Every limit that two processes must agree on, named with its unit, and the relations between them."""

# What a client may send. Checked at the gateway before anything is queued.
BODY_BYTES_MAX = 2 * 1024 * 1024
MESSAGES_MAX = 1024
STOP_STRINGS_MAX = 4
STOP_STRING_CHARS_MAX = 256
STOP_TOKEN_IDS_MAX = 64
TOP_LOGPROBS_MAX = 20  # of a chat
TOP_LOGPROBS_COMPLETION_MAX = 5
LOGIT_BIASES_MAX = 1024
LOGIT_BIAS_MAX = 100.0
REPETITION_PENALTY_MIN = 0.01  # a logit divided by it must stay finite
REPETITION_PENALTY_MAX = 100.0
SOCKET_REQUESTS_MAX = 64
TOP_K_PASSAGES_MAX = 20
PASSAGE_CHARS_MAX = 2_000
COLLECTION_CHARS_MAX = 64
DEADLINE_MS_MAX = 3_600_000
TOKENS_PER_REQUEST_MAX = 1_000_000
IDEMPOTENCY_KEY_CHARS_MAX = 255

# What the broker carries. A message is one msgpack body behind a version byte. Text costs at most twice
# its JSON bytes once it is parsed and packed, and retrieval adds at most its passages.
PAYLOAD_BYTES_MAX = 8 * 1024 * 1024
PART_BYTES_MAX = PAYLOAD_BYTES_MAX // 2  # of an answer that is said in one message; the rest of it follows in others

# Leases (seconds).
ACK_WAIT_S = 5.0
BEAT_S = 1.0
ATTEMPTS_MAX = 5  # of work whose failure is told
DELIVERIES_MAX = 10  # of work whose holders die without a word

# Presence (seconds): a worker says that it is there every PRESENCE_S and is gone after PRESENCE_TIMEOUT_S.
PRESENCE_S = 1.0
PRESENCE_TIMEOUT_S = 3.5

# A stage whose last ready worker went less than this ago (seconds) still gets work: its queue is durable, a successor comes.
SUCCESSION_S = 30.0

# A published message id is remembered by the broker for this long (seconds).
DUPLICATE_WINDOW_S = 120.0

# Token logs (seconds, bytes): what is older or beyond is gone, and a resume is answered replay_expired.
LOG_AGE_S = 900.0
LOG_BYTES_MAX = 256 * 1024 * 1024

END_BYTES_MAX = 512 * 1024 * 1024  # finished answers, on file, for as long as the logs

# The work queue (seconds, bytes): full means that new work is refused, never that old work is dropped.
WORK_AGE_S = 24 * 3600.0
WORK_BYTES_MAX = 1024 * 1024 * 1024
ACK_PENDING_MAX = 20_000  # work items held at once by all replicas of a stage: above all their slots together
DEAD_AGE_S = 7 * 24 * 3600.0
DEAD_BYTES_MAX = 256 * 1024 * 1024

# A cancel mark outlives the longest wait in a queue (seconds).
CANCEL_MARK_S = DEADLINE_MS_MAX / 1000 + 60

# Whose a request is, and which one an Idempotency-Key stands for: known for as long as anything of it can be (seconds, bytes).
REQUEST_RECORD_S = DEADLINE_MS_MAX / 1000 + LOG_AGE_S + 60
REQUEST_BYTES_MAX = 512 * 1024 * 1024

# A client that takes nothing for this long (seconds) loses its stream, and after as long again its connection.
SLOW_READER_S = 30.0
GIVEN_UP_S = 30.0

assert 2 * BODY_BYTES_MAX + TOP_K_PASSAGES_MAX * PASSAGE_CHARS_MAX * 4 < PAYLOAD_BYTES_MAX
assert PASSAGE_CHARS_MAX * 4 * TOP_K_PASSAGES_MAX < PAYLOAD_BYTES_MAX - PART_BYTES_MAX  # the end has the passages
assert DEADLINE_MS_MAX / 1000 < WORK_AGE_S
assert DEADLINE_MS_MAX / 1000 + LOG_AGE_S < REQUEST_RECORD_S
assert 3 * BEAT_S < ACK_WAIT_S
assert 3 * PRESENCE_S < PRESENCE_TIMEOUT_S < SUCCESSION_S
assert ATTEMPTS_MAX < DELIVERIES_MAX
assert DELIVERIES_MAX * ACK_WAIT_S < DUPLICATE_WINDOW_S
