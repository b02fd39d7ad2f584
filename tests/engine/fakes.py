"""An honest runner without torch, and the sequential reference that every schedule must agree with.

The runner keeps its cache in blocks and offsets like the real one, and draws a token from (seed, position) and all
that it reads in the cache. So a block that is shared, lost, written with a hole or released too early changes the
text or trips a check.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.envelope import Sampling
from workers.engine.detokenizer import Detokenizer
from workers.engine.engine import GenerationRequest
from workers.engine.finish import Emitter
from workers.engine.plan import Chunk, StepPlan, StepResult

EOS = 0
TOKEN_BYTES: tuple[bytes, ...] = (
    *(b"", b" a", b"b", b"STO", b"P", b"S", b" TO", b"\n", b"one two", b"x", b"y"),
    *(b"\xf0\x9f", b"\x98", b"\x80", b"\xc3", b"\xa9"),
)


class FakeVocabulary:
    """Sixteen tokens: an end, words, and pieces of characters."""

    token_bytes_table = TOKEN_BYTES
    eos_ids = frozenset({EOS})
    vocabulary_size = len(TOKEN_BYTES)


def draw(seed: int, ids: Sequence[int]) -> int:
    """The token at position len(ids): a hash of the seed and of all tokens before; the end one time in forty."""
    noise = zlib.crc32(f"{seed} {len(ids)} {tuple(ids)}".encode())
    return EOS if noise % 40 == 0 else 1 + noise // 40 % (len(TOKEN_BYTES) - 1)


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a cache slot holds: a position's token, and all before it as a hash that starts with the tenant."""

    place: int
    token: int
    prefix: int


class FakeRunner:
    """Checks each plan against its cache, then draws. Remembers the size of every step.

    tenants: whose each request is; a row that reads what another tenant's row wrote fails.
    """

    def __init__(self, block_tokens: int, budget_tokens: int, blocks: int) -> None:
        self.block_tokens = block_tokens
        self.budget_tokens = budget_tokens
        self.blocks = blocks
        self.plans: list[StepPlan] = []
        self.tenants: dict[str, str] = {}
        self.fault: Exception | None = None
        self._cache: dict[tuple[int, int], _Entry] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """Carries out one plan: all rows write, then all read, as a layer of the real model does."""
        if self.fault is not None:
            raise self.fault
        self.plans.append(plan)
        assert 0 < plan.tokens <= self.budget_tokens, f"{plan.tokens} tokens in a step of {self.budget_tokens}"
        assert len({chunk.request for chunk in plan.chunks}) == len(plan.chunks), "two chunks of one sequence"
        self._check_tables(plan)
        for chunk in plan.chunks:
            self._write(chunk)
        drawn = {chunk.request: self._draw(chunk) for chunk in plan.chunks}
        return StepResult({request: token for request, token in drawn.items() if token is not None})

    def _check_tables(self, plan: StepPlan) -> None:
        """Tables may share the blocks that no chunk of this step writes."""
        readers = Counter(block for chunk in plan.chunks for block in chunk.block_table)
        assert all(0 <= block < self.blocks for block in readers)
        for chunk in plan.chunks:
            assert chunk.token_ids, "an empty chunk"
            assert len(chunk.block_table) == -(-chunk.end // self.block_tokens), f"{chunk.block_table} up to {chunk.end}"
            written = chunk.block_table[chunk.start // self.block_tokens :]
            assert all(readers[block] == 1 for block in written), f"{chunk.request} writes to a block that others read"

    def _write(self, chunk: Chunk) -> None:
        prefix = self._root(chunk)
        if chunk.start:
            before = self._cache.get(self._slot(chunk, chunk.start - 1))
            assert before is not None, f"{chunk} follows a slot that nobody wrote"
            prefix = before.prefix
        for place, token in enumerate(chunk.token_ids, chunk.start):
            prefix = _chain(prefix, token)
            self._cache[self._slot(chunk, place)] = _Entry(place, token, prefix)

    def _draw(self, chunk: Chunk) -> int | None:
        prefix, read = self._root(chunk), []
        for place in range(chunk.end):
            entry = self._cache.get(self._slot(chunk, place))
            assert entry is not None, f"{chunk} reads a slot that nobody wrote, position {place}"
            prefix = _chain(prefix, entry.token)
            assert (entry.place, entry.prefix) == (place, prefix), f"{chunk} reads {entry} at position {place}"
            read.append(entry.token)
        return draw(chunk.sampling.seed, read) if chunk.samples else None

    def _root(self, chunk: Chunk) -> int:
        return zlib.crc32(self.tenants.get(chunk.request, "").encode())

    def _slot(self, chunk: Chunk, place: int) -> tuple[int, int]:
        return chunk.block_table[place // self.block_tokens], place % self.block_tokens


def _chain(prefix: int, token: int) -> int:
    return zlib.crc32(f"{prefix} {token}".encode())


def reference(request: GenerationRequest, context_tokens: int) -> tuple[list[int], list[str], str, int]:
    """(ids, texts, reason, completion tokens) of a request that runs alone, without cache, steps or scheduler."""
    limit = context_tokens - len(request.prompt_ids)
    limit = min(limit, request.sampling.max_tokens or limit)
    emitter = Emitter(request.sampling, FakeVocabulary.eos_ids, limit, Detokenizer(TOKEN_BYTES))
    known = list(request.prompt_ids)
    ids: list[int] = []
    texts: list[str] = []
    while True:
        known.append(draw(request.sampling.seed, known))
        emission = emitter.push(known[-1])
        ids += emission.ids
        texts += emission.texts
        if emission.reason:
            return ids, texts, emission.reason, emitter.drawn


def sampling(seed: int = 1, **changes: Any) -> Sampling:
    """Sampling with a seed."""
    return Sampling.model_validate({"seed": seed, **changes})
