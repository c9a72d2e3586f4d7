"""The archive that `torch.save` writes, checked before PyTorch reads it. No torch.

PyTorch reads a file of weights in C++ that trusts the file: a damaged one may end the process
without a word, and changed bytes become changed weights. The archive is a zip file whose entries
are stored as they are, each with its CRC-32. So Python can check all of it first. A file of an
older form, which PyTorch reads in Python, has nothing to check here.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import BinaryIO

from mprun.records.reader import open_regular

ZIP = b"PK\x03\x04"
BLOCK_BYTES = 2**20
ENCRYPTED = 0x1


class DamagedArchiveError(ValueError):
    """Why a file is no whole archive, as `it ...`."""


def check_archive(path: Path) -> None:
    """Check that a file is a whole archive of `torch.save`, or has an older form.

    Raises:
        OSError: it cannot be read, or is no regular file.
        DamagedArchiveError: it is empty or damaged.
    """
    with open_regular(path) as file:
        start = file.read(len(ZIP))
        if not start:
            raise DamagedArchiveError("it is empty")
        if start == ZIP:
            try:
                _check_zip(file)
            except Exception as error:  # zipfile raises almost anything for a damaged file
                raise DamagedArchiveError(f"it is no whole zip archive: {error}") from None


def _check_zip(file: BinaryIO) -> None:
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if len({entry.filename for entry in entries}) < len(entries):
            raise zipfile.BadZipFile("two entries have one name")
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & ENCRYPTED:
                raise zipfile.BadZipFile(f"{entry.filename!r} is not stored as it is")
            if entry.file_size != entry.compress_size:
                raise zipfile.BadZipFile(f"{entry.filename!r} has two sizes")
        if sum(entry.file_size for entry in entries) > file.seek(0, io.SEEK_END):
            raise zipfile.BadZipFile("its entries overlap")
        for entry in entries:
            with archive.open(entry) as content:
                while content.read(BLOCK_BYTES):  # to its end, where the CRC-32 is compared
                    pass
