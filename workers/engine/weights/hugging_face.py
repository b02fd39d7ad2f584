"""A Hugging Face model directory: config.json and safetensors files, one or several with an index.

Tensors are asked for by their GGUF names, so that one reader of layers serves both kinds of file.
"""

import json
import re
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from workers.engine.model.config import ModelConfig
from workers.engine.model.rotary import llama3_divisors
from workers.engine.weights.architectures import BY_HUGGING_FACE, Architecture
from workers.engine.weights.errors import DamagedFile, TensorsMismatch, UnsupportedModel
from workers.engine.weights.gguf_file import TokenizerFields
from workers.engine.weights.hugging_face_tokenizer import fields_of, template_of
from workers.engine.weights.quantisation import Floats

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FORMS = ("F32", "F16", "BF16")

_T = TypeVar("_T")


class HuggingFaceDirectory:
    """An open directory. Every tensor is taken at most once; finish() checks that all were."""

    def __init__(self, path: str | Path) -> None:
        """Reads config.json and the headers of all shards. WeightsError names a file that is missing or damaged."""
        self.path = Path(path)
        self._config = _read_json(self.path / "config.json")
        names = self._need("architectures", list)
        self.architecture = str(names[0]) if names else "none"
        if self.architecture not in BY_HUGGING_FACE:
            raise UnsupportedModel(self.path, f"architecture {self.architecture!r}", BY_HUGGING_FACE)
        self._shards = {name: _open(self.path / name) for name in self._shard_names()}
        self._left = {tensor: shard for shard in self._shards.values() for tensor in shard.keys()}  # noqa: SIM118 - no dict
        self.tied = bool(self._optional("tie_word_embeddings", bool))

    @property
    def features(self) -> Architecture:
        """What the architecture differs in."""
        return BY_HUGGING_FACE[self.architecture]

    def config(self) -> ModelConfig:
        """The model's sizes and constants. WeightsError when one is missing, or a feature is not computed."""
        self._refuse_features()
        hidden, heads, layers = (self._size(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        kv_heads = self._optional("num_key_value_heads", int) or heads
        head_size = self._optional("head_dim", int) or hidden // heads
        if heads % kv_heads or head_size % 2:
            raise UnsupportedModel(self.path, f"{heads} heads, {kv_heads} kv heads, head size {head_size}")
        theta, divisors = self._rotation(head_size)
        return ModelConfig(
            architecture=self.architecture,
            vocabulary_size=self._size("vocab_size"),
            layers=layers,
            hidden_size=hidden,
            feed_forward_size=self._size("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            rope_theta=theta,
            norm_epsilon=float(self._need("rms_norm_eps", float)),
            context_tokens=self._size("max_position_embeddings"),
            rotary_divisors=divisors,
            windows=self._windows(layers),
            qkv_bias=self.features.qkv_bias,
            qk_norm=self.features.qk_norm,
        )

    def tokenizer_fields(self) -> TokenizerFields:
        """The tokenizer's files. WeightsError: missing, damaged, or a kind that is not read."""
        settings = self._optional_json("tokenizer_config.json")
        template = self.path / "chat_template.jinja"
        ends = self._optional_json("generation_config.json").get("eos_token_id")
        end_ids = [] if ends is None else ends if isinstance(ends, list) else [ends]
        try:
            source = template.read_text(encoding="utf-8") if template.exists() else template_of(settings)
            return fields_of(_read_json(self.path / "tokenizer.json"), settings, source, end_ids)
        except ValueError as error:
            raise UnsupportedModel(self.path, f"its tokenizer ({error})") from error
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise DamagedFile(self.path / "tokenizer.json", f"{type(error).__name__}: {error}") from error

    def take(self, name: str, shape: tuple[int, ...]) -> Floats:
        """The tensor as float32 of this shape. WeightsError: missing, taken before, of another shape, or an unread form."""
        own = _own_name(name)
        shard = self._left.pop(own, None)
        if shard is None:
            raise TensorsMismatch(self.path, f"tensor {own} is missing")
        stored = shard.get_slice(own)
        if tuple(stored.get_shape()) != shape:
            raise TensorsMismatch(self.path, f"tensor {own} has shape {tuple(stored.get_shape())}, expected {shape}")
        if stored.get_dtype() not in _FORMS:
            raise UnsupportedModel(self.path, f"tensor {own} of type {stored.get_dtype()}", _FORMS)
        values: Floats = shard.get_tensor(own).to(torch.float32).numpy()
        return np.ascontiguousarray(values)

    def take_rotated(self, name: str, heads: int, head_size: int, columns: int) -> Floats:
        """A query or key projection, rows in rotate-half order, as these files hold them."""
        return self.take(name, (heads * head_size, columns))

    def finish(self) -> None:
        """TensorsMismatch when the files hold tensors that nothing has taken: the model would not be theirs."""
        if self._left:
            raise TensorsMismatch(self.path, f"the model has no use for tensors {', '.join(sorted(self._left))}")

    def _shard_names(self) -> list[str]:
        index = self.path / "model.safetensors.index.json"
        if not index.exists():
            return ["model.safetensors"]
        places = _read_json(index).get("weight_map")
        if not isinstance(places, dict):
            raise DamagedFile(index, "it has no weight_map")
        names = sorted({str(name) for name in places.values()})
        if outside := [name for name in names if Path(name).name != name]:
            raise DamagedFile(index, f"it names {outside[0]!r}, which is not a file of this directory")
        return names

    def _optional_json(self, name: str) -> dict[str, Any]:
        return _read_json(self.path / name) if (self.path / name).exists() else {}

    def _refuse_features(self) -> None:
        activation = self._optional("hidden_act", str) or "silu"
        if activation != "silu":
            raise UnsupportedModel(self.path, f"activation {activation!r}", ("silu",))
        for key in ("attention_bias", "mlp_bias", "quantization_config"):
            if self._config.get(key):
                raise UnsupportedModel(self.path, f"{key} = {self._config[key]!r}")

    def _rotation(self, head_size: int) -> tuple[float, tuple[float, ...]]:
        # Newer files put the base among the parameters, older ones beside them.
        parameters = self._optional("rope_parameters", dict) or self._optional("rope_scaling", dict) or {}
        theta = float(parameters.get("rope_theta") or self._config.get("rope_theta") or 10_000.0)
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        try:
            if kind == "llama3":
                keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
                return theta, llama3_divisors(head_size, theta, *(float(parameters[key]) for key in keys))
            if kind == "linear":
                return theta, (float(parameters["factor"]),) * (head_size // 2)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile(self.path / "config.json", f"rotary scaling {parameters!r}") from error
        if kind != "default" or parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(self.path, f"rotary scaling {parameters!r}", ("default", "linear", "llama3"))
        return theta, ()

    def _windows(self, layers: int) -> tuple[int | None, ...]:
        window = self._optional("sliding_window", int)
        if window is None or self._config.get("use_sliding_window") is False:
            return ()
        kinds = self._optional("layer_types", list) or ["sliding_attention"] * layers
        if len(kinds) != layers or set(kinds) - {"sliding_attention", "full_attention"}:
            raise UnsupportedModel(self.path, f"layer_types {kinds!r} of {layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def _size(self, key: str) -> int:
        number = self._need(key, int)
        if number < 1:
            raise DamagedFile(self.path / "config.json", f"{key} is {number}")
        return number

    def _need(self, key: str, kind: type[_T]) -> _T:
        value = self._optional(key, kind)
        if value is None:
            raise DamagedFile(self.path / "config.json", f"{key} is missing")
        return value

    def _optional(self, key: str, kind: type[_T]) -> _T | None:
        value = self._config.get(key)
        if value is not None and not isinstance(value, kind):
            raise DamagedFile(self.path / "config.json", f"{key} is {value!r}, expected {kind.__name__}")
        return value


def _own_name(name: str) -> str:
    """A GGUF name in these files' terms."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is None:
        return _OUTER[name]
    return f"model.layers.{layer[1]}.{_IN_LAYER[layer[2]]}.{layer[3]}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedFile(path, str(error)) from error
    if not isinstance(value, dict):
        raise DamagedFile(path, "it is not a JSON object")
    return value


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise DamagedFile(path, str(error)) from error
