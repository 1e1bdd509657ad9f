"""Attention over a flat [1, T] batch: one forward pass serves decode tokens and chunks of prefill of many sequences.

Registered with transformers' attention interface as "honed_flat"; what belongs to whom arrives as the forward keyword
argument `honed` (a `Flat`), so there is no global state. Keys and values live in `Bank`s: rows of equal length, one row
a sequence. The name is absent from transformers' mask registry, hence no mask is built there: sliding windows, soft
caps and attention sinks arrive as keyword arguments too. Other kinds of layers are refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from honed.errors import ConfigError
from honed.model.bank import Bank

if TYPE_CHECKING:  # which needs numba
    from honed.model.kernels import Step

NAME = "honed_flat"
TILE = 16
"""Positions of a stretch that is always computed in one shape (see Tiles)."""


@dataclass(frozen=True)
class Write:
    """Where new keys and values go: tokens `index` of the flat batch (None: all of them) to (`rows`, `positions`) of a
    bank."""

    bank: Bank
    index: Tensor | None
    rows: Tensor
    positions: Tensor


class Decode:
    """One query each for some rows 0..R-1 of a bank.

    gather [R]: the flat token that is a row's query (any token for a row that has none); rows, index [n]: the rows
    whose answer counts and where it goes; lengths [R]: tokens of each row, its query's included (for a row that has no
    query any number from 1). `start`: row r's query is flat token start + r, and every row counts, so that nothing has
    to be gathered. The first `shared` tokens are the same in every row that counts: they are read once, from row
    `shared_row`.
    """

    def __init__(
        self,
        bank: Bank,
        gather: Tensor,
        rows: Tensor,
        index: Tensor,
        lengths: Sequence[int],
        dtype: torch.dtype,
        shared: int = 0,
        shared_row: int = 0,
        start: int | None = None,
    ) -> None:
        self.bank, self.gather, self.rows, self.index, self.start = bank, gather, rows, index, start
        self.shared, self.shared_row, self.length = shared, shared_row, max(lengths)
        self._lengths = torch.tensor(lengths, device=gather.device)
        self._shortest, self._dtype = min(lengths), dtype
        self._spans: dict[int | None, Span] = {}

    def span(self, window: int | None) -> Span:
        """What the rows see of their own keys, mask [R kv_heads, 1, keys]. A window over all of them is none."""
        window = None if window is None or window >= self.length else window
        if window not in self._spans:
            first = self.shared if window is None else max(0, self._shortest - window)
            mask = decode_mask(self._lengths, first, self.length, self._dtype, window)
            mask = mask.repeat_interleave(self.bank.data.shape[3], 0)
            self._spans[window] = Span(first, self.shared if window is None else 0, mask)
        return self._spans[window]


class Prefill:
    """Flat tokens start..end are a stretch of one row that ends at `length`; `groups` query heads share a key head."""

    def __init__(
        self, bank: Bank, row: int, start: int, end: int, length: int, groups: int, dtype: torch.dtype, device: str
    ) -> None:
        self.bank, self.row, self.start, self.end, self.length = bank, row, start, end, length
        self._groups, self._dtype, self._device = groups, dtype, device
        self._spans: dict[int | None, Span] = {}

    def span(self, window: int | None) -> Span:
        """What the stretch sees of the row's keys, mask [groups * (end - start), length - first]."""
        window = None if window is None or window >= self.length else window
        if window not in self._spans:
            count = self.end - self.start
            first = 0 if window is None else max(0, self.length - count + 1 - window)
            mask = prefill_mask(count, self.length, self._groups, self._dtype, self._device, window)[:, first:]
            self._spans[window] = Span(first, 0, mask)
        return self._spans[window]


class Tiles:
    """Queries of fixed stretches of TILE positions, `number` counted from 0, for some rows of a bank.

    Whatever is asked of a position, it is computed in one shape: TILE queries, those not asked for among them, over
    the keys up to the stretch's end. gather [n, TILE]: the flat token of each query (any for one not asked for);
    rows [n]; index [m]: where the answers of the queries `which` [m] (of n TILE) go.
    """

    def __init__(
        self, bank: Bank, number: int, rows: Tensor, gather: Tensor, index: Tensor, which: Tensor, dtype: torch.dtype
    ) -> None:
        self.bank, self.rows, self.gather, self.index, self.which = bank, rows, gather, index, which
        self.length = (number + 1) * TILE
        self._dtype = dtype
        self._masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None) -> Tensor:
        """[TILE, length], the same for every row."""
        if window not in self._masks:
            device = str(self.rows.device)
            self._masks[window] = prefill_mask(TILE, self.length, 1, self._dtype, device, window)
        return self._masks[window]


@dataclass(frozen=True)
class Span:
    """Keys from `first` on under an additive mask (0 or -inf), after `shared` keys that all rows have in common."""

    first: int
    shared: int
    mask: Tensor


@dataclass(frozen=True)
class Style:
    """How a layer's scores become weights: cap tanh(scores / cap), and per head a logit that takes weight to nothing.

    `window`: how many newest keys a query sees, its own included; sinks [heads].
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether a softmax of the scores is all."""
        return self.softcap is None and self.sinks is None


@dataclass
class Flat:
    """The layout of one step's batch. With a `step`, new keys and values have been written before attention, and it
    attends to those that are not in `decodes`."""

    writes: list[Write] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    tiles: list[Tiles] = field(default_factory=list)
    step: Step | None = None


ATTENTION = ("full_attention", "sliding_attention")
UNSUPPORTED = (
    "kv_lora_rank", "num_kv_shared_layers", "attention_chunk_size", "index_topk", "keep_window_size", "alibi",
    "per_layer_attributes",
)  # fmt: skip
"""Config keys of attention whose keys are not one vector a head, a token and a layer, or not all of them seen."""


MOVING = ("longrope", "dynamic")
"""Kinds of rotary positions whose frequencies depend on the length."""
UNSAID = ("qwen2_moe", "phimoe", "moshi")
"""Models whose windows transformers builds into a mask and never tells the attention function of."""


def position_limit(config: Any) -> int | None:
    """Positions from which on rotary frequencies depend on the longest sequence of a batch (None: they never do).

    Sequences beside each other would then change one another, and cached keys would have been turned otherwise.
    """
    found = getattr(config, "rope_parameters", None) or {}
    kinds = [found] if "rope_type" in found else [kind for kind in found.values() if isinstance(kind, dict)]
    own = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
    return min(
        (kind.get("original_max_position_embeddings") or own for kind in kinds if kind.get("rope_type") in MOVING),
        default=None,
    )


def refuse_unsupported(config: Any) -> None:
    """Raises ConfigError for a decoder whose attention this file would compute wrongly."""
    window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    if window and getattr(config, "model_type", "") in UNSAID:
        raise ConfigError(
            f"the local engine is not told the sliding windows of a {config.model_type}; serve it by vLLM."
        )
    kinds = {kind for kind in (getattr(config, "layer_types", None) or ()) if kind not in ATTENTION}
    if kinds:
        raise ConfigError(f"the local engine has no layers of kind {', '.join(sorted(kinds))}; serve it by vLLM.")
    for key in UNSUPPORTED:
        if getattr(config, key, None):
            raise ConfigError(f"the local engine has no attention with {key}; serve this model by vLLM.")


def decode_mask(lengths: Tensor, first: int, length: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """[R, 1, length - first]: 0 where a row has a token within its window, -inf elsewhere."""
    positions = torch.arange(first, length, device=lengths.device)
    hidden = positions >= lengths[:, None]
    if window is not None:
        hidden |= positions < lengths[:, None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(hidden, float("-inf"))[:, None]


def prefill_mask(
    num_queries: int, length: int, groups: int, dtype: torch.dtype, device: str, window: int | None = None
) -> Tensor:
    """[groups * num_queries, length]: the causal mask of the last `num_queries` positions, once a query head."""
    last = torch.arange(length - num_queries, length, device=device)[:, None]
    positions = torch.arange(length, device=device)
    hidden = positions > last
    if window is not None:
        hidden |= positions <= last - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return mask.repeat(groups, 1)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    honed: Flat,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d]. Writes the banks first."""
    style = Style(kwargs.get("sliding_window"), kwargs.get("softcap"), kwargs.get("s_aux"))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    _, heads, num_tokens, dim = query.shape
    kv_heads = key.shape[1]
    # [T, kv_heads, groups, d]: the queries that share a key head side by side, so keys are never repeated
    queries = query[0].transpose(0, 1).reshape(num_tokens, kv_heads, heads // kv_heads, dim)
    new = torch.stack([key[0].transpose(0, 1), value[0].transpose(0, 1)], 1)
    out = attend_flat(queries, new, honed, layer, style, dim**-0.5 if scaling is None else scaling)
    return out.reshape(1, num_tokens, heads, dim), None


def attend_flat(queries: Tensor, new: Tensor, flat: Flat, layer: int, style: Style, scale: float) -> Tensor:
    """queries [T, kv_heads, groups, d] -> the same shape, contiguous; scores are `scale` times the products.

    New keys and values [T, 2, kv_heads, d] are written to the banks first.
    """
    for write in flat.writes:
        data = write.bank.data[layer]
        data[:, write.rows, :, write.positions] = new if write.index is None else new[write.index]
    if len(flat.decodes) == 1 and flat.decodes[0].start == 0 and len(flat.decodes[0].rows) == len(queries):
        return _decode(queries, flat.decodes[0], layer, style, scale)
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    for decode in flat.decodes:
        if decode.start is None:
            out[decode.index] = _decode(queries[decode.gather], decode, layer, style, scale)[decode.rows]
        else:
            rows = slice(decode.start, decode.start + len(decode.rows))
            out[rows] = _decode(queries[rows], decode, layer, style, scale)
    if flat.step is not None:
        flat.step.attend(queries, out, layer, style.window, scale)
    for prefill in flat.prefills:
        out[prefill.start : prefill.end] = _prefill(queries[prefill.start : prefill.end], prefill, layer, style, scale)
    for tiles in flat.tiles:
        out[tiles.index] = _tiles(queries[tiles.gather] * scale, tiles, layer, style)[tiles.which]
    return out


def _decode(queries: Tensor, decode: Decode, layer: int, style: Style, scale: float) -> Tensor:
    """queries [R, kv_heads, groups, d] -> the same shape.

    Two batched products over views of the bank: on two AVX2 cores 20 to 45 % faster than fused attention at 16 rows and
    more, a little slower at one; and a shared prefix of 200 tokens read once costs a fifth of reading it per row.
    """
    num_rows, kv_heads, groups, dim = queries.shape
    bank_keys, bank_values = decode.bank.layer(layer)
    span = decode.span(style.window)
    own, shared = decode.length - span.first, span.shared
    own_keys = bank_keys[:num_rows, :, span.first : decode.length].reshape(-1, own, dim)
    own_values = bank_values[:num_rows, :, span.first : decode.length].reshape(-1, own, dim)
    flat = queries.reshape(num_rows * kv_heads, groups, dim)
    if style.softcap is None:
        scores = torch.baddbmm(span.mask, flat, own_keys.transpose(1, 2), alpha=scale)
    else:
        scores = _capped(torch.bmm(flat, own_keys.transpose(1, 2)) * scale, style) + span.mask
    scores = scores.view(num_rows, kv_heads, groups, own)
    if not shared:
        return torch.bmm(_weights(scores, style).view(-1, groups, own), own_values).view(queries.shape)
    by_head = queries.transpose(0, 1).reshape(kv_heads, num_rows * groups, dim)
    shared_keys, shared_values = (part[decode.shared_row, :, :shared] for part in (bank_keys, bank_values))
    first = _capped(torch.bmm(by_head, shared_keys.transpose(1, 2)).mul_(scale), style)
    first = first.view(kv_heads, num_rows, groups, shared).transpose(0, 1)
    weights = _weights(torch.cat([first, scores], -1), style)
    own_weights = weights[..., shared:].reshape(-1, groups, own)
    first = weights[..., :shared].transpose(0, 1).reshape(kv_heads, num_rows * groups, shared)
    mixed = torch.bmm(first, shared_values).view(kv_heads, num_rows, groups, dim).transpose(0, 1)
    return torch.bmm(own_weights, own_values).view(queries.shape).add_(mixed)


def _prefill(queries: Tensor, prefill: Prefill, layer: int, style: Style, scale: float) -> Tensor:
    """queries [c, kv_heads, groups, d] -> the same shape."""
    count, kv_heads, groups, dim = queries.shape
    span = prefill.span(style.window)
    keys, values = (part[prefill.row, :, span.first : prefill.length] for part in prefill.bank.layer(layer))
    folded = queries.permute(1, 2, 0, 3).reshape(kv_heads, groups * count, dim)
    if style.plain:
        out = functional.scaled_dot_product_attention(
            folded[None], keys[None], values[None], attn_mask=span.mask[None, None], scale=scale
        )[0]
    else:
        scores = _capped(torch.bmm(folded, keys.transpose(1, 2)) * scale, style) + span.mask
        # [1, kv_heads, groups, c, keys] has the heads where _weights wants them after moving c to the front
        by_query = scores.view(kv_heads, groups, count, -1).permute(2, 0, 1, 3)
        weights = _weights(by_query, style).permute(1, 2, 0, 3).reshape(kv_heads, groups * count, -1)
        out = torch.bmm(weights, values)
    return out.view(kv_heads, groups, count, dim).permute(2, 0, 1, 3)


def _tiles(queries: Tensor, tiles: Tiles, layer: int, style: Style) -> Tensor:
    """queries [n, TILE, kv_heads, groups, d], scaled -> [n TILE, kv_heads, groups, d]."""
    num_tiles, _, kv_heads, groups, dim = queries.shape
    keys, values = (
        part[tiles.rows, :, : tiles.length].reshape(-1, tiles.length, dim) for part in tiles.bank.layer(layer)
    )
    folded = queries.permute(0, 2, 3, 1, 4).reshape(num_tiles * kv_heads, groups * TILE, dim)
    scores = _capped(torch.bmm(folded, keys.transpose(1, 2)), style)
    scores = scores.view(num_tiles, kv_heads, groups, TILE, -1) + tiles.mask(style.window)
    by_query = scores.permute(0, 3, 1, 2, 4).reshape(num_tiles * TILE, kv_heads, groups, -1)
    weights = _weights(by_query, style).view(num_tiles, TILE, kv_heads, groups, -1).permute(0, 2, 3, 1, 4)
    mixed = torch.bmm(weights.reshape(num_tiles * kv_heads, groups * TILE, -1), values)
    return mixed.view(num_tiles, kv_heads, groups, TILE, dim).permute(0, 3, 1, 2, 4).flatten(0, 1)


def _capped(scores: Tensor, style: Style) -> Tensor:
    return scores if style.softcap is None else torch.tanh(scores / style.softcap) * style.softcap


def _weights(scores: Tensor, style: Style) -> Tensor:
    """scores [n, kv_heads, groups, keys] -> weights of the same shape, that sum to 1 less what the sinks take."""
    if style.sinks is None:
        if scores.dtype == torch.float32:
            return torch.softmax(scores, -1)
        return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
    sinks = style.sinks.view(1, *scores.shape[1:3], 1).expand(len(scores), -1, -1, -1)
    wide = torch.cat([scores, sinks.to(scores.dtype)], -1)
    return torch.softmax(wide, -1, dtype=torch.float32)[..., :-1].to(scores.dtype)


AttentionInterface.register(NAME, attend)
