"""The decoder's forward pass over one step's rows, all chunks' tokens one after another.

The residual stream, norms, attention sums and logits are float32; in bf16, what enters and leaves a linear layer and what lies
in the cache is bfloat16. Only rows that draw a token go through the output head.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.attention.protocol import AttentionBackend
from workers.engine.batch import Batch
from workers.engine.model.arrays import Buffer
from workers.engine.model.config import ModelConfig
from workers.engine.model.linear import Linear, Scheme
from workers.engine.model.row_operations import RowOperations
from workers.engine.weights.llama import LayerWeights


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, packed for the machine."""

    attention_norm: Buffer
    qkv: Linear
    attention_out: Linear
    feed_forward_norm: Buffer
    gate_up: Linear
    down: Linear
    query_norm: Buffer | None
    key_norm: Buffer | None


def pack_layer(weights: LayerWeights, scheme: Scheme, dtype: torch.dtype) -> Layer:
    """A layer's weights in the model's precision, packed once."""

    def linear(weight: npt.NDArray[np.float32], bias: npt.NDArray[np.float32] | None = None) -> Linear:
        added = None if bias is None else torch.from_numpy(bias).to(dtype)
        return Linear(torch.from_numpy(weight).to(dtype), scheme, added)

    def optional(weight: npt.NDArray[np.float32] | None) -> Buffer | None:
        return None if weight is None else Buffer(scheme.place(torch.from_numpy(weight)))

    return Layer(
        attention_norm=Buffer(scheme.place(torch.from_numpy(weights.attention_norm))),
        qkv=linear(weights.qkv, weights.qkv_bias),
        attention_out=linear(weights.attention_out),
        feed_forward_norm=Buffer(scheme.place(torch.from_numpy(weights.feed_forward_norm))),
        gate_up=linear(weights.gate_up),
        down=linear(weights.down),
        query_norm=optional(weights.query_norm),
        key_norm=optional(weights.key_norm),
    )


class Workspace:
    """The buffers of a step of so many rows, the first rows of larger ones; what enters a linear layer is padded for it."""

    def __init__(self, memory: "_Memory", rows: int, padded: int) -> None:
        self.residual = Buffer(memory.residual[:rows])
        self.normed = Buffer(memory.normed[:padded])
        self.queries = Buffer(memory.queries[:rows])
        self.keys = Buffer(memory.keys[:rows])
        self.attended = Buffer(memory.attended[:padded])
        self.gated = Buffer(memory.gated[:padded])


class _Memory:
    """What all steps' buffers lie in; grown when a step has more rows."""

    def __init__(self, config: ModelConfig, like: torch.Tensor, rows: int) -> None:
        self.rows = rows
        self.residual = like.new_zeros(rows, config.hidden_size, dtype=torch.float32)
        self.normed = like.new_zeros(rows, config.hidden_size)
        self.queries = like.new_zeros(rows, config.query_size, dtype=torch.float32)
        self.keys = like.new_zeros(rows, config.kv_size)
        self.attended = like.new_zeros(rows, config.query_size)
        self.gated = like.new_zeros(rows, config.feed_forward_size)


@dataclass(frozen=True, slots=True)
class Rows:
    """What the layers leave: the residual stream and what the last layer adds to it, [at least rows, hidden_size]."""

    residual: torch.Tensor
    delta: torch.Tensor


class Llama:
    """embedding: [vocabulary_size, hidden_size] in the model's precision."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: Iterable[Layer],
        norm: Buffer,
        scheme: Scheme,
        operations: RowOperations,
        attention: AttentionBackend,
    ) -> None:
        self._config = config
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._scheme = scheme
        self._operations = operations
        self._attention = attention
        self._memory = _Memory(config, embedding, scheme.rows_at_first)
        self._workspaces: dict[int, Workspace] = {}  # by rows; at most one for each size of step

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Computes the rows' keys and values into the cache; the logits of batch.sampled_rows, [sampled, vocabulary_size]."""
        self._attention.begin(batch)
        return self.logits(self.layers(batch), batch.sampled_rows)

    def layers(self, batch: Batch) -> Rows:
        """Everything between begin() and the output head."""
        rows, operations = batch.rows, self._operations
        work = self.workspace_for(rows)
        work.residual.tensor.copy_(operations.embed(self._embedding, batch))
        delta: Buffer | None = None
        for number, layer in enumerate(self._layers):
            self._add_norm(work, delta, layer.attention_norm, rows)
            self._attend(number, layer, work, batch)
            delta = Buffer(layer.attention_out(work.attended.tensor))
            operations.add_norm(work.residual, delta, layer.feed_forward_norm, work.normed, rows)
            operations.gate(Buffer(layer.gate_up(work.normed.tensor)), work.gated, rows)
            delta = Buffer(layer.down(work.gated.tensor))
        assert delta is not None, "a model has layers"
        return Rows(work.residual.tensor, delta.tensor)

    def _add_norm(self, work: Workspace, delta: Buffer | None, weight: Buffer, rows: int) -> None:
        if delta is None:
            self._operations.norm(work.residual, weight, work.normed, rows)
        else:
            self._operations.add_norm(work.residual, delta, weight, work.normed, rows)

    def _attend(self, number: int, layer: Layer, work: Workspace, batch: Batch) -> None:
        qkv = Buffer(layer.qkv(work.normed.tensor))
        if layer.query_norm is not None and layer.key_norm is not None:
            self._operations.head_norm(qkv, layer.query_norm, layer.key_norm, batch.rows)
        self._operations.rotate(qkv, batch.positions, work.queries, work.keys, batch.rows)
        self._attention.write(number, work.keys, qkv)
        self._attention.attend(number, work.queries, work.attended)

    def logits(self, rows_of: Rows, sampled_rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """[sampled, vocabulary_size] of the sampled rows."""
        rows, sampled = len(sampled_rows), self._operations.indices(sampled_rows)
        if not rows:
            return np.empty((0, self._config.vocabulary_size), np.float32)
        last = Buffer(rows_of.residual[sampled] + rows_of.delta[sampled])
        normed = Buffer(torch.empty_like(last.tensor))
        self._operations.norm(last, self._norm, normed, rows)
        return self._operations.logits(normed, rows)

    def workspace_for(self, rows: int) -> Workspace:
        """The buffers of a step of so many rows; whoever keeps their addresses keeps them."""
        padded = self._scheme.padded(rows)
        if self._memory.rows < padded:
            self._memory = _Memory(self._config, self._embedding, padded)
            self._workspaces.clear()
        if rows not in self._workspaces:
            self._workspaces[rows] = Workspace(self._memory, rows, padded)
        return self._workspaces[rows]
