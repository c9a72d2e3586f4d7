"""Standard output and standard error that may be full, or in another encoding.

The reader of a pipe may leave (`mprun ... | head`), the disk behind a redirected output may be
full. None of that is a fault of the run, whose record is in files. So the run continues, and what
cannot be written is dropped. The user gets one line on standard error, unless a reader left, and
the exit status is 1 where it would have been 0, as that of any program whose output is incomplete.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from mprun.errors import EXIT_FAILED, EXIT_OK


class PatientStream:
    """A text stream that drops what cannot be written.

    None stands for a stream that was closed. Of the output, a line on standard error says that
    something was dropped.
    """

    def __init__(self, stream: TextIO | None, is_output: bool = False) -> None:
        self._stream, self._is_output = stream, is_output
        self.error: OSError | None = None
        """Why something was dropped."""

    def write(self, text: str) -> int:
        """Write a text; a character that the encoding lacks becomes an escape."""
        self._attempt(lambda stream: self._write(stream, text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._attempt(lambda stream: stream.flush())

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @staticmethod
    def _write(stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def _attempt(self, act: Callable[[TextIO], object]) -> None:
        if self._stream is None or self.error is not None:
            return
        try:
            act(self._stream)
        except OSError as error:
            self.error = error
            with contextlib.suppress(OSError, ValueError):  # Python flushes once more at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if self._is_output and self._is_incomplete:
                print(
                    f"mprun: standard output cannot be written ({error.strerror}); what mprun "
                    "prints is incomplete",
                    file=sys.stderr,
                )

    @property
    def _is_incomplete(self) -> bool:
        # not if the reader left on purpose: `| head`
        return self.error is not None and not isinstance(self.error, BrokenPipeError)

    def status(self, of_command: int) -> int:
        """The exit status of a command that printed to it."""
        return EXIT_FAILED if self._is_incomplete and of_command == EXIT_OK else of_command


@contextlib.contextmanager
def patient_streams() -> Iterator[PatientStream]:
    """Inside, standard output and error drop what cannot be written."""
    out, err = sys.stdout, sys.stderr
    patient, errors = PatientStream(out, True), PatientStream(err)
    sys.stdout, sys.stderr = patient, errors
    try:
        yield patient
    finally:
        patient.flush()
        errors.flush()
        sys.stdout, sys.stderr = out, err
