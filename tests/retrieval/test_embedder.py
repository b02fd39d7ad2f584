"""The embedder gives each text one vector, whatever batch it is in."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from tests.retrieval.passages import FACTS, embedder, embedder_directory
from workers.retrieval.embedder import BATCH_TOKENS_MAX, TOKENS_MAX, Embedder, _batches

TEXTS = ["Hi.", "", "The lighthouse was painted turquoise.", "日本の首都は東京です。", "word " * 300, "x" * 500, "🙂"]


def test_vectors_are_float32_of_length_1() -> None:
    vectors = embedder().embed(TEXTS)
    assert vectors.shape == (len(TEXTS), 384)
    assert vectors.dtype == np.dtype(np.float32)
    assert embedder().dimensions == embedder().space.dimensions == 384
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(len(TEXTS)), abs=1e-5)


def test_no_texts_have_no_vectors() -> None:
    assert embedder().embed([]).shape == (0, 384)


def test_a_text_has_the_same_vector_alone_and_in_any_batch() -> None:
    together = embedder().embed(TEXTS * 2)
    alone = np.concatenate([embedder().embed([text]) for text in TEXTS])
    largest = float(np.abs(together - np.tile(alone, (2, 1))).max())
    print(f"largest difference {largest:.2e}")
    assert largest < 1e-5


def test_each_question_is_nearest_to_its_own_fact() -> None:
    facts = embedder().embed([text for _, text, _ in FACTS])
    questions = embedder().embed([question for _, _, question in FACTS])
    assert (questions @ facts.T).argmax(1).tolist() == list(range(len(FACTS)))


def test_a_paraphrase_is_closer_than_an_unrelated_sentence() -> None:
    one, same, other = embedder().embed(["A cat sits on the mat.", "A kitten is sitting on a rug.", "Taxes rise in May."])
    assert one @ same > 0.5 > 0.2 > one @ other


def test_vectors_are_those_of_the_published_model() -> None:
    """Literal values of sentence-transformers' all-MiniLM-L6-v2 for its own example sentence."""
    vector = embedder().embed(["This is an example sentence"])[0]
    assert vector[:5] == pytest.approx([0.0677, 0.0635, 0.0487, 0.0793, 0.0374], abs=2e-4)


def test_a_text_is_read_up_to_256_tokens() -> None:
    """[CLS], 254 words, [SEP]: what comes after is not seen, what comes before is."""
    assert embedder().tokens_max == TOKENS_MAX == 256
    head = "word " * 254
    cut, changed, whole = embedder().embed([head + "lighthouse", "sea " + head, head])
    assert np.abs(cut - whole).max() < 1e-5
    assert np.abs(changed - whole).max() > 1e-3


def test_batches_hold_every_index_once_and_are_bounded() -> None:
    lengths = [3, 256, 17, 256, 2, 90] * 30
    batches = _batches(lengths)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[index] for index in batch) <= BATCH_TOKENS_MAX for batch in batches)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).symlink_to(embedder_directory() / name)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Embedder(tmp_path, threads=None)


def test_other_weights_are_another_space(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).symlink_to(embedder_directory() / name)
    weights = safetensors.torch.load_file(embedder_directory() / "model.safetensors")
    weights["encoder.layer.5.output.LayerNorm.bias"] += 0.1
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    assert Embedder(tmp_path, threads=None).space != embedder().space
    del weights["encoder.layer.5.output.LayerNorm.bias"]
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"encoder\.layer\.5\.output\.LayerNorm\.bias"):
        Embedder(tmp_path, threads=None)
