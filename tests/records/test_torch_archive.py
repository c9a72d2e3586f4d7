"""The archive of `torch.save` is checked before PyTorch reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mprun.records.reader import DamagedArchiveError, check_archive

WEIGHTS = {"weight": torch.arange(64.0).reshape(8, 8), "bias": torch.ones(8)}
FILE = Path("weights.pt")


def test_a_whole_file_passes() -> None:
    torch.save(WEIGHTS, FILE)
    check_archive(FILE)


def test_an_older_form_is_refused() -> None:
    torch.save(WEIGHTS, FILE, _use_new_zipfile_serialization=False)
    with pytest.raises(DamagedArchiveError, match=r"since PyTorch 1\.6"):
        check_archive(FILE)


def test_changed_bytes_are_refused_or_mean_nothing() -> None:
    torch.save(WEIGHTS, FILE)
    whole = FILE.read_bytes()
    refused = 0
    for place in range(4, len(whole), 5):
        FILE.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        try:
            check_archive(FILE)
        except DamagedArchiveError:
            refused += 1
            continue
        try:
            loaded = torch.load(FILE, weights_only=True)
        except Exception:  # PyTorch noticed it
            continue
        for name, tensor in WEIGHTS.items():
            assert torch.equal(loaded[name], tensor), place
    assert refused > 100


def test_a_file_cut_anywhere_is_refused() -> None:
    torch.save(WEIGHTS, FILE)
    whole = FILE.read_bytes()
    for size in [0, *range(4, len(whole) - 1, 50)]:
        FILE.write_bytes(whole[:size])
        with pytest.raises(DamagedArchiveError):
            check_archive(FILE)
