"""A model that is a hash: the next token is a function of the prompt, the seed and the tokens before, and so the whole
answer is known beforehand.

FakeThread stands where the engine's thread stands, so that all of the engine's worker that is not torch is the real one.
"""

import asyncio
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from schemas.errors import HeadraceError
from schemas.events import Usage
from workers.engine.engine import Account, Finish, GenerationRequest, Output
from workers.engine.thread import Stream

WORDS = ("water ", "wheel ", "mill", ", ", "stone ", "flows ", "", "grain. ", "Über", "the ", "turns ", "race ")
SECRET = ("mail ", "bob.mill", "er@exam", "ple.com", " now ")  # across tokens, as a tokenizer would cut it
SECRET_AT = 2


@dataclass(frozen=True, slots=True)
class Script:
    """How one request goes in the engine. failures: so many attempts fail after some tokens; leaks: it tells an address."""

    tokens: int
    leaks: bool = False
    failures: int = 0


def encode(text: str) -> tuple[int, ...]:
    """A prompt as token ids."""
    return tuple(text.encode())


def next_token(prompt: tuple[int, ...], seed: int, before: tuple[int, ...], script: Script) -> int:
    """The token that follows."""
    if script.leaks and SECRET_AT <= len(before) < SECRET_AT + len(SECRET):
        return len(WORDS) + len(before) - SECRET_AT
    digest = hashlib.blake2b(repr((prompt, seed, before)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % len(WORDS)


def text_of(token: int) -> str:
    """What one token says."""
    return (WORDS + SECRET)[token]


def answer(prompt: str, seed: int, script: Script) -> list[str]:
    """The whole answer, token by token."""
    ids: tuple[int, ...] = ()
    for _ in range(script.tokens):
        ids += (next_token(encode(prompt), seed, ids, script),)
    return [text_of(token) for token in ids]


class FakeTokenizer:
    """What the worker asks of a tokenizer."""

    def encode_text(self, text: str) -> list[int]:
        """The ids of a raw prompt."""
        return list(encode(text))


@dataclass(slots=True)
class FakeThread:
    """Generates one token event at a time for each request that was added, and watches no deadline: that is the stage's
    part."""

    scripts: Callable[[tuple[int, ...]], Script]
    now_us: Callable[[], int]
    rng: random.Random
    on_tokens: Callable[[GenerationRequest], None]
    failed: dict[tuple[int, ...], int]  # attempts that failed as told, by prompt; outlives the process
    _tasks: dict[Stream, asyncio.Task[None]] = field(default_factory=dict)

    def add(self, request: GenerationRequest) -> Stream:
        """Queues a request; its outputs come on the stream."""
        stream = Stream(request.request)
        self._tasks[stream] = asyncio.get_running_loop().create_task(self._generate(request, stream))
        return stream

    def drop(self, stream: Stream) -> None:
        """Ends a stream."""
        task = self._tasks.pop(stream, None)
        if task is not None:
            task.cancel()

    async def _generate(self, request: GenerationRequest, stream: Stream) -> None:
        script, queued_us, step_s = self.scripts(request.prompt_ids), self.now_us(), self.rng.choice((0.02, 0.05, 0.2, 0.5))
        fails_at = self.rng.randrange(script.tokens) if self._shall_fail(request.prompt_ids, script) else None
        ids = request.emitted_ids
        first_us: int | None = None
        while len(ids) < script.tokens:
            await asyncio.sleep(step_s * (0.5 + self.rng.random()))
            if fails_at is not None and len(ids) >= fails_at:
                break
            first_us = first_us or self.now_us()
            fresh: tuple[int, ...] = ()
            for _ in range(min(self.rng.choice((1, 1, 1, 3)), script.tokens - len(ids))):
                fresh += (next_token(request.prompt_ids, request.sampling.seed, ids + fresh, script),)
            self.on_tokens(request)
            stream.put_nowait(Output(request.request, len(ids), fresh, tuple(map(text_of, fresh))))
            ids += fresh
        if fails_at is not None:
            stream.put_nowait(HeadraceError("internal", "the engine failed in a step"))
            return
        usage = Usage(len(request.prompt_ids), len(ids))
        account = Account(queued_us, queued_us, first_us, usage, 0, 0, 0)
        stream.put_nowait(Output(request.request, len(ids), finish=Finish("length", usage), account=account))

    def _shall_fail(self, prompt: tuple[int, ...], script: Script) -> bool:
        if self.failed.get(prompt, 0) >= script.failures:
            return False
        self.failed[prompt] = self.failed.get(prompt, 0) + 1
        return True
