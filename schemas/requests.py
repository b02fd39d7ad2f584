"""What a client may ask over HTTP and WebSocket: OpenAI's fields, vLLM's sampling fields, and ours under `headrace`.

Closed: a field that is not here is refused by name, and so is a known OpenAI field that would change the answer and
that we do not serve. Such a field may still carry the value that changes nothing (n=1, tools=null): clients send
those by habit. `null` means "not given" everywhere. `user` and `metadata` only label a request; nothing depends on
them.
"""

import difflib
import re
from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from schemas import limits
from schemas.envelope import Action
from schemas.errors import HeadraceError
from schemas.subjects import Priority

UNKNOWN = "unknown_field"
SHOWN_CHARS_MAX = 64  # of a client's text that an error message repeats


def fault(name: str, message: str, kind: str = "invalid_value") -> ValidationError:
    """The error that pydantic reports at the field called name."""
    detail = InitErrorDetails(type=PydanticCustomError(kind, message), loc=(name,), input=None)
    return ValidationError.from_exception_data("request", [detail])


class Closed(BaseModel):
    """A strict model. NEUTRAL lists the known fields that we do not serve, each with the values that change nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _close(cls, given: Any) -> Any:
        """Drops nulls and neutral values; the first field that is unknown or not served is an error at its name."""
        if not isinstance(given, dict):
            return given
        kept = {}
        for name, value in given.items():
            if name in cls.NEUTRAL:
                cls._refuse_unless_neutral(name, value)
            elif name not in cls._names():
                raise fault(_shown(name), f"unknown field; the nearest known one is {cls._nearest(name)}", UNKNOWN)
            elif value is not None:
                kept[name] = value
        return kept

    @classmethod
    def _names(cls) -> set[str]:
        return {field.alias or name for name, field in cls.model_fields.items()}

    @classmethod
    def _nearest(cls, name: str) -> str:
        return difflib.get_close_matches(_shown(name), sorted(cls._names()), n=1, cutoff=0.0)[0]

    @classmethod
    def _refuse_unless_neutral(cls, name: str, value: object) -> None:
        neutral = cls.NEUTRAL[name]
        if value is None or any(value == known and _is_bool(value) == _is_bool(known) for known in neutral):
            return
        allowed = " or ".join(repr(known) for known in neutral) if neutral else "null"
        raise fault(name, f"not supported by this server yet; leave it out (or send {allowed})")


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "..."


class TextPart(Closed):
    """One text part of a message's content."""

    type: Literal["text"]
    text: str


def _is_list(value: object) -> str:
    return "~list" if isinstance(value, list) else "~text"


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=limits.MESSAGES_MAX, fail_fast=True)]
Content = Annotated[Annotated[str, Tag("~text")] | Annotated[Parts, Tag("~list")], Discriminator(_is_list)]


class ChatMessage(Closed):
    """One message; content is text or a list of text parts."""

    NEUTRAL = {
        "name": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
        "function_call": (),
        "tool_calls": ([],),
        "tool_call_id": (),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    @property
    def text(self) -> str:
        """The content as one string."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(Closed):
    """include_usage: a last chunk with the counted tokens."""

    NEUTRAL = {"include_obfuscation": (False,)}

    include_usage: bool = False


class RetrievalExtras(Closed):
    """Passages to put before the question."""

    collection: str = Field(min_length=1, max_length=limits.COLLECTION_CHARS_MAX)
    top_k: int = Field(default=4, ge=1, le=limits.TOP_K_PASSAGES_MAX)
    mode: Literal["hybrid", "vector", "keyword"] = "hybrid"


class RailExtras(Closed):
    """What to do about each group of rules; None asks for nothing beyond the server's policy."""

    secrets: Action | None = None
    personal: Action | None = None


class GuardrailExtras(Closed):
    """Rails asked for on the way in and on the way out."""

    input: RailExtras = RailExtras()
    output: RailExtras = RailExtras()


class HeadraceExtras(Closed):
    """What a request may ask beyond OpenAI's fields. deadline_ms None: the server's default."""

    retrieval: RetrievalExtras | None = None
    guardrails: GuardrailExtras = GuardrailExtras()
    priority: Priority = "standard"
    deadline_ms: int | None = Field(default=None, ge=1, le=limits.DEADLINE_MS_MAX)
    on_disconnect: Literal["cancel", "keep"] = "cancel"
    timings: bool = False


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


TokenCount = Annotated[int, Field(ge=1, le=limits.TOKENS_PER_REQUEST_MAX)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=limits.STOP_STRING_CHARS_MAX)]


def _biases(value: object) -> object:
    """OpenAI's map from token id, spelled as a string, to a number, with ids as numbers; the first fault by its key."""
    if not isinstance(value, dict):
        return value  # refused by its type
    if len(value) > limits.LOGIT_BIASES_MAX:
        raise PydanticCustomError("invalid_value", f"at most {limits.LOGIT_BIASES_MAX} tokens may be biased")
    return {_biased_id(name): _bias(name, bias) for name, bias in value.items()}


def _biased_id(name: object) -> int:
    if not isinstance(name, str) or not _TOKEN_ID.fullmatch(name) or int(name) >= 2**31:
        raise PydanticCustomError("invalid_value", f"{_quoted(name)} is not a token id")
    return int(name)


def _bias(name: str, bias: object) -> float:
    most = limits.LOGIT_BIAS_MAX
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not -most <= bias <= most:
        raise PydanticCustomError("invalid_value", f"the bias of token {name} must be a number from {-most:g} to {most:g}")
    return float(bias)


def _quoted(value: object) -> str:
    # Braces would be read as a template by pydantic.
    return repr(_shown(str(value))).replace("{", "(").replace("}", ")")


_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")

_NOT_SERVED: dict[str, tuple[object, ...]] = {
    "n": (1,),
}


class GenerationRequest(Closed):
    """What chat and text completions share."""

    model: str = Field(min_length=1, max_length=200)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases)] = {}
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: Annotated[list[StopString], FailFast(), BeforeValidator(_as_list)] = Field(
        default=[], max_length=limits.STOP_STRINGS_MAX
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=512)
    metadata: dict[str, str] = Field(default={}, max_length=16)
    # as vLLM spells them; top_k -1 and 0 are off
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, le=limits.TOKENS_PER_REQUEST_MAX)
    top_k: int = Field(default=-1, ge=-1, le=2**31 - 1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=limits.REPETITION_PENALTY_MIN, le=limits.REPETITION_PENALTY_MAX)
    stop_token_ids: Annotated[list[TokenId], FailFast()] = Field(default=[], max_length=limits.STOP_TOKEN_IDS_MAX)
    headrace: HeadraceExtras = HeadraceExtras()

    @property
    @abstractmethod
    def tokens_max(self) -> int | None:
        """The bound on tokens of the answer; None: as many as the context holds."""

    @property
    @abstractmethod
    def likely_max(self) -> int | None:
        """The likeliest tokens to tell at each place; None: no logprobs."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise fault("stream_options", "only allowed when stream is true")
        if self.tokens_max is not None and self.min_tokens > self.tokens_max:
            raise fault("min_tokens", f"is {self.min_tokens}, above the most tokens asked for ({self.tokens_max})")
        return self


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    NEUTRAL = _NOT_SERVED | {
        "response_format": ({"type": "text"},),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "web_search_options": (),
    }

    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1, max_length=limits.MESSAGES_MAX)
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=limits.TOP_LOGPROBS_MAX)

    @property
    def tokens_max(self) -> int | None:
        """The bound on tokens of the answer; None: as many as the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likely_max(self) -> int | None:
        """The likeliest tokens to tell at each place; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _top_of_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise fault("top_logprobs", "only allowed when logprobs is true")
        return self

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        bounds = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(bounds) > 1:
            raise fault("max_tokens", "differs from max_completion_tokens; send one of them")
        return self


def _one_prompt(value: object) -> object:
    if not isinstance(value, list) or not any(isinstance(item, (str, list)) for item in value):
        return value
    if len(value) > 1:
        raise PydanticCustomError("invalid_value", "one prompt per request; send several requests for several prompts")
    return value[0]


Ids = Annotated[list[TokenId], Field(min_length=1, max_length=limits.TOKENS_PER_REQUEST_MAX, fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Field(min_length=1), Tag("~text")] | Annotated[Ids, Tag("~list")],
    Discriminator(_is_list),
    BeforeValidator(_one_prompt),
]


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. prompt is a text, a list of one text, or a list of token ids."""

    NEUTRAL = _NOT_SERVED | {"echo": (False,), "suffix": ("",), "best_of": (1,)}

    prompt: Prompt
    max_tokens: TokenCount = 16  # OpenAI's default for this route
    logprobs: int | None = Field(default=None, ge=0, le=limits.TOP_LOGPROBS_COMPLETION_MAX)

    @property
    def tokens_max(self) -> int | None:
        """The bound on tokens of the answer."""
        return self.max_tokens

    @property
    def likely_max(self) -> int | None:
        """The likeliest tokens to tell at each place; None: no logprobs."""
        return self.logprobs


_KEY = re.compile(rf"[\x21-\x7e]{{1,{limits.IDEMPOTENCY_KEY_CHARS_MAX}}}")


def checked_idempotency_key(key: str, param: str) -> str:
    """The key itself; HeadraceError invalid_value unless it is 1 to 255 visible ASCII characters."""
    if not _KEY.fullmatch(key):
        message = f"{param}: must be 1 to {limits.IDEMPOTENCY_KEY_CHARS_MAX} visible ASCII characters"
        raise HeadraceError("invalid_value", message, param)
    return key


Asked = TypeVar("Asked", bound=BaseModel)


def parse(model: type[Asked], given: object) -> Asked:
    """The parsed body as that model; HeadraceError unknown_field or invalid_value names the field at fault."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise refusal(error) from None


def refusal(error: ValidationError) -> HeadraceError:
    """The first fault as a client sees it, with the field's path: messages[0].content."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = path_of(first["loc"])
    code = UNKNOWN if first["type"] == UNKNOWN else "invalid_value"
    if first["type"] == "missing":
        return HeadraceError(code, f"{path}: this field is required", path)
    return HeadraceError(code, f"{path or 'body'}: {first['msg']}", path or None)


def path_of(place: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") as messages[0].content; tags of unions (~text) are no part of it."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("~"):
            path += f".{part}" if path else part
    return path
