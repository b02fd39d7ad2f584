"""The state of one generation inside the engine: what is known, what is computed, what it owns.

Only the scheduler and its queue change a Sequence; everybody else reads it. Known tokens are prompt plus output;
computed ones have their keys and values in the sequence's blocks: positions [0, tokens_computed).
"""

from dataclasses import dataclass, field

from schemas.envelope import Sampling
from schemas.subjects import PRIORITIES, Priority
from workers.engine.prefixes import Prefix, follow, root

RANKS: dict[Priority, int] = {priority: rank for rank, priority in enumerate(PRIORITIES)}


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation. Instants are microseconds of whatever clock the caller uses throughout.

    output_ids may start with the ids that an earlier attempt emitted: the noise of a token is keyed by seed and
    position, so the rest comes out as it would have there.
    """

    request: str
    tenant: str
    priority: Priority
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    queued_us: int
    deadline_us: int
    output_ids: list[int] = field(default_factory=list)
    tokens_max: int = 0  # known tokens at most; set at admission to the scheduler
    arrival: int = 0  # order of admission to the scheduler

    tokens_computed: int = 0
    blocks: tuple[int, ...] = ()  # a tuple, so that a step can hand it out without a copy
    prefixes: list[Prefix] = field(default_factory=list)  # of the first full blocks of known tokens; grows when asked for
    blocks_registered: int = 0  # of its blocks, those that it was given from the cache or has registered itself
    cached_tokens: int = 0  # of the prompt, those that the cache held when it first began to run

    rank: int = 0  # 0 goes first; starts as the class's rank and falls while the sequence waits
    waiting_since_us: int | None = None  # None while it runs
    waited_us: int = 0  # waiting that has not yet lowered the rank
    promotion_us: int | None = None  # when the rank falls next, if it waits until then

    running_since_us: int | None = None  # None while it waits
    outputs_at_start: int = 0  # output ids known when it last began to run

    scheduled_us: int | None = None  # when it first began to run
    first_token_us: int | None = None
    preemptions: int = 0
    preemptions_by_class: int = 0  # those of them that made room for a higher class to start
    tokens_lost: int = 0  # computed positions that the last preemption gave away; some may still be cached at the restart
    tokens_recomputed: int = 0  # positions to be computed a second time, because of preemption

    @property
    def tokens_known(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def tokens_missing(self) -> int:
        """Known tokens whose keys and values are still to be computed; 1 when it decodes."""
        return self.tokens_known - self.tokens_computed

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: lower rank, then earlier arrival."""
        return self.rank, self.arrival

    def known(self, start: int, end: int) -> tuple[int, ...]:
        """The token ids at positions [start, end); costs end - start, not the context."""
        prompt = len(self.prompt_ids)
        if start >= prompt:
            return tuple(self.output_ids[start - prompt : end - prompt])
        return self.prompt_ids[start:end] + tuple(self.output_ids[: max(0, end - prompt)])

    def prefix(self, number: int, block_tokens: int) -> Prefix:
        """What its block of this number holds once it is full; known tokens must reach to the block's end."""
        while len(self.prefixes) <= number:
            start = len(self.prefixes) * block_tokens
            assert start + block_tokens <= self.tokens_known, f"{self.request}: block {number} is not full"
            parent = self.prefixes[-1].digest if self.prefixes else root(self.tenant)
            self.prefixes.append(follow(parent, self.known(start, start + block_tokens)))
        return self.prefixes[number]
