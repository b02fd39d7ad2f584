"""A GGUF file of a model, in the terms of this project: sizes, tokenizer fields, float32 tensors."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from workers.engine.model.config import ModelConfig
from workers.engine.weights.architectures import BY_GGUF
from workers.engine.weights.errors import DamagedFile, TensorsMismatch, UnsupportedModel
from workers.engine.weights.gguf_layout import Value, read_layout
from workers.engine.weights.quantisation import Floats, dequantise

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TokenizerFields:
    """What a tokenizer is built from. Token ids index tokens and token_types (llama.h, llama_token_type).

    end_ids: tokens that end an answer, beside eos_id.
    """

    tokens: list[str]
    merges: list[str]
    token_types: list[int]
    pre: str
    chat_template: str | None
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    end_ids: list[int]


class GgufFile:
    """An open model file. Every tensor is taken at most once; finish() checks that all were."""

    def __init__(self, path: str | Path) -> None:
        """Reads the header. WeightsError: damaged, or an architecture that is not supported."""
        self.path = Path(path)
        self._layout = read_layout(self.path)
        self._left = dict(self._layout.tensors)
        self.architecture = self._need("general.architecture", str)
        if self.architecture not in BY_GGUF:
            raise UnsupportedModel(self.path, f"architecture {self.architecture!r}", BY_GGUF)
        self.tied = "output.weight" not in self._left

    def tokenizer_fields(self) -> TokenizerFields:
        """The tokenizer's part of the metadata."""
        model = self._need("tokenizer.ggml.model", str)
        if model != "gpt2":
            raise UnsupportedModel(self.path, f"tokenizer {model!r}", ("gpt2",))
        tokens = self._strings("tokenizer.ggml.tokens")
        types = self._need("tokenizer.ggml.token_type", list)
        return TokenizerFields(
            tokens=tokens,
            merges=self._strings("tokenizer.ggml.merges"),
            token_types=[int(number) for number in types],
            pre=self._optional("tokenizer.ggml.pre", str) or "gpt-2",
            chat_template=self._optional("tokenizer.chat_template", str),
            bos_id=self._optional("tokenizer.ggml.bos_token_id", int),
            eos_id=self._optional("tokenizer.ggml.eos_token_id", int),
            add_bos=bool(self._optional("tokenizer.ggml.add_bos_token", bool)),
            end_ids=[],
        )

    def config(self) -> ModelConfig:
        """The model's sizes and constants. WeightsError when one is missing or contradicts another."""
        self._refuse_scaled_rotation()
        hidden, heads = self._size("embedding_length"), self._size("attention.head_count")
        kv_heads = self._optional(self._key("attention.head_count_kv"), int) or heads
        head_size = self._optional(self._key("attention.key_length"), int) or hidden // heads
        rotated = self._optional(self._key("rope.dimension_count"), int) or head_size
        if heads % kv_heads or rotated != head_size or head_size % 2:
            what = f"{heads} heads, {kv_heads} kv heads, head size {head_size}, of which {rotated} are rotated,"
            raise UnsupportedModel(self.path, what)
        return ModelConfig(
            architecture=self.architecture,
            vocabulary_size=self.rows_of("token_embd.weight"),
            layers=self._size("block_count"),
            hidden_size=hidden,
            feed_forward_size=self._size("feed_forward_length"),
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            rope_theta=self._optional(self._key("rope.freq_base"), float) or 10_000.0,
            norm_epsilon=self._need(self._key("attention.layer_norm_rms_epsilon"), float),
            context_tokens=self._size("context_length"),
            rotary_divisors=self._rotary_divisors(head_size),
            windows=self._windows(),
            qkv_bias=BY_GGUF[self.architecture].qkv_bias,
            qk_norm=BY_GGUF[self.architecture].qk_norm,
        )

    def _windows(self) -> tuple[int | None, ...]:
        window = self._optional(self._key("attention.sliding_window"), int)
        return (window,) * self._size("block_count") if window else ()

    def rows_of(self, name: str) -> int:
        """The first dimension of a tensor, without reading it."""
        if name not in self._layout.tensors:
            raise TensorsMismatch(self.path, f"tensor {name} is missing")
        return self._layout.tensors[name].shape[0]

    def take(self, name: str, shape: tuple[int, ...]) -> Floats:
        """The tensor as float32 of this shape. WeightsError: missing, taken before, of another shape, or an unread form."""
        stored = self._left.pop(name, None)
        if stored is None:
            raise TensorsMismatch(self.path, f"tensor {name} is missing")
        if stored.shape != shape:
            raise TensorsMismatch(self.path, f"tensor {name} has shape {stored.shape}, expected {shape}")
        return dequantise(self.path, stored)

    def take_rotated(self, name: str, heads: int, head_size: int, columns: int) -> Floats:
        """A query or key projection, rows in rotate-half order.

        llama GGUF files hold each head's rows for interleaved rotation, (first half, second half) taken in turns; undone
        here.
        """
        stored = self.take(name, (heads * head_size, columns))
        if not BY_GGUF[self.architecture].interleaved:
            return stored
        turns = stored.reshape(heads, head_size // 2, 2, columns)
        return turns.swapaxes(1, 2).reshape(heads * head_size, columns)

    def finish(self) -> None:
        """TensorsMismatch when the file holds tensors that nothing has taken: the model would not be the file's."""
        if self._left:
            raise TensorsMismatch(self.path, f"the model has no use for tensors {', '.join(sorted(self._left))}")

    def _rotary_divisors(self, head_size: int) -> tuple[float, ...]:
        # Llama 3.1 and later: stored as a tensor, because metadata has no lists for it.
        if "rope_freqs.weight" not in self._left:
            return ()
        return tuple(self.take("rope_freqs.weight", (head_size // 2,)).tolist())

    def _refuse_scaled_rotation(self) -> None:
        scaling = self._optional(self._key("rope.scaling.type"), str)
        if scaling not in (None, "none"):
            raise UnsupportedModel(self.path, f"rotary scaling {scaling!r}", ("none",))

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _size(self, name: str) -> int:
        number = self._need(self._key(name), int)
        if number < 1:
            raise DamagedFile(self.path, f"{self._key(name)} is {number}")
        return number

    def _strings(self, key: str) -> list[str]:
        return [str(item) for item in self._need(key, list)]

    def _need(self, key: str, kind: type[_T]) -> _T:
        value = self._optional(key, kind)
        if value is None:
            raise DamagedFile(self.path, f"metadata {key} is missing")
        return value

    def _optional(self, key: str, kind: type[_T]) -> _T | None:
        value: Value | None = self._layout.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, kind):
            raise DamagedFile(self.path, f"metadata {key} is a {type(value).__name__}, expected {kind.__name__}")
        return value
