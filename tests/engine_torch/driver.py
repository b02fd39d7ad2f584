"""A scheduler of one page for these tests: sequences laid over a shuffled cache, cut and batched as the test says."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from schemas.envelope import Sampling
from workers.engine.plan import Chunk, StepPlan
from workers.engine.runner import Logits, ModelRunner
from workers.engine.sampler import draw

BLOCK_TOKENS = 16
GREEDY = Sampling(seed=7, temperature=0.0)


@dataclass
class Running:
    """One sequence: all its known tokens, how many are computed, where its blocks are, the logits of its last draw."""

    request: str
    known: list[int]
    table: tuple[int, ...]
    sampling: Sampling = GREEDY
    computed: int = 0
    logits: list[Logits] = field(default_factory=list)

    def chunk(self, tokens_max: int) -> Chunk:
        """The next piece of at most tokens_max tokens."""
        end = min(len(self.known), self.computed + tokens_max)
        ids = tuple(self.known[self.computed : end])
        blocks = self.table[: -(-end // BLOCK_TOKENS)]
        return Chunk(self.request, ids, self.computed, blocks, end == len(self.known), self.sampling)


def place(prompts: Sequence[Sequence[int]], tokens_max: int, blocks: int, sampling: Sampling = GREEDY) -> list[Running]:
    """Sequences with shuffled block tables, each long enough for its prompt and tokens_max more."""
    free = list(range(blocks))
    random.Random(5).shuffle(free)
    running = []
    for number, prompt in enumerate(prompts):
        needed = -(-(len(prompt) + tokens_max) // BLOCK_TOKENS)
        table, free = tuple(free[:needed]), free[needed:]
        assert len(table) == needed, f"{blocks} blocks are too few for this test"
        running.append(Running(f"request-{number}", list(prompt), table, sampling))
    return running


def step(runner: ModelRunner, running: Sequence[Running], chunk_tokens: int) -> None:
    """One step of all of them; tokens that are drawn become known."""
    chunks = tuple(sequence.chunk(chunk_tokens) for sequence in running)
    rows = iter(runner.logits(StepPlan(chunks)))
    for sequence, chunk in zip(running, chunks, strict=True):
        sequence.computed = chunk.end
        if chunk.samples:
            sequence.logits.append(next(rows).copy())
            token = draw(sequence.logits[-1], sequence.sampling, chunk.end)
            assert token is not None, "the model gave no finite logits"
            sequence.known.append(token)


def generate(runner: ModelRunner, running: Sequence[Running], tokens: int, chunk_tokens: int = 512) -> list[list[int]]:
    """Steps all sequences together until each has drawn so many tokens; those tokens."""
    while unfinished := [sequence for sequence in running if len(sequence.logits) < tokens]:
        step(runner, unfinished, chunk_tokens)
    return [sequence.known[-tokens:] for sequence in running]
