"""Before an engine serves a model, a few tokens are computed both ways: in the flat layout, and by transformers alone.

An architecture may hide state that the flat layout doesn't know of (a convolution over tokens, attention of its own
beside the interface). Such a model would answer fluently and wrongly; here it is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from honed.engine.cache import Rows, Shape
from honed.engine.runner import Runner
from honed.engine.scheduler import Piece, Sequence
from honed.errors import ConfigError
from honed.types import Precision, Sampling

NUM_PROMPT, NUM_DECODED = 9, 3
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
COARSE_TOLERANCE = 0.2
"""Of the logits' spread, for bfloat16 and float16, whose kernels differ that much among themselves, and for int8."""


def check(model: Any, runner: Runner, shape: Shape, precision: Precision = "full") -> None:
    """Raises ConfigError when the flat layout's logits are not the model's own."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (NUM_PROMPT + NUM_DECODED,), generator=generator).tolist()
    name = type(model).__name__
    try:
        found = _flat(runner, shape, ids)
    except ConfigError:
        raise
    except Exception as error:  # whatever a foreign forward pass makes of our layout
        raise ConfigError(f"the local engine cannot run a {name}: {error}. Serve it by vLLM.") from error
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids], device=shape.device), use_cache=False).logits[0]
    expected = expected[NUM_PROMPT - 1 :].float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    apart = float((found - expected).norm() / spread)
    if not apart <= (TOLERANCE.get(shape.dtype, COARSE_TOLERANCE) if precision == "full" else COARSE_TOLERANCE):
        raise ConfigError(
            f"the local engine would compute a {name} wrongly: its logits lie {apart:.1%} of their spread from "
            "transformers'. Something in it is not attention over keys and values; serve it by vLLM."
        )


def _flat(runner: Runner, shape: Shape, ids: list[int]) -> Tensor:
    """Logits [NUM_DECODED + 1, vocabulary] after the prompt and after each further token, read one by one."""
    rows = Rows(shape, 1, len(ids))
    sequence = Sequence("selfcheck", ids[:NUM_PROMPT], "", Sampling(), lambda item: None, (0, 0))
    sequence.bank, sequence.row = rows.take(sequence, len(ids))
    found, start = [], 0
    for end in range(NUM_PROMPT, len(ids) + 1):
        sequence.tokens = ids[:end]
        found.append(runner.run([Piece(sequence, start, end)])[1][0].float())
        start = end
    return torch.stack(found)
