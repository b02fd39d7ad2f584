"""The architectures that are computed: what each is called, and in what it differs from a Llama. Holds no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """gguf: its name in GGUF files, hugging_face: in config.json.

    interleaved: GGUF files hold query and key rows in the order of interleaved rotation. qkv_bias, qk_norm: see ModelConfig.
    """

    gguf: str
    hugging_face: str
    interleaved: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False


ARCHITECTURES = (
    Architecture("llama", "LlamaForCausalLM", interleaved=True),
    Architecture("llama", "MistralForCausalLM", interleaved=True),
    Architecture("qwen2", "Qwen2ForCausalLM", qkv_bias=True),
    Architecture("qwen3", "Qwen3ForCausalLM", qk_norm=True),
)
BY_GGUF = {architecture.gguf: architecture for architecture in ARCHITECTURES}
BY_HUGGING_FACE = {architecture.hugging_face: architecture for architecture in ARCHITECTURES}
