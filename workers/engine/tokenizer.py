"""A model's tokenizer, built from the fields of its files: byte-level BPE, control tokens, chat template.

Client text is never read as a control token: the BPE model does not hold them, and their ids are placed only where
the chat template wrote them.
"""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from schemas.envelope import Message
from schemas.errors import HeadraceError
from workers.engine.chat_template import ChatTemplate

if TYPE_CHECKING:
    from workers.engine.weights.gguf_file import TokenizerFields

# Token types of GGUF (llama.h, llama_token_type).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# Tokens that end a turn or a text in the families that we know, beside the one that the file names.
_END_TOKENS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>"})

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _smollm() -> pre_tokenizers.PreTokenizer:
    return _sequence(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False))


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split(_LLAMA3)


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split(_QWEN2)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _sequence(pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only)


def _sequence(*parts: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(list(parts))


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "llama-bpe": _llama3,
    "qwen2": _qwen2,
}
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe"})  # a word that is in the vocabulary is one token, whatever the merges say
_COMPOSED = frozenset({"qwen2"})  # text is brought to Unicode's form C first


def pre_tokenizer_name(written: dict[str, Any] | None, whole_words_first: bool) -> str:
    """Which of the known pre-tokenizers tokenizer.json has written down. ValueError: none of them."""
    for name, make in _PRE_TOKENIZERS.items():
        same = _without_offsets(json.loads(make().__getstate__())) == _without_offsets(written)
        if same and whole_words_first == (name in _WHOLE_WORDS_FIRST):
            return name
    raise ValueError(f"this pre-tokenizer is not supported; supported: {', '.join(_PRE_TOKENIZERS)}")


def _without_offsets(written: Any) -> Any:
    # trim_offsets changes where tokens are said to lie in the text, not which they are.
    if isinstance(written, dict):
        return {key: _without_offsets(value) for key, value in written.items() if key != "trim_offsets"}
    return [_without_offsets(value) for value in written] if isinstance(written, list) else written


class ModelTokenizer:
    """Text and messages to token ids, token ids to bytes. ValueError when the fields are of a kind that is not known."""

    def __init__(self, fields: "TokenizerFields") -> None:
        self._tokens = tuple(fields.tokens)
        self._types = tuple(fields.token_types)
        self._controls = {text: number for number, text in enumerate(self._tokens) if self._types[number] == CONTROL}
        self._start = (fields.bos_id,) if fields.add_bos and fields.bos_id is not None else ()
        self._tokenizer = _build(fields)
        self._template = self._chat_template(fields)
        self.token_bytes_table = _byte_table(self._tokens, self._types)
        ends = {self._controls[text] for text in _END_TOKENS & self._controls.keys()}
        self.eos_ids: frozenset[int] = frozenset(ends.union(fields.end_ids, () if fields.eos_id is None else (fields.eos_id,)))

    @property
    def vocabulary_size(self) -> int:
        """Ids are in [0, vocabulary_size)."""
        return len(self._tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token's text: none for control tokens, not always whole characters."""
        return self.token_bytes_table[token_id]

    def encode_text(self, text: str) -> list[int]:
        """A raw prompt, behind the model's start token where it has one. Control tokens in the text are plain text."""
        return [*self._start, *self._plain(text, "prompt")]

    def encode_chat(self, messages: Sequence[Message], at_us: int | None = None) -> list[int]:
        """Messages through the chat template, up to the assistant's turn.

        at_us is the date for templates that write one: microseconds since 1970, of the request, so that a replay
        gives the same prompt; None: now. HeadraceError invalid_value when the template refuses them or the model has
        none.
        """
        if self._template is None:
            raise HeadraceError("invalid_value", "this model has no chat template: send it a raw prompt", "messages")
        ids: list[int] = []
        for text, control in self._template.render(messages, at_us):
            if control:
                ids.append(self._controls[text])
            else:
                ids += self._plain(text, "messages")
        return ids

    def _plain(self, text: str, param: str) -> list[int]:
        try:
            encoded: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:  # a lone surrogate, which JSON can spell and UTF-8 cannot
            raise HeadraceError("invalid_value", "the text is not valid Unicode", param) from error
        return encoded

    def _chat_template(self, fields: "TokenizerFields") -> ChatTemplate | None:
        if fields.chat_template is None:
            return None
        bos, eos = (self._tokens[number] if number is not None else "" for number in (fields.bos_id, fields.eos_id))
        return ChatTemplate(fields.chat_template, tuple(self._controls), bos, eos)


def _build(fields: "TokenizerFields") -> Tokenizer:
    if fields.pre not in _PRE_TOKENIZERS:
        raise ValueError(f"pre-tokenizer {fields.pre!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}")
    numbered = list(enumerate(zip(fields.tokens, fields.token_types, strict=True)))
    vocabulary = {text: number for number, (text, kind) in numbered if kind in (NORMAL, USER_DEFINED)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in fields.merges)]
    model = models.BPE(vocabulary, merges, ignore_merges=fields.pre in _WHOLE_WORDS_FIRST)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[fields.pre]()
    if fields.pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    defined = [AddedToken(text, normalized=False) for _, (text, kind) in numbered if kind == USER_DEFINED]
    tokenizer.add_tokens(defined)
    return tokenizer


def _byte_table(tokens: Sequence[str], types: Sequence[int]) -> tuple[bytes, ...]:
    byte_of = {character: number for number, character in enumerate(_byte_characters())}
    return tuple(_bytes_of(text, kind, byte_of) for text, kind in zip(tokens, types, strict=True))


def _bytes_of(text: str, kind: int, byte_of: dict[str, int]) -> bytes:
    if kind == USER_DEFINED:
        return text.encode()
    return bytes(byte_of[character] for character in text) if kind == NORMAL else b""


def _byte_characters() -> str:
    """What stands for each byte in a byte-level vocabulary (GPT-2): itself if printable, else a letter from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return "".join(chr(byte) if byte in printable else chr(next(spare)) for byte in range(256))
