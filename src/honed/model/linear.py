"""The linear layers of a model that only serves: packed, fused, and with any number of LoRA adapters side by side.

`serving_copy` leaves the given model as it was: the copy shares its parameters, and its nn.Linears are replaced by
parts of `Product`s. Sibling projections that read the same input (q, k, v; gate, up) are one product. An adapter is
never merged: its low-rank term is added to the rows of the batch that belong to it (a lane). No autograd.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from honed.errors import ConfigError
from honed.model import half
from honed.model.half import Half
from honed.model.int8 import Quantised

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
PACK_ROWS = 32  # the batch that oneDNN packs for; measured best or equal from 1 to 256 rows
WIDE = 1 << 15
"""Outputs from which on a weight is packed both ways."""
TILE_ROWS = 32
"""Rows of every product where results may not depend on how many there are (in half precision: half.TILE_ROWS)."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter laid out for products: product name -> (down [in, rank], up [rank, out], scaling folded in).

    `key` tells it from every other adapter loaded so far, of the same name too.
    """

    name: str
    digest: str
    key: str
    weights: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Size of its tensors."""
        return sum(t.numel() * t.element_size() for pair in self.weights.values() for t in pair)


@dataclass(frozen=True)
class Lane:
    """Rows start..end of the flat batch belong to `adapter`."""

    start: int
    end: int
    adapter: Adapter


@dataclass
class Lanes:
    """Which rows of the coming forward pass want which adapter. Owned by one serving model; set before each pass."""

    lanes: list[Lane] = field(default_factory=list)


class Product(nn.Module):
    """y = x W^T + b for several Linears that read the same x, plus each lane's low-rank term.

    On a CPU in fp32 the weight is packed for oneDNN, which for 1 to 64 rows takes half to nine tenths of the time of a
    plain product; or, where half precision holds it, as half.py does, which for 1 to 8 rows takes half of oneDNN's time
    and for 128 nine tenths. A weight as wide as a vocabulary is packed both ways, for each is faster at some number of
    rows. `tiled`: products of so many rows at a time, the last filled up with zeros, so that a row's result is the
    same bits whatever the others are. `largest` [in]: the products are made in int8, except for the input channels that
    it says are large (int8.py); the low-rank terms stay as they are, so an adapter is never quantised.
    """

    def __init__(
        self,
        name: str,
        linears: Sequence[nn.Linear],
        lanes: Lanes | None,
        *,
        tiled: bool = False,
        largest: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.name, self.lanes, self.tiled = name, lanes, tiled
        self.splits = [linear.out_features for linear in linears]
        self.in_features = linears[0].in_features
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.bias = _joined_bias(linears, weight)
        self.quantised = None if largest is None else Quantised(weight, largest)
        self.packed = weight.device.type == "cpu" and weight.dtype == torch.float32 and _has_packing()
        wide = len(weight) >= WIDE
        self.narrow = Half(weight) if largest is None and not (wide and tiled) and half.fits(weight) else None
        self.weight: Tensor | None = None
        if self.quantised is None and (self.narrow is None or wide):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS) if self.packed else weight
        self.like = weight.new_empty(0)  # the packed weight does not say its type and place
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def take(self, x: Tensor, part: int) -> Tensor:
        """The part-th Linear's output for x [1, T, in]. The product is computed once for one x."""
        if self._input is not x:
            self._outputs = self.compute(x).split(self.splits, dim=-1)
            self._input = x
        out = self._outputs[part]
        if part == len(self.splits) - 1:
            self._input, self._outputs = None, ()
        return out

    def compute(self, x: Tensor) -> Tensor:
        """[1, T, in] -> [1, T, sum of the outputs]."""
        flat = x.reshape(-1, self.in_features)
        if not len(flat):
            return x.new_zeros(*x.shape[:-1], sum(self.splits))
        num_rows = TILE_ROWS if self.narrow is None else half.TILE_ROWS
        out = _in_tiles(self._product, flat, num_rows) if self.tiled else self._product(flat)
        for lane in self.lanes.lanes if self.lanes else ():
            pair = lane.adapter.weights.get(self.name)
            if pair is None:
                continue
            rows = flat[lane.start : lane.end]
            if self.tiled:
                out[lane.start : lane.end] += _in_tiles(functools.partial(_low_rank, *pair), rows, TILE_ROWS)
            else:
                out[lane.start : lane.end].addmm_(rows @ pair[0], pair[1])
        return out.view(*x.shape[:-1], -1)

    def _product(self, flat: Tensor) -> Tensor:
        if self.quantised is not None:
            out = self.quantised.product(flat)
        elif self.narrow is not None and (self.weight is None or len(flat) * sum(self.splits) <= half.ROOM):
            out = self.narrow.product(flat)
        elif self.packed:
            return torch.ops.mkldnn._linear_pointwise(flat, self.weight, self.bias, "none", [], "")
        else:
            assert self.weight is not None, "a product that is not packed keeps its weight"
            return functional.linear(flat, self.weight, self.bias)
        return out if self.bias is None else out.add_(self.bias)


class Part(nn.Module):
    """Stands where an nn.Linear was."""

    def __init__(self, product: Product, index: int) -> None:
        super().__init__()
        self.product, self.index = product, index

    def forward(self, x: Tensor) -> Tensor:
        return self.product.take(x, self.index)


@dataclass(frozen=True)
class Serving:
    """A model whose Linears are products; `parts` maps a Linear's module path to (product name, part)."""

    model: nn.Module
    lanes: Lanes
    products: dict[str, Product]
    parts: dict[str, tuple[str, int]]


def serving_copy(model: nn.Module, *, tiled: bool = False, largest: Mapping[str, Tensor] | None = None) -> Serving:
    """A copy of a causal LM for serving; parameters that are not Linears stay shared with `model`.

    `largest` by path of each Linear: products in int8 (see Product).
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    clone = copy.deepcopy(model, shared).eval()
    lanes, products, parts = Lanes(), {}, {}
    for path, module in list(clone.named_modules()):
        for names in _groups(module):
            linears = [getattr(module, name) for name in names]
            full = ".".join(filter(None, [path, "+".join(names)]))
            # the head sees only the sampled rows, so lanes cannot apply to it
            found = None if largest is None else largest[".".join(filter(None, [path, names[0]]))]
            product = Product(full, linears, None if "lm_head" in names else lanes, tiled=tiled, largest=found)
            products[full] = product
            for index, name in enumerate(names):
                setattr(module, name, Part(product, index))
                parts[".".join(filter(None, [path, name]))] = (full, index)
    return Serving(clone, lanes, products, parts)


def lay_out(serving: Serving, adapter: Adapter, pairs: dict[str, tuple[Tensor, Tensor]], scaling: float) -> Adapter:
    """`adapter` with the weights of `pairs`: module path -> (lora_A [r, in], lora_B [out, r]).

    Parts of one product get one `down` and a block-diagonal `up`. Raises ConfigError for a module that is no Linear
    here, or whose shape differs.
    """
    grouped: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    for path, (down, up) in pairs.items():
        if path not in serving.parts or path.endswith("lm_head"):
            raise ConfigError(f"the adapter {adapter.name!r} targets {path!r}, which the local engine cannot adapt.")
        full, index = serving.parts[path]
        product = serving.products[full]
        if down.shape[1] != product.in_features or up.shape[0] != product.splits[index]:
            raise ConfigError(
                f"the adapter {adapter.name!r} has shapes {tuple(down.shape)} and {tuple(up.shape)} for {path!r}, "
                f"whose weight is {(product.splits[index], product.in_features)}. Is it for another base model?"
            )
        grouped.setdefault(full, {})[index] = (down, up * scaling)
    weights = {full: _join(serving.products[full], found) for full, found in grouped.items()}
    return replace(adapter, weights=weights)


def _join(product: Product, found: dict[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    rank = sum(down.shape[0] for down, _ in found.values())
    joined = product.like.new_zeros(rank, sum(product.splits))
    row = 0
    for index, (down, up) in sorted(found.items()):
        column = sum(product.splits[:index])
        joined[row : row + down.shape[0], column : column + product.splits[index]] = up.t().to(joined)
        row += down.shape[0]
    down = torch.cat([found[index][0] for index in sorted(found)]).t().to(joined).contiguous()
    return down, joined


def _low_rank(down: Tensor, up: Tensor, x: Tensor) -> Tensor:
    return (x @ down) @ up


def _in_tiles(product: Callable[[Tensor], Tensor], x: Tensor, num_rows: int) -> Tensor:
    """product(x) [n, out] for x [n, in], `num_rows` rows at a time."""
    whole = functional.pad(x, (0, 0, 0, -len(x) % num_rows))
    return torch.cat([product(tile) for tile in whole.split(num_rows)])[: len(x)]


def _groups(module: nn.Module) -> list[tuple[str, ...]]:
    linears = [name for name, child in module.named_children() if type(child) is nn.Linear]
    groups = [group for group in FUSED if all(name in linears for name in group)]
    fused = {name for group in groups for name in group}
    return [*groups, *((name,) for name in linears if name not in fused)]


def _joined_bias(linears: Sequence[nn.Linear], weight: Tensor) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat([weight.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in linears])


def _has_packing() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
