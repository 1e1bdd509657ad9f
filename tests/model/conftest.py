"""What tests of loops share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """On one thread of torch's and on two, with the same random numbers."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(5)
    yield
    torch.set_num_threads(before)
