"""A model's chat template: messages to text in which only the template can write control tokens.

Client text goes into the template shielded: wherever it spells a control token, or could complete one together with
the text around it, a mark character breaks the spelling. The mark is a private-use character that occurs in no
message and not in the template; it is taken out again after the control tokens have been told apart. Templates may
trim, split and compare the messages; the mark stays inside.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from schemas.envelope import Message
from schemas.errors import HeadraceError

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class ChatTemplate:
    """A jinja2 template as Hugging Face tokenizers carry it, run in a sandbox.

    controls are the texts of the model's control tokens; bos and eos are what the template sees as bos_token and
    eos_token. ValueError when source is not a template.
    """

    def __init__(self, source: str, controls: Sequence[str], bos: str, eos: str) -> None:
        self._source = source
        self._bos = bos
        self._eos = eos
        longest_first = sorted(filter(None, controls), key=len, reverse=True)
        self._controls = tuple(longest_first)
        pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._control = re.compile(f"({pattern})")
        self._spelled = re.compile(f"(?=(?:{pattern}))(.)", re.DOTALL)
        self._heads = tuple({text[:length] for text in longest_first for length in range(1, len(text))})
        self._tails = tuple({text[length:] for text in longest_first for length in range(1, len(text))})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template is not one: {error}") from error

    def render(self, messages: Sequence[Message], at_us: int | None = None) -> list[tuple[str, bool]]:
        """The prompt up to the assistant's turn as pieces (text, whether it is a control token), none empty.

        at_us is the date that a template may write, in microseconds since 1970, UTC; None: now. HeadraceError
        invalid_value when the template refuses the messages.
        """
        mark = self._mark(messages)
        shielded = [{"role": message.role, "content": self._shield(message.content, mark)} for message in messages]
        try:
            text = self._template.render(
                messages=shielded,
                add_generation_prompt=True,
                bos_token=self._bos,
                eos_token=self._eos,
                strftime_now=_strftime(at_us),
            )
        except jinja2.TemplateError as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise HeadraceError("invalid_value", message, "messages") from error
        return list(self._pieces(text, mark))

    def _pieces(self, text: str, mark: str) -> Iterator[tuple[str, bool]]:
        for place, piece in enumerate(self._control.split(text)):  # odd places are the separators
            piece = piece.replace(mark, "")
            if piece:
                yield piece, place % 2 == 1

    def _shield(self, content: str, mark: str) -> str:
        if any(control in content for control in self._controls):
            content = self._spelled.sub(rf"\1{mark}", content)
        bare = content.strip()
        if bare.startswith(self._tails):
            content = content.replace(bare, mark + bare, 1)
            bare = mark + bare
        if bare.endswith(self._heads):
            content = content.replace(bare, bare + mark, 1)
        return content

    def _mark(self, messages: Sequence[Message]) -> str:
        taken = set(self._source).union(*(message.content for message in messages))
        for characters in _PRIVATE_USE:
            for character in map(chr, characters):
                if character not in taken:
                    return character
        raise HeadraceError("invalid_value", "the messages use every private-use character there is", "messages")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime(at_us: int | None) -> Callable[[str], str]:
    """What templates call as strftime_now(format)."""
    at = datetime.fromtimestamp(time.time() if at_us is None else at_us / 1e6, UTC)
    return at.strftime
