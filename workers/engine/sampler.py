"""One token from one row of logits. A draw is a function of the row, the sampling settings, the ids so far where a penalty
counts them, and (seed, position): nothing else.

Greedy rows that nothing adjusts cost one argmax. Others are drawn by inverse transform from a single uniform number that a
counter-based hash makes of seed and position, so that a replay, in whatever batch, draws the same.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from schemas.envelope import Sampling

Row = npt.NDArray[np.float32]

_MASK = 2**64 - 1
LOGPROB_MIN = -9999.0  # JSON has no minus infinity
_BLOCK = 64  # weights summed at once when the whole vocabulary is drawn from


class NotFiniteLogits(Exception):
    """A row of logits has no finite largest value: the model's computation failed for this request. A fault of ours."""

    def __init__(self, requests: tuple[str, ...]) -> None:
        super().__init__(f"the logits are not finite for {', '.join(requests)}")
        self.requests = requests


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), 53 random bits, from seed and position in [0, 2**64): splitmix64 (Steele et al., 2014) twice."""
    return (_mix(_mix(seed) ^ position) >> 11) * 2.0**-53


def draw(
    logits: Row, sampling: Sampling, position: int, prompt_ids: Sequence[int] = (), output_ids: Sequence[int] = ()
) -> int | None:
    """The token for `position`; None when the row's largest logit is not finite.

    prompt_ids and output_ids, the tokens before position, matter only to penalties. temperature 0: the largest logit as
    adjusted, the lowest id among equals. Otherwise the tokens with at least min_p of the likeliest one's probability, of
    those the top_k largest (lowest ids among equals), then the fewest of them whose probability reaches top_p, then a draw
    in proportion.
    """
    best = int(np.argmax(logits))  # a NaN anywhere is the largest, for numpy
    if not np.isfinite(logits[best]):
        return None
    if sampling.logit_bias or sampling.counts_outputs:
        logits = _adjusted(logits, sampling, prompt_ids, output_ids)
        best = int(np.argmax(logits))
    if sampling.temperature == 0:
        return best
    with np.errstate(under="ignore", over="ignore"):
        weights = np.exp((logits - logits[best]) / np.float32(sampling.temperature))
    if sampling.min_p:
        weights[weights < np.float32(sampling.min_p)] = 0.0  # the likeliest weighs 1
    chance = uniform(sampling.seed, position)
    if sampling.top_k is None and sampling.top_p == 1.0:
        return _draw_from_all(weights, chance)
    kept = _keep(weights, logits, sampling)
    sums = np.cumsum(weights[kept], dtype=np.float64)
    return int(kept[_place(sums, chance * sums[-1])])


def logprobs(logits: Row, token: int, top: int) -> tuple[tuple[int, float], ...]:
    """(token id, logprob) of the token, then of the top likeliest, lowest ids first among equals.

    Log-softmax in float64 of the logits as the model gave them; what is impossible has LOGPROB_MIN.
    """
    raw = logits.astype(np.float64)
    best = raw.max()
    total = best + np.log(np.exp(raw - best).sum())
    ids = _top_k(logits, top) if top else np.empty(0, np.int64)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    return tuple((int(number), max(float(raw[number] - total), LOGPROB_MIN)) for number in (token, *ids))


def _adjusted(logits: Row, sampling: Sampling, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Row:
    """A copy with biases added, then the repetition penalty (Keskar et al., 2019) for what prompt or answer hold, then OpenAI's
    presence and frequency penalties for what the answer holds: vLLM's order."""
    adjusted = logits.copy()
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        adjusted[list(ids)] += np.array(biases, np.float32)
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.array([*prompt_ids, *output_ids], np.int64))
        penalty, values = np.float32(sampling.repetition_penalty), adjusted[seen]
        adjusted[seen] = np.where(values > 0, values / penalty, values * penalty)
    if output_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        said, counts = np.unique(np.array(output_ids, np.int64), return_counts=True)
        adjusted[said] -= (sampling.presence_penalty + sampling.frequency_penalty * counts).astype(np.float32)
    return adjusted


def _keep(weights: Row, logits: Row, sampling: Sampling) -> npt.NDArray[np.int64]:
    """The ids to draw from, most likely first, the lowest id first among equals."""
    ids = _top_k(logits, sampling.top_k) if sampling.top_k is not None else None
    among = weights if ids is None else weights[ids]
    mass = float(among.sum(dtype=np.float64))
    # All ids below this weight together have less than 1 - top_p, so that the kept ones are among the rest: sort only those.
    least = (1.0 - sampling.top_p) * mass / len(among)
    likely = np.flatnonzero(among >= least)
    ids = likely if ids is None else ids[likely]
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    if sampling.top_p == 1.0:
        return ids
    sums = np.cumsum(weights[ids], dtype=np.float64)
    return ids[: _place(sums, sampling.top_p * mass, at_least=True) + 1]


def _top_k(logits: Row, count: int) -> npt.NDArray[np.int64]:
    """The ids of the count largest, ascending; the lowest ids among equals."""
    if count >= len(logits):
        return np.arange(len(logits))
    smallest = np.partition(logits, len(logits) - count)[len(logits) - count]
    above = np.flatnonzero(logits > smallest)
    equal = np.flatnonzero(logits == smallest)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _draw_from_all(weights: Row, chance: float) -> int:
    """The same draw in order of ids: blocks first, then inside the block, so that most weights are only summed."""
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64)
    sums = np.cumsum(blocks)
    wanted = chance * sums[-1]
    block = _place(sums, wanted)
    begin = block * _BLOCK
    before = sums[block - 1] if block else 0.0
    inside = before + np.cumsum(weights[begin : begin + _BLOCK], dtype=np.float64)
    return begin + _place(inside, wanted)


def _place(sums: npt.NDArray[np.float64], wanted: float, at_least: bool = False) -> int:
    """The first index whose running sum is above wanted (at_least: reaches it); by rounding, never past the last weight."""
    index = int(np.searchsorted(sums, wanted, side="left" if at_least else "right"))
    last = int(np.searchsorted(sums, sums[-1], side="left"))  # the last one that adds anything
    return min(index, last)


def _mix(number: int) -> int:
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
