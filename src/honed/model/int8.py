"""A product in 8-bit integers on a CPU: weights per output channel, activations per token, sums in 32 bits, and the few
input channels whose values are far larger than all others in full precision (Dettmers et al. 2022, section 3.2).

A row is scaled by its own largest value and rounded on a fixed grid, so that what a token gets depends on no neighbour,
bit for bit. By FBGEMM, in torch. No autograd.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from honed.errors import ConfigError
from honed.model import half

EXACT_SHARE = 1 / 16
"""Of the input channels, those that are kept in full precision."""
NUM_RANDOM = 512


def activation_bits() -> int:
    """8 where the machine adds products in 32 bits (VNNI), else 7: there pairs of products meet in 16 bits, and 8 would
    saturate."""
    return 8 if torch.cpu._is_vnni_supported() else 7


@torch.inference_mode()
def largest_inputs(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """By path of each Linear, [in]: the largest absolute value of each of its input channels over `ids` [1, T]."""
    found: dict[str, Tensor] = {}

    def note(path: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found[path] = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).abs().amax(0)

        return hook

    hooks = [
        module.register_forward_pre_hook(note(path))
        for path, module in model.named_modules()
        if type(module) is nn.Linear
    ]
    try:
        model(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def calibrate(model: Any, directory: Path) -> dict[str, Tensor]:
    """`largest_inputs` over a page of ordinary text in the tokens of `directory`; random ids where it has no tokenizer.

    Which channels are large is a trait of the weights more than of the text, least so before the second product of an
    MLP: there the channels chosen by random ids let four times the error through.
    """
    file = directory / "tokenizer.json"
    if file.is_file():
        ids = torch.tensor([Tokenizer.from_file(str(file)).encode(PAGE, add_special_tokens=False).ids])
    else:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (1, NUM_RANDOM), generator=draw)
    return largest_inputs(model, ids)


PAGE = """\
<|im_start|>system
You are a careful assistant. Use a tool where one helps, then answer in one short sentence.<|im_end|>
<|im_start|>user
Where is my order 4711, and what would it cost to send 3 parcels of 2.5 kg to Berlin by Friday?<|im_end|>
<|im_start|>assistant
<tool_call>{"name": "get_order", "arguments": {"order_id": "4711", "express": true, "weights": [2.5, 2.5]}}</tool_call>
<|im_end|>
Rivers begin in mountains, where snow melts in spring and rain gathers on stone. They cut valleys over thousands of
years and carry sand to the sea. In 1854 a physician in London marked each death of an epidemic on a map, and saw
that they lay around one water pump; the handle was taken off, and the illness ended.

def mean(values: list[float]) -> float:
    \"\"\"The arithmetic mean; 0.0 of nothing.\"\"\"
    total = 0.0
    for value in values:
        total += value
    return total / len(values) if values else 0.0

# Ingredients
- 250 g of flour, 2 eggs, half a litre of milk
- a pinch of salt; butter for the pan

1) 17 * 23 = 391   2) x^2 - 5x + 6 = 0, so x = 2 or x = 3   3) 12 % of 80 is 9.6
El tren sale a las ocho. Der Zug nach Wien hat zehn Minuten Versp\u00e4tung. Le mus\u00e9e est ferm\u00e9 le lundi.
SELECT name, COUNT(*) FROM visits WHERE day >= '2024-01-01' GROUP BY name HAVING COUNT(*) > 3;
"""


class Quantised:
    """A weight [out, in] in int8, packed for products; `largest` [in] says which channels stay exact."""

    def __init__(self, weight: Tensor, largest: Tensor) -> None:
        if weight.device.type != "cpu" or not half.available():
            raise ConfigError('precision = "int8" is made for x86 CPUs; set it to "full".')
        if weight.dtype != torch.float32:
            raise ConfigError(
                f"precision = 'int8' is made of weights in float32, not {weight.dtype}; set engine.dtype."
            )
        weight = weight.detach().float().clone()
        self._kept = largest.topk(max(1, int(len(largest) * EXACT_SHARE))).indices.sort().values
        self._exact = weight[:, self._kept].t().contiguous()
        self._small = torch.ones(len(largest)).index_fill_(0, self._kept, 0.0)
        weight[:, self._kept] = 0
        scales = weight.abs().amax(1).clamp_(min=1e-12).double() / 127
        with half.packing():
            zeros = torch.zeros(len(weight), dtype=torch.long)
            whole = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
            self._packed = torch.ops.quantized.linear_prepack(whole, None)
        self._highest = 2 ** activation_bits() - 1

    def product(self, x: Tensor) -> Tensor:
        """x [T, in] -> x W^T [T, out]."""
        # channels that stay exact may saturate in here: their quantised weights are zero
        largest = torch.linalg.vector_norm(x * self._small, torch.inf, -1, True).clamp_(min=1e-12)
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        out: Tensor = multiply(x / largest, 2 / self._highest, (self._highest + 1) // 2, self._packed)
        return out.mul_(largest).addmm_(x.index_select(1, self._kept), self._exact)
