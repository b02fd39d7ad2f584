"""From what a client asks to the envelope that the stages get: pure, and the only place where server policy meets a
request.

The envelope is complete: the seed is drawn here when the client gives none, the deadline becomes absolute, the
routing slip is written, and the server's rails are in force. A request may ask for more than the policy, never for
less.
"""

from dataclasses import dataclass

from runtime.settings import Settings
from schemas.envelope import (
    Action,
    ChatInput,
    Envelope,
    Message,
    Rails,
    Retrieval,
    RuleGroup,
    Sampling,
    TextInput,
    TokensInput,
)
from schemas.errors import HeadraceError
from schemas.requests import ChatCompletionRequest, CompletionRequest, RailExtras
from schemas.subjects import Stage
from schemas.timeline import Timeline

STRENGTH: dict[Action, int] = {"off": 0, "redact": 1, "block": 2}


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the gateway adds to a request: its id, its owner, the broker's time at arrival, a seed if none is given."""

    request: str
    tenant: str
    arrived_us: int
    seed: int


def stamp(asked: ChatCompletionRequest | CompletionRequest, with_: Stamp, settings: Settings) -> Envelope:
    """The envelope of a request; HeadraceError invalid_value when it asks for less than the server's policy."""
    given = _input(asked)
    rails = _rails(asked, settings)
    _refuse_unseen_tokens(given, rails, asked)
    extras = asked.headrace
    retrieval = Retrieval(**extras.retrieval.model_dump()) if extras.retrieval is not None else None
    deadline_ms = settings.deadline_ms if extras.deadline_ms is None else extras.deadline_ms
    return Envelope(
        request=with_.request,
        tenant=with_.tenant,
        model=asked.model,
        priority=extras.priority,
        slip=_slip(rails, retrieval),
        input=given,
        sampling=_sampling(asked, with_.seed),
        retrieval=retrieval,
        rails=rails,
        deadline_us=with_.arrived_us + deadline_ms * 1000,
        timeline=Timeline(with_.arrived_us),
    )


def _input(asked: ChatCompletionRequest | CompletionRequest) -> ChatInput | TextInput | TokensInput:
    if isinstance(asked, ChatCompletionRequest):
        messages = (
            Message(role="system" if message.role == "developer" else message.role, content=message.text)
            for message in asked.messages
        )
        return ChatInput(messages=tuple(messages))
    if isinstance(asked.prompt, str):
        return TextInput(prompt=asked.prompt)
    return TokensInput(ids=tuple(asked.prompt))


def _sampling(asked: ChatCompletionRequest | CompletionRequest, seed: int) -> Sampling:
    return Sampling(
        seed=seed if asked.seed is None else asked.seed,
        max_tokens=asked.tokens_max,
        min_tokens=asked.min_tokens,
        temperature=asked.temperature,
        top_k=asked.top_k if asked.top_k > 0 else None,
        top_p=asked.top_p,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=tuple(sorted(asked.logit_bias.items())),
        top_logprobs=asked.likely_max,
        stop=tuple(asked.stop),
        stop_token_ids=tuple(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
    )


def _slip(rails: Rails, retrieval: Retrieval | None) -> tuple[Stage, ...]:
    slip: list[Stage] = []
    if rails.guards_input or rails.guards_output:
        slip.append("rails")
    if retrieval is not None:
        slip.append("retrieval")
    return (*slip, "engine")


def _rails(asked: ChatCompletionRequest | CompletionRequest, settings: Settings) -> Rails:
    wanted = asked.headrace.guardrails
    return Rails(
        input=_strengthened(settings.rails_input, wanted.input, "input"),
        output=_strengthened(settings.rails_output, wanted.output, "output"),
    )


def _strengthened(policy: dict[RuleGroup, Action], wanted: RailExtras, where: str) -> dict[RuleGroup, Action]:
    groups: dict[RuleGroup, Action | None] = {"secrets": wanted.secrets, "personal": wanted.personal}
    rails = dict(policy)
    for group, action in groups.items():
        if action is None:
            continue
        required = policy.get(group, "off")
        if STRENGTH[action] < STRENGTH[required]:
            param = f"headrace.guardrails.{where}.{group}"
            raise HeadraceError("invalid_value", f"{param}: this server requires at least {required!r}", param)
        rails[group] = action
    return rails


def _refuse_unseen_tokens(
    given: ChatInput | TextInput | TokensInput, rails: Rails, asked: ChatCompletionRequest | CompletionRequest
) -> None:
    """Rails and retrieval read text: what they cannot read they cannot let pass."""
    if not isinstance(given, TokensInput):
        return
    if rails.guards_input:
        raise HeadraceError("invalid_value", "prompt: token ids cannot pass the input rails; send text", "prompt")
    if asked.headrace.retrieval is not None:
        raise HeadraceError("invalid_value", "prompt: token ids cannot be searched for; send text", "prompt")
