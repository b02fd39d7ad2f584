"""Text to vectors with a BERT sentence encoder, all-MiniLM-L6-v2 by default. Imports torch and transformers, offline.

A text is cut to its first TOKENS_MAX tokens, their states are averaged, and the mean is scaled to length 1 (Reimers and
Gurevych, "Sentence-BERT", 2019). The same text gives the same vector, alone or in a batch, within 1e-5.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import BertModel
from transformers.utils import logging as transformers_logging

from workers.retrieval.store import Space, Vectors

TOKENS_MAX = 256  # what all-MiniLM-L6-v2 was trained for; its position table has 512
BATCH_TOKENS_MAX = 8192  # padded tokens in one forward pass

FILES = ("model.safetensors", "tokenizer.json", "config.json")


class Embedder:
    """The encoder in a directory that holds FILES. embed may be called from several threads.

    threads is torch's number of threads, for the whole process (None: left as it is). Raises FileNotFoundError for a
    missing file and ValueError for missing weights.
    """

    def __init__(self, directory: Path, threads: int | None) -> None:
        for name in FILES:
            if not (directory / name).is_file():
                raise FileNotFoundError(f"embedding model {directory} has no {name}")
        if threads is not None:
            torch.set_num_threads(threads)
        self._model = _model(directory)
        self.tokens_max = min(TOKENS_MAX, self._model.config.max_position_embeddings)
        self._tokenizer = _tokenizer(directory, self.tokens_max)
        self.space = Space(_model_id(directory), self._model.config.hidden_size)

    @property
    def dimensions(self) -> int:
        """The length of a vector."""
        return self.space.dimensions

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Vectors of the texts, float32 [len(texts), dimensions], each of length 1."""
        encodings = self._tokenizer.encode_batch(list(texts))
        vectors = np.zeros((len(texts), self.dimensions), np.float32)
        for indexes in _batches([len(encoding.ids) for encoding in encodings]):
            vectors[indexes] = self._forward([encodings[index].ids for index in indexes])
        return vectors

    @torch.inference_mode()
    def _forward(self, rows: list[list[int]]) -> Vectors:
        longest = max(len(row) for row in rows)
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state  # [rows, longest, dimensions]
        weights = mask.unsqueeze(-1).to(states.dtype)
        means = (states * weights).sum(1) / weights.sum(1)
        vectors: Vectors = torch.nn.functional.normalize(means, dim=1).numpy()
        return vectors


def _model(directory: Path) -> BertModel:
    """The encoder, which must be whole: transformers fills in missing weights by chance, and only warns."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    loading: Any = BertModel.from_pretrained(
        directory, add_pooling_layer=False, local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    model, loaded = loading
    if loaded["missing_keys"] or loaded["mismatched_keys"]:
        raise ValueError(f"embedding model {directory} lacks weights of a BERT encoder: {loaded}")
    assert isinstance(model, BertModel), f"loaded a {type(model).__name__}"
    return model.eval()  # type: ignore[no-untyped-call, no-any-return]


def _tokenizer(directory: Path, tokens_max: int) -> Tokenizer:
    """The tokenizer without the padding and the cut at 128 tokens that its file asks for."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(tokens_max)
    return tokenizer


def _model_id(directory: Path) -> str:
    """A readable name and 64 bits of the weights' digest: other weights are another space, whatever they are called."""
    name = json.loads((directory / "config.json").read_text()).get("_name_or_path") or "encoder"
    with (directory / "model.safetensors").open("rb") as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()
    return f"{str(name).rsplit('/', 1)[-1]}@{digest[:16]}"


def _batches(lengths: list[int]) -> list[list[int]]:
    """Indexes by batch of BATCH_TOKENS_MAX padded tokens at most: like lengths together, so little is padded."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= BATCH_TOKENS_MAX:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
