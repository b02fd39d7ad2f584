"""What one engine step computes: decided by the scheduler (pure), carried out by the runner (torch), then committed.

A plan holds numbers only, no tensors and no sequence objects, so that either side can be tested without the other.
"""

from dataclasses import dataclass, field

from schemas.envelope import Sampling


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's share of a step: the keys and values of positions [start, start + len(token_ids)) are computed.

    block_table lists the cache blocks of positions [0, start + len(token_ids)), block_tokens positions a block. When samples is
    true the chunk reaches the last known token and the logits of its last row draw the token at position
    start + len(token_ids). prompt_ids and output_ids, all known tokens, are given only where the sampling counts them.
    """

    request: str
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    samples: bool
    sampling: Sampling
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The position after the chunk's last one, which is also the position of the token that it draws."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The chunks of one step, at most one a sequence; their token counts sum to at most the step's token budget."""

    chunks: tuple[Chunk, ...]

    @property
    def tokens(self) -> int:
        """Rows of the step's batch."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner drew: token id by request, for each chunk with samples set, and its logprobs where they were asked for.

    Logprobs are (token id, logprob): the drawn token, then the likeliest ones, most likely first.
    """

    drawn: dict[str, int]
    logprobs: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
