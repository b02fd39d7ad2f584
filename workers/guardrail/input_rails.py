"""Looks at what the client sends before anything is spent on it: refuses it, takes things out of it, or passes it on.

Each message is a text of its own. Passages that retrieval adds later come from the operator's collections and are not looked
at here; the output rails see what the model makes of them.
"""

from typing import assert_never

from schemas.envelope import ChatInput, Envelope, TextInput, TokensInput
from schemas.errors import HeadraceError
from workers.guardrail.rails import Finding, Rail, find_all, rail_for, redact, tally


def apply(envelope: Envelope) -> Envelope:
    """The envelope with its input redacted and the verdicts added.

    Raises HeadraceError: content_blocked (names the rule, never quotes the text), invalid_value for a prompt of token ids,
    which cannot be read here, internal when a rail fails.
    """
    rail = rail_for(envelope.rails.input)
    if rail is None:
        return envelope
    findings: list[Finding] = []
    request = envelope.input
    changed: ChatInput | TextInput
    match request:
        case ChatInput():
            texts = [_clean(rail, message.content, "messages", findings) for message in request.messages]
            pairs = zip(request.messages, texts, strict=True)
            messages = tuple(message.model_copy(update={"content": text}) for message, text in pairs)
            changed = request.model_copy(update={"messages": messages})
        case TextInput():
            changed = request.model_copy(update={"prompt": _clean(rail, request.prompt, "prompt", findings)})
        case TokensInput():
            raise HeadraceError("invalid_value", "input rails cannot read a prompt of token ids", "prompt")
        case _:
            assert_never(request)
    verdicts = envelope.verdicts + tally(findings, "input")
    return envelope.model_copy(update={"input": changed, "verdicts": verdicts})


def _clean(rail: Rail, text: str, param: str, findings: list[Finding]) -> str:
    found = find_all(rail, text)
    for finding in found:
        if finding.action == "block":
            message = f"the input was refused: rule {finding.rule} matches, and this request blocks what it matches"
            raise HeadraceError("content_blocked", message, param)
    findings += found
    return redact(text, found)
