"""Memory of keys and values: zeros at first, taken as it is written, given back, and zeros again."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from honed.model.bank import RETURNS, Bank, Room


def taken(data: torch.Tensor) -> int:
    """Bytes of a tensor's memory that the system has given it: pages that are present, by /proc's map of them. What was
    only read is present too, as the one page of zeros."""
    first, last = (place // mmap.PAGESIZE for place in (data.data_ptr(), data.data_ptr() + data.nbytes - 1))
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (last - first + 1)), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_room_is_zero_and_of_its_kind(dtype: torch.dtype) -> None:
    made = Room((3, 5), dtype, "cpu").data
    assert made.shape == (3, 5)
    assert made.dtype == dtype
    assert not made.any()
    made += 1
    assert made.sum() == 15


@pytest.mark.skipif(not RETURNS, reason="this system takes no pages back")
def test_rows_and_tokens_are_given_back_and_read_as_zeros() -> None:
    """A token's 64 numbers of 4 bytes: 16 a page; 3 rows of 2 heads, 2 layers, keys and values: 24 stretches of 64."""
    bank = Bank(2, 3, 2, 64, 64, torch.float32, "cpu")
    assert taken(bank.data) == 0
    bank.data[:] = 1
    assert taken(bank.data) == bank.data.nbytes == 24 * 4 * mmap.PAGESIZE
    bank.release_rows(1)
    assert taken(bank.data) == 8 * 4 * mmap.PAGESIZE
    bank.release_tokens(0, 40)  # of the page that holds token 40, the first half is in use
    assert taken(bank.data) == 8 * 3 * mmap.PAGESIZE
    assert not bank.data[:, :, 1:].any()
    assert bank.data[:, :, 0, :, :48].all()
    assert not bank.data[:, :, 0, :, 48:].any()


def test_what_is_not_in_one_piece_is_refused() -> None:
    room = Room((4, 4), torch.float32, "cpu")
    if room.returns:
        with pytest.raises(AssertionError, match="one piece"):
            room.release(room.data[:, :2])
