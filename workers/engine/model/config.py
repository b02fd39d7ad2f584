"""The sizes and constants that fix a model's computation. Holds no tensors and knows no file format."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model. All sizes are counts of values; rope_theta is the rotary base, norm_epsilon is added to the mean square.

    rotary_divisors: what each rotated pair's frequency is divided by; empty: by nothing. windows: see CacheShape. qkv_bias:
    queries, keys and values have biases. qk_norm: each query and key head is normalised before its rotation.
    """

    architecture: str
    vocabulary_size: int
    layers: int
    hidden_size: int
    feed_forward_size: int
    heads: int
    kv_heads: int
    head_size: int
    rope_theta: float
    norm_epsilon: float
    context_tokens: int
    rotary_divisors: tuple[float, ...] = ()
    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, f"{self.heads} heads do not share {self.kv_heads} kv heads evenly"
        assert self.head_size % 2 == 0, f"head size {self.head_size} cannot be rotated in halves"

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one key and value head."""
        return self.heads // self.kv_heads

    @property
    def query_size(self) -> int:
        """Values of one token's queries, all heads together."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Values of one token's keys, all heads together; its values are as many."""
        return self.kv_heads * self.head_size
