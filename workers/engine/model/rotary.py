"""The angles of rotary position embedding (Su et al., arXiv 2104.09864), tabled once for every position of the context."""

import numpy as np
import numpy.typing as npt

from workers.engine.model.config import ModelConfig

Table = npt.NDArray[np.float32]


def rotary_tables(config: ModelConfig) -> tuple[Table, Table]:
    """Cosines and sines, [context_tokens, head_size / 2]: position p turns pair i by p * theta ** (-2 i / head_size)."""
    frequencies = _frequencies(config.head_size, config.rope_theta)
    if config.rotary_divisors:
        frequencies /= np.array(config.rotary_divisors)
    angles = np.outer(np.arange(config.context_tokens), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def llama3_divisors(head_size: int, theta: float, factor: float, low: float, high: float, trained: float) -> tuple[float, ...]:
    """Llama 3.1's stretching of a context of `trained` tokens (its reference code, apply_scaling).

    Pairs that turn less than `low` times in it are slowed by factor, those that turn more than `high` times are not; those
    between go over smoothly.
    """
    turns = trained * _frequencies(head_size, theta) / (2 * np.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return tuple((1.0 / (share + (1.0 - share) / factor)).tolist())


def _frequencies(head_size: int, theta: float) -> npt.NDArray[np.float64]:
    pairs = np.arange(0, head_size, 2, dtype=np.float64)
    frequencies: npt.NDArray[np.float64] = theta ** (-pairs / head_size)
    return frequencies
