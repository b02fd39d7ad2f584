"""Pieces of an answer as the WebSocket's server frames. Token frames are built by hand: one is sent for each token
event.
"""

import json
from json.encoder import encode_basestring_ascii

from gateway.answer import Piece
from gateway.chunks import headrace_part, logprob_entries
from schemas import frames
from schemas.errors import HeadraceError
from schemas.events import Failed, Finished, Tokens


class FrameWriter:
    """The frames of one answer. name is the client's own id for it on its socket, if it is on one."""

    def __init__(self, request: str, name: str | None, timings: bool) -> None:
        self._request = request
        self._name = name
        self._timings = timings
        named = "" if name is None else f'"id":{encode_basestring_ascii(name)},'
        self._before = f'{{"type":"token",{named}"request":"{request}","index":'

    def piece(self, piece: Piece) -> str:
        """The frame of a piece; "" for tokens that bring neither text nor logprobs."""
        if isinstance(piece, Tokens):
            text, entries = piece.text, logprob_entries(piece.logprobs)
            logprobs = f',"logprobs":{json.dumps(entries)}' if entries else ""
            return f'{self._before}{piece.index},"text":{encode_basestring_ascii(text)}{logprobs}}}' if text or entries else ""
        return self._done(piece) if isinstance(piece, Finished) else self._failed(piece)

    def _done(self, finished: Finished) -> str:
        usage = finished.usage
        counted = frames.Counted(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        )
        part = headrace_part(self._request, finished, self._timings).get("headrace")
        return frames.Done(
            id=self._name, request=self._request, finish_reason=finished.reason, usage=counted, headrace=part
        ).encode()

    def _failed(self, failed: Failed) -> str:
        error = HeadraceError(failed.code, failed.message, failed.param)
        return error_frame(error, self._name, self._request)


def error_frame(error: HeadraceError, name: str | None = None, request: str | None = None) -> str:
    """The frame of a typed error."""
    return frames.Error(
        id=name,
        request=request,
        code=error.code,
        message=error.message,
        param=error.param,
        retryable=error.meaning.retryable,
    ).encode()
