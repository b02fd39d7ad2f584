"""Reading GGUF files: the same as the gguf package reads, and a named error for every file that cannot be used."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.engine_torch.small_model import HIDDEN, tensors, write
from workers.engine.runner import ModelRunner
from workers.engine.weights.errors import (
    DamagedFile,
    TensorsMismatch,
    UnsupportedModel,
    UnsupportedQuantisation,
    WeightsError,
)
from workers.engine.weights.gguf_file import GgufFile
from workers.engine.weights.gguf_layout import read_layout
from workers.engine.weights.quantisation import dequantise


def test_the_default_model_reads_as_the_gguf_package_reads_it(gguf_path: Path) -> None:
    """All metadata, and one tensor of each form."""
    own, theirs = read_layout(gguf_path), gguf.GGUFReader(gguf_path)
    assert own.metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(own.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in [theirs.tensors[number] for number in (0, 1, 2, 271)]:
        stored = own.tensors[tensor.name]
        assert stored.form == tensor.tensor_type
        assert np.array_equal(dequantise(gguf_path, stored), gguf.quants.dequantize(tensor.data, tensor.tensor_type))


def test_config_and_tokenizer_of_the_default_model(gguf_path: Path) -> None:
    """Literal values of SmolLM2-135M-Instruct."""
    file = GgufFile(gguf_path)
    config, fields = file.config(), file.tokenizer_fields()
    assert (config.layers, config.hidden_size, config.feed_forward_size) == (30, 576, 1536)
    assert (config.heads, config.kv_heads, config.head_size) == (9, 3, 64)
    assert (config.vocabulary_size, config.context_tokens, config.rope_theta) == (49152, 8192, 100_000.0)
    assert (fields.pre, fields.bos_id, fields.eos_id, fields.add_bos) == ("smollm", 1, 2, False)
    assert (len(fields.tokens), len(fields.merges), fields.tokens[1]) == (49152, 48900, "<|im_start|>")
    assert fields.chat_template is not None


@pytest.mark.parametrize("form", ["Q4_0", "Q5_1", "Q8_0", "Q4_1", "F16", "BF16"])
def test_other_forms_are_read_too(tmp_path: Path, form: str) -> None:
    """What gguf can dequantise, this can."""
    kind = gguf.GGMLQuantizationType[form]
    values = np.random.default_rng(2).normal(0, 1, (4, 64)).astype(np.float32)
    packed = gguf.quants.quantize(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("one", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    layout = read_layout(tmp_path / "one.gguf")
    assert np.array_equal(dequantise(layout.path, layout.tensors["one"]), gguf.quants.dequantize(packed, kind))


def test_rotated_rows_come_in_halves(tmp_path: Path) -> None:
    """Stored rows (0 16 1 17 ...) of a head are read as (0 1 ... 31)."""
    weights = tensors()
    weights["blk.0.attn_k.weight"] = np.repeat(np.arange(32, dtype=np.float32)[:, None], HIDDEN, 1)
    file = GgufFile(write(tmp_path / "m.gguf", weights))
    read = file.take_rotated("blk.0.attn_k.weight", 1, 32, HIDDEN)[:, 0]
    assert read.tolist() == [*range(0, 32, 2), *range(1, 32, 2)]


def test_every_cut_of_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    """The file cut at fifty places, header and tensors, never loads and never fails in another way."""
    whole = write(tmp_path / "m.gguf", tensors()).read_bytes()
    cut = tmp_path / "cut.gguf"
    for keep in range(0, len(whole) - 64, len(whole) // 50):
        cut.write_bytes(whole[:keep])
        with pytest.raises(DamagedFile, match=r"cut\.gguf is damaged"):
            read_layout(cut)


def test_flipped_header_bytes_never_fail_in_another_way(tmp_path: Path) -> None:
    """Each byte of the first part of the header set to 255: it loads or is a WeightsError."""
    whole = write(tmp_path / "m.gguf", tensors()).read_bytes()
    broken = tmp_path / "broken.gguf"
    for at in range(200):
        broken.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        try:
            GgufFile(broken).config()
        except WeightsError as error:
            assert "broken.gguf" in str(error)  # noqa: PT017 - that it may also load is the point


def test_another_file_is_not_a_model(tmp_path: Path) -> None:
    """Text, nothing, and no file at all."""
    (tmp_path / "text").write_text("Once upon a time there was a file that was no model.")
    (tmp_path / "empty").touch()
    for name in ("text", "empty", "absent"):
        with pytest.raises(DamagedFile, match=name):
            GgufFile(tmp_path / name)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tensors(), architecture="mamba")
    with pytest.raises(UnsupportedModel, match="architecture 'mamba' is not supported; supported: llama"):
        GgufFile(path)


@pytest.mark.parametrize(("window", "windows"), [(0, ()), (24, (24,))])
def test_a_sliding_window_is_every_layers(tmp_path: Path, window: int, windows: tuple[int, ...]) -> None:
    assert GgufFile(write(tmp_path / "m.gguf", tensors(), window=window)).config().windows == windows


def test_partly_rotated_heads_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tensors(), rotated=16)
    with pytest.raises(UnsupportedModel, match="16 are rotated"):
        ModelRunner(path, cache_blocks=4)


def test_an_unread_form_is_named(tmp_path: Path) -> None:
    """A form that gguf lists and cannot dequantise."""
    path = write(tmp_path / "m.gguf", tensors())
    layout = read_layout(path)
    stored = layout.tensors["token_embd.weight"]
    strange = type(stored)(stored.name, stored.shape, gguf.GGMLQuantizationType.Q8_K, stored.data)
    with pytest.raises(UnsupportedQuantisation, match=r"tensor token_embd\.weight is stored as Q8_K"):
        dequantise(path, strange)


@pytest.mark.parametrize("name", ["blk.0.ffn_down.weight", "output_norm.weight", "token_embd.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    weights = tensors()
    del weights[name]
    with pytest.raises(TensorsMismatch, match=f"tensor {name} is missing"):
        ModelRunner(write(tmp_path / "m.gguf", weights), "fp32", cache_blocks=4)


def test_a_tensor_without_use_is_named(tmp_path: Path) -> None:
    """A bias would change the model: it is not ignored."""
    weights = tensors() | {"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)}
    with pytest.raises(TensorsMismatch, match=r"no use for tensors blk\.0\.attn_q\.bias"):
        ModelRunner(write(tmp_path / "m.gguf", weights), "fp32", cache_blocks=4)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    weights = tensors() | {"output_norm.weight": np.zeros(HIDDEN + 1, np.float32)}
    with pytest.raises(TensorsMismatch, match=r"output_norm\.weight has shape \(65,\), expected \(64,\)"):
        ModelRunner(write(tmp_path / "m.gguf", weights), "fp32", cache_blocks=4)
