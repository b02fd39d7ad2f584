"""Carries out step plans: the model, its cache and the sampler behind one synchronous call.

Loading decides, once, how this machine computes: precision, packing, kernels or their fallback, and whether what results is
exact (the same bits for a row whatever shares its step). It knows no requests beyond a plan's chunks.
"""

# isort: off
from workers.engine.model import threads as waiting  # first: it sets how torch's threads wait
# isort: on

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from schemas.envelope import Sampling
from workers.engine.attention.protocol import CacheShape
from workers.engine.batch import make_batch
from workers.engine.model.arrays import Buffer
from workers.engine.model.backends import Backends, choose_backends, device_backends
from workers.engine.model.config import ModelConfig
from workers.engine.model.device_linear import choose_device_scheme
from workers.engine.model.linear import Scheme, Shape, choose_scheme, has_onednn
from workers.engine.model.llama import Layer, Llama, pack_layer
from workers.engine.model.pace import Pace
from workers.engine.plan import Chunk, StepPlan, StepResult
from workers.engine.sampler import NotFiniteLogits, draw, logprobs
from workers.engine.weights.gguf_file import GgufFile, TokenizerFields
from workers.engine.weights.hugging_face import HuggingFaceDirectory
from workers.engine.weights.llama import TensorSource, read_layers, read_outer

Precision = Literal["bf16", "fp32"]
Logits = npt.NDArray[np.float32]

_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Description:
    """What was loaded and how it runs."""

    precision: Precision
    exact: bool
    exact_reason: str
    weights_bytes: int
    cache_bytes: int
    cache_tokens: int
    threads: int
    load_ms: int

    def numbers(self) -> dict[str, int | bool | str]:
        """The fields by name, for a log line."""
        return asdict(self)


class ModelRunner:
    """A model of a GGUF file or Hugging Face directory, with a cache of cache_blocks blocks of block_tokens positions.

    device: None for the processor's kernels, else plain torch on that device; deterministic then asks for one order of sums.
    threads: None for as many as pay, up to the processors that this process may use. progress is told the share done, 0 to 1,
    and what is being done. WeightsError when the file cannot be loaded. One thread at a time calls it.
    """

    def __init__(
        self,
        path: str | Path,
        precision: Literal["auto", "bf16", "fp32"] = "auto",
        cache_blocks: int = 512,
        block_tokens: int = 16,
        threads: int | None = None,
        progress: Callable[[float, str], None] | None = None,
        device: torch.device | None = None,
        deterministic: bool = True,
    ) -> None:
        began = time.perf_counter()
        self._say = progress or (lambda share, what: None)
        self._say(0.0, "reading the model file")
        self._file = file = HuggingFaceDirectory(path) if Path(path).is_dir() else GgufFile(path)
        self.config = file.config()
        self._device, self._deterministic = device, deterministic
        fitting: Precision = "bf16" if device is not None and device.type == "cuda" else _fitting_precision()
        self.precision: Precision = fitting if precision == "auto" else precision
        self._threads = waiting.options(threads)
        self._block_tokens = block_tokens
        torch.set_num_threads(self._threads[-1])
        with torch.inference_mode():
            self._load(file, cache_blocks)
        self._load_ms = round(1000 * (time.perf_counter() - began))
        self._say(1.0, "loaded")

    @property
    def tokenizer_fields(self) -> TokenizerFields:
        """What a tokenizer is built from. WeightsError when the file holds none, or one that is not read."""
        return self._file.tokenizer_fields()

    @property
    def exact(self) -> bool:
        """Whether a row's bits are the same whatever shares its step and however its prompt was cut."""
        return self._inexact_because is None

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a step. NotFiniteLogits, naming the requests, when the model's result is not a number."""
        drawing = [chunk for chunk in plan.chunks if chunk.samples]
        drawn: dict[str, int] = {}
        likely = {}
        broken = []
        for chunk, row in zip(drawing, self.logits(plan), strict=True):
            token = draw(row, chunk.sampling, chunk.end, chunk.prompt_ids, chunk.output_ids)
            if token is None:
                broken.append(chunk.request)
            else:
                drawn[chunk.request] = token
                if chunk.sampling.top_logprobs is not None:
                    likely[chunk.request] = logprobs(row, token, chunk.sampling.top_logprobs)
        if broken:
            raise NotFiniteLogits(tuple(broken))
        return StepResult(drawn, likely)

    def logits(self, plan: StepPlan) -> Logits:
        """Computes a step without drawing: float32 [chunks that sample, vocabulary_size]."""
        batch = make_batch(plan, self._block_tokens)
        last, slot = int(batch.positions.max()), int(batch.slots.max())
        assert last < self.config.context_tokens, f"position {last} of a context of {self.config.context_tokens}"
        assert slot < self._cache_blocks * self._block_tokens, f"slot {slot} of {self._cache_blocks * self._block_tokens}"
        threads = self._pace.choose(batch.rows)
        torch.set_num_threads(threads)  # OpenMP counts per calling thread, which need not be the one that loaded
        self._backends.limit_threads(threads)
        began = time.perf_counter()
        with torch.inference_mode():
            logits = self._model.forward(batch)
        self._pace.record(batch.rows, batch.keys, threads, time.perf_counter() - began)
        return logits

    def warm_up(self) -> None:
        """Runs a short step and a long one, so that no request waits for threads to start or memory to be mapped.

        All kernels were compiled when the model was loaded: numba's by their signatures, oneDNN's when they were compared.
        """
        self._say(0.0, "warming up")
        for rows in (1, min(256, self._cache_blocks * self._block_tokens)):
            self.run(StepPlan((_warm_up_chunk(rows, self._block_tokens),)))
        self._say(1.0, "warm")

    def describe(self) -> Description:
        """Sizes and how it runs."""
        return Description(
            precision=self.precision,
            exact=self.exact,
            exact_reason=self._inexact_because or self._backends.attention.reason,
            weights_bytes=self._weights_bytes,
            cache_bytes=self._backends.attention.cache_bytes,
            cache_tokens=self._cache_blocks * self._block_tokens,
            threads=self._threads[-1],
            load_ms=self._load_ms,
        )

    def _load(self, file: TensorSource, cache_blocks: int) -> None:
        config, dtype = self.config, _DTYPES[self.precision]
        self._cache_blocks = cache_blocks
        self._scheme = self._choose_scheme(set(_linear_shapes(config)), dtype)
        self._pace = Pace(self._threads)
        outer = read_outer(file, config)
        embedding = self._scheme.place(torch.from_numpy(outer.embedding).to(dtype))
        head = embedding if outer.head is None else self._scheme.place(torch.from_numpy(outer.head).to(dtype))
        self._backends = self._choose_backends(_cache_shape(config, cache_blocks, self._block_tokens), head)
        layers = tuple(self._pack_layers(file, dtype))
        norm = Buffer(self._scheme.place(torch.from_numpy(outer.norm)))
        parts = (self._scheme, self._backends.operations, self._backends.attention)
        self._model = Llama(config, embedding, layers, norm, *parts)
        self._inexact_because = self._why_inexact()
        in_layers = config.layers * sum(outputs * inputs for outputs, inputs, _ in _linear_shapes(config))
        self._weights_bytes = embedding.nbytes + self._backends.operations.head_bytes + in_layers * dtype.itemsize

    def _choose_scheme(self, shapes: set[Shape], dtype: torch.dtype) -> Scheme:
        if self._device is not None:
            return choose_device_scheme(shapes, dtype, self._device, self._deterministic)
        scheme = choose_scheme(shapes, dtype, self._threads)
        if not scheme.exact and len(self._threads) > 1:  # exact at one thread count is better than not at all
            self._threads = self._threads[-1:]
            scheme = choose_scheme(shapes, dtype, self._threads)
        return scheme

    def _choose_backends(self, shape: CacheShape, head: torch.Tensor) -> Backends:
        if self._device is None:
            return choose_backends(self.config, shape, head)
        fixed = self._scheme.rows_at_first if self._deterministic else None
        return device_backends(self.config, shape, head, self._deterministic, fixed)

    def _pack_layers(self, file: TensorSource, dtype: torch.dtype) -> Iterator[Layer]:
        for number, weights in enumerate(read_layers(file, self.config)):
            yield pack_layer(weights, self._scheme, dtype)
            self._say((number + 1) / (self.config.layers + 1), f"layer {number + 1} of {self.config.layers}")

    def _why_inexact(self) -> str | None:
        if not self._backends.attention.exact:
            return self._backends.attention.reason
        if not self._scheme.exact:
            return "no way of packing linear layers gives the same bits at every number of rows on this machine"
        return None


def _fitting_precision() -> Precision:
    """bf16 where the processor multiplies in it; float32 elsewhere, where emulation would be slower."""
    tells = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
    native = any(getattr(torch.cpu, tell, lambda: False)() for tell in tells)
    return "bf16" if native and has_onednn() else "fp32"


def _linear_shapes(config: ModelConfig) -> list[Shape]:
    """Of a layer's linear layers."""
    hidden, forward = config.hidden_size, config.feed_forward_size
    qkv = config.query_size + 2 * config.kv_size
    return [
        (qkv, hidden, config.qkv_bias),
        (hidden, config.query_size, False),
        (2 * forward, hidden, False),
        (hidden, forward, False),
    ]


def _cache_shape(config: ModelConfig, blocks: int, block_tokens: int) -> CacheShape:
    sizes = (config.heads, config.kv_heads, config.head_size)
    return CacheShape(config.layers, blocks, block_tokens, *sizes, windows=config.windows)


def _warm_up_chunk(rows: int, block_tokens: int) -> Chunk:
    blocks = tuple(range(-(-rows // block_tokens)))
    return Chunk("warm-up", (0,) * rows, 0, blocks, True, Sampling(seed=0, temperature=0.0))
