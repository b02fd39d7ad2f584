"""headrace chat: a conversation in the terminal, and the one streamed answer of `up --prompt`."""

import json
import sys
from collections.abc import Iterator

import httpx

from runtime.settings import Settings

Messages = list[dict[str, str]]


class ChatError(Exception):
    """The gateway refused, or the stream ended in an error; the message is for the user."""


def chat(settings: Settings, url: str | None, collection: str | None) -> int:
    """Reads questions from stdin until its end and streams each answer; exit status 1 when one could not be answered."""
    from scripts.up import running_url

    gateway = url or running_url(settings.home) or f"http://127.0.0.1:{settings.port}"
    messages: Messages = []
    status = 0
    while (question := _ask()) is not None:
        messages.append({"role": "user", "content": question})
        try:
            answer = "".join(_echo(tokens(gateway, messages, settings.model, collection)))
            messages.append({"role": "assistant", "content": answer})
        except ChatError as error:
            print(f"error: {error}", file=sys.stderr)
            messages.pop()
            status = 1
    return status


def stream_answer(url: str, messages: Messages, model: str | None = None) -> int:
    """Streams one answer to stdout; exit status 1 with the reason on stderr when there is none."""
    try:
        for _ in _echo(tokens(url, messages, model or Settings.load().model)):
            pass
    except ChatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _ask() -> str | None:
    try:
        return input("> ").strip() or _ask()
    except (EOFError, KeyboardInterrupt):
        return None


def _echo(pieces: Iterator[str]) -> Iterator[str]:
    for piece in pieces:
        print(piece, end="", flush=True)
        yield piece
    print(flush=True)


def tokens(url: str, messages: Messages, model: str, collection: str | None = None) -> Iterator[str]:
    """Text as it comes from the gateway; ChatError names what went wrong. Greedy: the same question, the same answer."""
    body: dict[str, object] = {"model": model, "messages": messages, "stream": True, "temperature": 0}
    if collection is not None:
        body["headrace"] = {"retrieval": {"collection": collection}}
    try:
        with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=None) as answer:
            if answer.status_code != 200:
                answer.read()
                raise ChatError(_message(answer.text))
            yield from _pieces(answer.iter_lines())
    except httpx.HTTPError as error:
        raise ChatError(f"no gateway answers at {url} ({type(error).__name__}); start one with ./scripts/run") from error


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise ChatError(chunk["error"]["message"])
        for choice in chunk["choices"]:
            if piece := choice["delta"].get("content"):
                yield piece
    raise ChatError("the stream ended early")


def _message(body: str) -> str:
    try:
        message: str = json.loads(body)["error"]["message"]
        return message
    except (ValueError, KeyError, TypeError):
        return body[:200]
