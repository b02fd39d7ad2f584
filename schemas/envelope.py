"""The request as a replayable value: envelope, seed and token index fix the answer.

The gateway stamps it once; each stage takes it from its queue, does its part, and passes it on to the next stage of the
routing slip. What a stage may change: input (retrieval writes the passages into it), passages, verdicts, slip, timeline.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas import codec, limits, subjects
from schemas.codec import CodecError
from schemas.events import Passage, Verdict
from schemas.subjects import Priority, Stage
from schemas.timeline import Timeline

Action = Literal["off", "redact", "block"]
RuleGroup = Literal["secrets", "personal"]


class Wire(BaseModel):
    """A frozen model that refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Message(Wire):
    """One chat message; content is plain text (the gateway joins OpenAI's text parts)."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatInput(Wire):
    """Messages, for the engine to put through the model's chat template."""

    kind: Literal["chat"] = "chat"
    messages: tuple[Message, ...]


class TextInput(Wire):
    """A raw prompt."""

    kind: Literal["text"] = "text"
    prompt: str


class TokensInput(Wire):
    """A prompt of token ids."""

    kind: Literal["tokens"] = "tokens"
    ids: tuple[int, ...]


class Sampling(Wire):
    """How tokens are drawn. seed is always set: the noise of a token is keyed by (seed, position) alone."""

    seed: int = Field(ge=0, lt=2**63)
    max_tokens: int | None = Field(default=None, ge=1)  # None: as many as the context holds
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0, le=2)  # 0: greedy
    top_k: int | None = Field(default=None, ge=1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)  # of the likeliest token's probability
    repetition_penalty: float = Field(default=1.0, ge=limits.REPETITION_PENALTY_MIN, le=limits.REPETITION_PENALTY_MAX)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    top_logprobs: int | None = Field(default=None, ge=0, le=limits.TOP_LOGPROBS_MAX)  # None: no logprobs at all
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def counts_outputs(self) -> bool:
        """Whether a draw depends on the answer so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Retrieval(Wire):
    """Passages to put before the question."""

    collection: str
    top_k: int = 4
    mode: Literal["hybrid", "vector", "keyword"] = "hybrid"


class Rails(Wire):
    """What is done about each group of rules, on the way in and on the way out."""

    input: dict[RuleGroup, Action] = Field(default_factory=dict)
    output: dict[RuleGroup, Action] = Field(default_factory=dict)

    @property
    def guards_input(self) -> bool:
        """Whether any input rail is on."""
        return any(action != "off" for action in self.input.values())

    @property
    def guards_output(self) -> bool:
        """Whether any output rail is on."""
        return any(action != "off" for action in self.output.values())


class Envelope(Wire):
    """One request on its way through the stages."""

    request: str = Field(pattern=r"^[0-9a-f]{32}$")
    tenant: str
    model: str
    priority: Priority
    slip: tuple[Stage, ...]  # stages still to visit, the next one first
    input: Annotated[ChatInput | TextInput | TokensInput, Field(discriminator="kind")]
    sampling: Sampling
    retrieval: Retrieval | None = None
    rails: Rails = Rails()
    deadline_us: int  # absolute, in the broker's time
    timeline: Timeline
    passages: tuple[Passage, ...] = ()
    verdicts: tuple[Verdict, ...] = ()

    @property
    def events_subject(self) -> str:
        """Where the engine publishes: before the output rails when there are any, else straight to the client."""
        return subjects.raw(self.request) if self.rails.guards_output else subjects.reply(self.request)

    @property
    def next_subject(self) -> str:
        """The work subject of the next stage on the slip."""
        return subjects.work(self.slip[0], self.model, self.priority)

    def passed(self, stage: Stage, **changes: Any) -> Self:
        """The envelope as the stage after this one gets it."""
        assert self.slip[:1] == (stage,), f"slip is {self.slip}, stage is {stage}"
        return self.model_copy(update={"slip": self.slip[1:], **changes})

    def encode(self) -> bytes:
        """The envelope as bytes for the broker; CodecError when it is over the broker's limit."""
        wire = self.model_dump(mode="python", exclude={"timeline", "passages", "verdicts"})
        wire["timeline"] = self.timeline.to_wire()
        wire["passages"] = [[p.number, p.source, p.text, p.score] for p in self.passages]
        wire["verdicts"] = [[v.rule, v.where, v.action, v.count] for v in self.verdicts]
        return codec.pack(wire)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The envelope in these bytes; CodecError when they hold none."""
        wire = codec.unpack(data)
        try:
            wire["timeline"] = Timeline.from_wire(wire["timeline"])
            wire["passages"] = tuple(Passage(*p) for p in wire["passages"])
            wire["verdicts"] = tuple(Verdict(*v) for v in wire["verdicts"])
            return cls.model_validate(wire)
        except (KeyError, TypeError, ValueError, ValidationError) as error:
            raise CodecError(f"not an envelope: {error!r}") from error
