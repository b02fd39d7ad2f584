"""The angles of rotary position embedding (Su et al., arXiv 2104.09864), tabled once for every position of the context."""

import numpy as np
import numpy.typing as npt

from workers.engine.model.config import ModelConfig

Table = npt.NDArray[np.float32]


def rotary_tables(config: ModelConfig) -> tuple[Table, Table]:
    """Cosines and sines, [context_tokens, head_size / 2]: position p turns pair i by p * theta ** (-2 i / head_size)."""
    pairs = np.arange(0, config.head_size, 2, dtype=np.float64)
    angles = np.outer(np.arange(config.context_tokens), config.rope_theta ** (-pairs / config.head_size))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
