"""OpenAI's answer shapes: SSE chunks and whole bodies. Pure; what a chunk has in common with its neighbours is built
once.

A durable event carries `id: <request>:<index>`, index being the next token after it: what a resume asks for.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from json.encoder import encode_basestring_ascii
from typing import Any

from gateway.ownership import Kind, Ownership
from schemas.errors import HeadraceError
from schemas.events import Failed, Finished, Likely, Logprob, Terminal, Tokens, Usage
from schemas.timeline import Timeline

DONE = b"data: [DONE]\n\n"
# No blank line: it would end an event, and clients that saw an `id:` before take that for an event without data.
KEEPALIVE = b": keepalive\n"

_PREFIX: dict[Kind, str] = {"chat": "chatcmpl-", "completion": "cmpl-"}
_OBJECT: dict[Kind, str] = {"chat": "chat.completion.chunk", "completion": "text_completion"}


class Chunks:
    """The SSE events of one answer, as bytes: the same at every gateway and however often they are asked for.

    include_usage adds a last chunk with the counted tokens.
    """

    def __init__(self, of: Ownership, include_usage: bool) -> None:
        self._kind = of.kind
        self._request = of.request
        self._include_usage = include_usage
        self._timings = of.timings
        self._base: dict[str, Any] = {
            "id": _PREFIX[of.kind] + of.request,
            "object": _OBJECT[of.kind],
            "created": of.created_us // 1_000_000,
            "model": of.model,
        }
        # Splitting an encoded chunk at a text that no client can send keeps the one shape in _choice.
        mark = "\x00"
        whole = json.dumps(self._body([self._choice(mark, None)]))
        before, after = whole.split(json.dumps(mark))
        self._before = f"\ndata: {before}"
        self._after = f"{after}\n\n"
        self._id = f"id: {of.request}:"

    def opening(self) -> bytes:
        """The role chunk of a chat; a text completion has none."""
        if self._kind == "completion":
            return b""
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return _event(self._body([choice]))

    def tokens(self, tokens: Tokens) -> bytes:
        """The chunk of these tokens; b"" when they bring neither text nor logprobs."""
        text = tokens.text
        if any(tokens.logprobs):
            choice = self._choice(text, None) | {"logprobs": logprobs_body(self._kind, tokens.logprobs)}
            return f"{self._id}{tokens.end}\n".encode("ascii") + _event(self._body([choice]))
        if not text:
            return b""
        end = tokens.index + len(tokens.ids)
        return f"{self._id}{end}{self._before}{encode_basestring_ascii(text)}{self._after}".encode("ascii")

    def ending(self, finished: Finished) -> bytes:
        """The finish chunk, the usage chunk if it was asked for, and [DONE]; our part rides in the last chunk."""
        part = headrace_part(self._request, finished, self._timings)
        finish = self._body([self._choice("", finished.reason)])
        parts = [f"{self._id}{finished.index}\n".encode("ascii")]
        if self._include_usage:
            usage = self._base | {"choices": [], "usage": usage_body(finished.usage)}
            parts += [_event(finish), _event(usage | part)]
        else:
            parts += [_event(finish | part)]
        return b"".join((*parts, DONE))

    def error(self, failed: Failed) -> bytes:
        """An error after the status line went out, in band, and [DONE]."""
        error = HeadraceError(failed.code, failed.message, failed.param)
        return _event(error_body(error) | headrace_part(self._request, failed, self._timings)) + DONE

    def fault(self) -> bytes:
        """A failure of the gateway itself in the middle of a stream."""
        return _event(error_body(HeadraceError("internal", "the gateway failed in the middle of the answer"))) + DONE

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._include_usage else {}
        return self._base | {"choices": choices} | usage

    def _choice(self, text: str, reason: str | None) -> dict[str, Any]:
        if self._kind == "completion":
            return {"text": text, "index": 0, "logprobs": None, "finish_reason": reason}
        delta = {} if reason else {"content": text}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


def whole_body(of: Ownership, text: str, finished: Finished, logprobs: Sequence[Logprob | None] = ()) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choice: dict[str, Any] = {"index": 0, "logprobs": logprobs_body(of.kind, logprobs), "finish_reason": finished.reason}
    if of.kind == "chat":
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    body = {
        "id": _PREFIX[of.kind] + of.request,
        "object": "chat.completion" if of.kind == "chat" else "text_completion",
        "created": of.created_us // 1_000_000,
        "model": of.model,
        "choices": [choice],
        "usage": usage_body(finished.usage),
    }
    return body | headrace_part(of.request, finished, of.timings)


def logprobs_body(kind: Kind, logprobs: Sequence[Logprob | None]) -> dict[str, Any] | None:
    """Logprobs in OpenAI's shape, without the tokens that a rail changed; None when there are none.

    A text completion's text_offset is left out: a resumed stream does not know what came before it.
    """
    known = [logprob for logprob in logprobs if logprob is not None]
    if not known:
        return None
    if kind == "chat":
        return {"content": logprob_entries(known), "refusal": None}
    return {
        "tokens": [_spelled(of.token) for of in known],
        "token_logprobs": [of.token.logprob for of in known],
        "top_logprobs": [{_spelled(likely): likely.logprob for likely in (*of.top, of.token)} for of in known],
        "text_offset": None,
    }


def logprob_entries(logprobs: Sequence[Logprob | None]) -> list[dict[str, Any]]:
    """One entry a token, as OpenAI's chat has them, without the tokens that a rail changed."""
    return [_entry(of.token) | {"top_logprobs": [_entry(likely) for likely in of.top]} for of in logprobs if of is not None]


def _entry(likely: Likely) -> dict[str, Any]:
    return {"token": _spelled(likely), "logprob": likely.logprob, "bytes": list(likely.data)}


def _spelled(likely: Likely) -> str:
    return likely.data.decode(errors="replace")


def usage_body(usage: Usage) -> dict[str, Any]:
    """Counted tokens as OpenAI names them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_body(error: HeadraceError) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": error.message, "type": error.meaning.kind, "param": error.param, "code": error.code}}


def headrace_part(request: str, terminal: Terminal, timings: bool) -> dict[str, Any]:
    """{"headrace": ...} when there is anything to say beyond OpenAI's fields, else {}."""
    part: dict[str, Any] = {}
    if isinstance(terminal, Finished) and terminal.passages:
        part["passages"] = [asdict(passage) for passage in terminal.passages]
    if terminal.verdicts:
        part["verdicts"] = [asdict(verdict) for verdict in terminal.verdicts]
    if timings:
        part["timings"] = timings_body(terminal.timeline)
    return {"headrace": {"request": request} | part} if part else {}


def timings_body(timeline: Timeline) -> dict[str, Any]:
    """Milliseconds with three decimals (whole microseconds): the spans sum to the total."""
    spans = timeline.spans_us()
    return {
        "total_ms": sum(spans.values()) / 1000,
        "spans_ms": {name: spent / 1000 for name, spent in spans.items()},
    }


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode("ascii")
