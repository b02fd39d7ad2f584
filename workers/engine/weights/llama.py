"""A decoder's weights from a model file, layer by layer, in the shapes that the model multiplies with."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from workers.engine.model.config import ModelConfig
from workers.engine.weights.quantisation import Floats


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, float32. Projections are [outputs, inputs].

    qkv: queries, then keys, then values; gate_up: gate, then up. Norm weights are [hidden_size].
    """

    attention_norm: Floats
    qkv: Floats
    attention_out: Floats
    feed_forward_norm: Floats
    gate_up: Floats
    down: Floats
    qkv_bias: Floats | None
    query_norm: Floats | None
    key_norm: Floats | None


class TensorSource(Protocol):
    """An open model file or directory. Tensors go by their GGUF names; each is taken at most once."""

    @property
    def tied(self) -> bool:
        """Whether the embedding is the output head too."""
        ...

    def take(self, name: str, shape: tuple[int, ...]) -> Floats:
        """The tensor as float32 of this shape. WeightsError: missing, taken before, of another shape, or an unread form."""
        ...

    def take_rotated(self, name: str, heads: int, head_size: int, columns: int) -> Floats:
        """A query or key projection, rows in rotate-half order."""
        ...

    def finish(self) -> None:
        """TensorsMismatch when there are tensors that nothing has taken."""
        ...


@dataclass(frozen=True, slots=True)
class OuterWeights:
    """What lies around the layers, float32. head is None where the model uses the embedding for it (tied)."""

    embedding: Floats
    norm: Floats
    head: Floats | None


def read_outer(file: TensorSource, config: ModelConfig) -> OuterWeights:
    """Embedding, last norm and output head. WeightsError: as take()."""
    table = (config.vocabulary_size, config.hidden_size)
    return OuterWeights(
        embedding=file.take("token_embd.weight", table),
        norm=file.take("output_norm.weight", (config.hidden_size,)),
        head=None if file.tied else file.take("output.weight", table),
    )


def read_layers(file: TensorSource, config: ModelConfig) -> Iterator[LayerWeights]:
    """The layers in order, each read when it is asked for; after the last, all tensors of the file must have been taken."""
    for number in range(config.layers):
        yield _read_layer(file, config, f"blk.{number}.")
    file.finish()


def _read_layer(file: TensorSource, config: ModelConfig, prefix: str) -> LayerWeights:
    hidden, forward = config.hidden_size, config.feed_forward_size
    queries = file.take_rotated(prefix + "attn_q.weight", config.heads, config.head_size, hidden)
    keys = file.take_rotated(prefix + "attn_k.weight", config.kv_heads, config.head_size, hidden)
    values = file.take(prefix + "attn_v.weight", (config.kv_size, hidden))
    gate = file.take(prefix + "ffn_gate.weight", (forward, hidden))
    up = file.take(prefix + "ffn_up.weight", (forward, hidden))
    return LayerWeights(
        attention_norm=file.take(prefix + "attn_norm.weight", (hidden,)),
        qkv=np.concatenate([queries, keys, values]),
        attention_out=file.take(prefix + "attn_output.weight", (hidden, config.query_size)),
        feed_forward_norm=file.take(prefix + "ffn_norm.weight", (hidden,)),
        gate_up=np.concatenate([gate, up]),
        down=file.take(prefix + "ffn_down.weight", (hidden, forward)),
        qkv_bias=_qkv_bias(file, config, prefix) if config.qkv_bias else None,
        query_norm=file.take(prefix + "attn_q_norm.weight", (config.head_size,)) if config.qk_norm else None,
        key_norm=file.take(prefix + "attn_k_norm.weight", (config.head_size,)) if config.qk_norm else None,
    )


def _qkv_bias(file: TensorSource, config: ModelConfig, prefix: str) -> Floats:
    sizes = {"attn_q": config.query_size, "attn_k": config.kv_size, "attn_v": config.kv_size}
    return np.concatenate([file.take(f"{prefix}{name}.bias", (size,)) for name, size in sizes.items()])
