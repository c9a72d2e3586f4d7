"""The compiled part of a wheel: the CPU kernels of mprun/precision/kernels/prebuilt.c.

Everything else about the package stands in pyproject.toml. Where there is no C compiler, the build
asks pip for the one of the package `ziglang`, which is gone after the installation; pip's option
`--no-build-isolation` does without it. A compiler that is missing or fails never fails an
installation: mprun then compiles its kernels where it runs, or works without them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("mprun", "precision", "kernels")
SOURCES = ("formats.h", "blocks.h", "steps.h", "prebuilt.c")
"""What the library is built from: as in __init__.py of that folder, which compares them."""
# Without contraction to fused multiply-add, and without unsafe math: the bits are PyTorch's.
FLAGS = [
    *("-O3", "-std=c11", "-ffp-contract=off", "-fno-fast-math"),
    *("-fno-math-errno", "-fno-trapping-math", "-g0"),
]
LEVELS = {
    0: [],
    256: ["-mavx2", "-mf16c"],
    512: [
        *("-mavx2", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
        "-mprefer-vector-width=512",
    ],
}
"""Bits of a vector to the flags for processors that have them; chosen between at run time."""


ZIG = "ziglang>=0.13"
ZIG_LEVELS = {
    0: ["-mcpu=baseline"],
    256: ["-mcpu=x86_64_v3"],
    512: ["-mcpu=x86_64_v4", "-mprefer-vector-width=512"],
}
"""Zig compiles for the processor at hand unless told otherwise."""


def has_compiler() -> bool:
    """Whether there is the compiler that setuptools takes: that of CC, or of Python's own build."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    try:
        return shutil.which(shlex.split(command)[0]) is not None
    except (ValueError, IndexError):  # no command line
        return False


class Kernels(build_ext):
    """Compiles the file once for each level and links one library, which is no Python module."""

    def run(self) -> None:
        """Build what can be built; whatever a compiler or its absence raises, is a message."""
        self.levels = LEVELS
        if not has_compiler() and importlib.util.find_spec("ziglang") is not None:
            os.environ["CC"] = shlex.join([sys.executable, "-m", "ziglang", "cc"])
            self.levels = ZIG_LEVELS
        try:
            super().run()
        except Exception as error:
            self._tell(error)

    def build_extension(self, ext: Extension) -> None:
        """Compile and link; a level whose flags the compiler does not know is left out."""
        texts = b"\0".join((FOLDER / name).read_bytes() for name in SOURCES)
        fingerprint = int.from_bytes(hashlib.sha256(texts).digest()[:4], "little")
        objects = []
        for level, flags in self.levels.items():
            macros = [("LEVEL", str(level)), ("SOURCES", f"{fingerprint}u")]
            folder = str(Path(self.build_temp, str(level)))
            try:
                objects += self.compiler.compile(
                    ext.sources, output_dir=folder, macros=macros, extra_postargs=FLAGS + flags
                )
            except Exception as error:
                if level == 0:
                    self._tell(error)
                    return
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(target), libraries=["m"], target_lang="c")

    def _tell(self, error: Exception) -> None:
        print(f"mprun is installed without compiled kernels: {error}", file=sys.stderr)


class Wheel(bdist_wheel):
    """A wheel for a platform, not for one version of Python: the library does not know Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag; for any platform where nothing was compiled."""
        built = any(
            Path(self.get_finalized_command("build").build_lib).glob(
                "mprun/precision/kernels/_prebuilt.*"
            )
        )
        return "py3", "none", super().get_tag()[2] if built else "any"


# Windows exports nothing without further marks, and its compiler knows no such flags.
HAS_KERNELS = sys.platform != "win32"
LIBRARY = Extension(
    "mprun.precision.kernels._prebuilt", [str(FOLDER / "prebuilt.c")], optional=True
)
setup(
    ext_modules=[LIBRARY] if HAS_KERNELS else [],
    setup_requires=[ZIG] if HAS_KERNELS and not has_compiler() else [],
    cmdclass={"build_ext": Kernels, "bdist_wheel": Wheel},
)
