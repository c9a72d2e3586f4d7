"""A precision mode is a row of data.

The columns are those of `mprun.records.policy_columns`, and the table of modes is
`conf/precision/*.yaml`. Modes of 8 bits or fewer are `bf16_mixed` with a format of products. Keras
calls the first two columns the variable dtype and the compute dtype.

`policy("bf16_sr")` gives the row of a name; names of Lightning and Keras are accepted too
(`mprun.records.mode_names`). `policy("p=fp32,c=bf16,o=fp32")` gives the mode with these dtypes of
parameters, computation and output, in DeepMind's notation (jmp), as `str` of a changed row is too.

A row must be one that this version really carries out. Other combinations are refused here, so that
none is silently replaced by another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import FrozenInstanceError, asdict, dataclass, replace
from functools import cache
from typing import Any

import torch

from mprun.errors import hint
from mprun.records.mode_names import ALIASES, SHIPPED_MODES, SHORT_DTYPES, mode_hint, mode_row
from mprun.records.policy_columns import (
    COMPENSATED,
    FLOAT_DTYPES,
    FORMAT_MODES,
    LOW_DTYPES,
    PolicyColumns,
    legal_values,
)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of one of PyTorch's names, such as `float32`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def most_used(dtypes: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """The dtype of most elements, from pairs with their number; float32 without any."""
    counts: Counter[torch.dtype] = Counter()
    for dtype, elements in dtypes:
        counts[dtype] += elements
    return counts.most_common(1)[0][0] if counts else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """PyTorch's name of a dtype, as in records: `float32`."""
    return str(dtype).removeprefix("torch.")


# The hash is safe: no field can change after it is set
@dataclass(kw_only=True, unsafe_hash=True)
class Policy(PolicyColumns):
    """One precision mode; it cannot be changed.

    Raises:
        ValueError: a combination that is not carried out, with the legal values.
    """

    name: str

    def __post_init__(self) -> None:
        for key, legal in self._legal().items():
            if getattr(self, key) not in legal:
                raise ValueError(
                    f"precision.{key}={_yaml(getattr(self, key))} with precision={self.name} "
                    f"(casting={self.casting}): legal is {', '.join(map(_yaml, legal))}"
                )

    def __setattr__(self, name: str, value: object) -> None:
        # `frozen=True` is not for a class whose base, the row of a record, can be changed.
        if name in vars(self):
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)

    @property
    def is_low(self) -> bool:
        """Whether anything is computed in 16 bits."""
        return self.compute_dtype in LOW_DTYPES

    @property
    def input_dtype(self) -> str:
        """The dtype of floating inputs when they go to the device.

        The parameters' dtype where nothing casts (PyTorch's `model.half()` needs float16 inputs
        too); float32 where a caster casts them.
        """
        return "float32" if self.casts else self.param_dtype

    @property
    def casts(self) -> bool:
        """Whether ops cast their inputs; otherwise they run in the dtype of the parameters."""
        return self.casting != "none"

    def _legal(self) -> dict[str, tuple[Any, ...]]:
        parameters = ("float32",) if self.casts else FLOAT_DTYPES
        computes = LOW_DTYPES if self.casts else (self.param_dtype,)
        everywhere = self.is_low and self.rounding == "stochastic"
        # Products may have formats of their own where nothing else decides how they run
        plain = not self.has_low_partials and self.rounding_scope == "update" and not self.tf32
        plain &= self.casting != "op_lists" and self.param_dtype != "float64"
        formats = ("layers", *FORMAT_MODES) if plain else ()
        legal = legal_values() | {
            "param_dtype": parameters,
            "compute_dtype": computes,
            "output_dtype": tuple(dict.fromkeys(("float32", self.compute_dtype))),
            "rounding_scope": ("update", "all") if everywhere else ("update",),
            "overflow": ("infinity",) if self.rounding in COMPENSATED else ("infinity", "saturate"),
            # Of gradients: as the parameter, or wider
            "accum_dtype": tuple(dict.fromkeys((self.param_dtype, "float32"))),
            # mprun rounds partials to float16 alone
            "partials_dtype": ("float32",) + ("float16",) * (self.compute_dtype == "float16"),
            "tf32": (False, self.compute_dtype == "float32"),
            "gemms": ("none", *formats),
            "hadamard": (False, self.gemms != "none"),
        }
        columns = ("accum", "momentum", "variance", "reduce", "partials")
        for key in (f"{x}_dtype" for x in columns):  # float64 is kept in nothing narrower
            both = [x for x in legal[key] if (x == "float64") == (self.param_dtype == "float64")]
            legal[key] = tuple(both) or ("float64",)
        named = _fixed_by_name(self.name, legal) if self.name in SHIPPED_MODES else {}
        return {**legal, **named}

    def __str__(self) -> str:
        if self.name in SHIPPED_MODES and self == policy(self.name):
            return self.name  # which says more than the dtypes: several modes share them
        return self.notation

    @property
    def notation(self) -> str:
        """The dtypes of parameters, computation and output: `p=fp32,c=bf16,o=fp32`."""
        three = self.param_dtype, self.compute_dtype, self.output_dtype
        dtypes = zip(LETTERS, three, strict=True)
        return ",".join(f"{letter}={SHORT_DTYPES[dtype]}" for letter, dtype in dtypes)

    def columns(self) -> dict[str, Any]:
        """The row without its name, as in records."""
        row = asdict(self)
        del row["name"]
        return row


def _fixed_by_name(mode: str, legal: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The legal values of the columns that tell a shipped mode: others need another name."""
    row = mode_row(mode)
    fixed: dict[str, tuple[Any, ...]] = {
        key: (row[key],) for key in ("casting", "param_dtype", "compute_dtype", "tf32")
    }
    fixed["gemms"] = tuple(x for x in legal["gemms"] if x not in FORMAT_MODES)
    if mode in FORMAT_MODES:
        fixed["gemms"] = (mode,)
    elif row["casting"] == "autocast":
        fixed["casting"] = ("autocast", "op_lists")  # op lists are another way to the same casts
    if row["param_dtype"] in LOW_DTYPES:
        # `_true` or `_sr` says how 16-bit parameters are rounded; a remainder rounds to nearest.
        nearest = ("nearest", *COMPENSATED)
        fixed["rounding"] = nearest if row["rounding"] == "nearest" else (row["rounding"],)
    if row["rounding_scope"] == "all":
        fixed["rounding_scope"] = ("all",)
    return fixed


def _yaml(value: str | bool) -> str:
    """A value as users write it."""
    return str(value).lower() if isinstance(value, bool) else value


# Short to long name of a dtype in a policy's text
LETTERS = {"p": "params", "c": "compute", "o": "output"}
DTYPE_NAMES = {
    **dict.fromkeys(("float64", "fp64", "f64", "double"), "float64"),
    **dict.fromkeys(("float32", "fp32", "f32", "float", "full"), "float32"),
    **dict.fromkeys(("float16", "fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
}
# The modes that a text of dtypes can mean: none of two has the same parameters and computation
BY_DTYPES = ("fp64", "fp32", "bf16_mixed", "fp16_mixed", "bf16_true", "fp16_true")


@cache
def policy(name: str) -> Policy:
    """The shipped mode of a name, `policy("bf16_sr")`, or of three dtypes.

    Args:
        name: of a mode; or `p=fp32,c=bf16,o=fp32` (`params=`, `compute=`, `output=`), where a dtype
            that is left out is float32 for parameters, that of the parameters for the computation,
            and float32 for the output.

    Raises:
        TypeError: it is not a text.
        ValueError: no mode has this name, or these dtypes.
    """
    if not issubclass(type(name), str):
        near = mode_hint(str(name), SHIPPED_MODES)  # of torch.bfloat16, three
        kind = type(name).__name__
        raise TypeError(f"a mode of type {kind}; legal: a name, such as 'bf16_sr'{near}")
    if "=" in name:
        return _of_dtypes(name)
    name = ALIASES.get(name, name)
    if name not in SHIPPED_MODES:
        legal = ", ".join([*SHIPPED_MODES, *ALIASES])
        raise ValueError(
            f"no precision mode is named '{name}'{mode_hint(name, SHIPPED_MODES)}; legal: {legal}"
        )
    return Policy(**mode_row(name))


def policy_of(given: Policy | str) -> Policy:
    """A policy itself, or that of a name; `TypeError` or `ValueError` where it is neither."""
    if not isinstance(given, Policy | str):
        raise TypeError(
            f"a policy of type {type(given).__name__}; legal: the name of a mode, such as "
            f"'bf16_sr', or what mprun.policy(name) gives{mode_hint(str(given), SHIPPED_MODES)}"
        )
    return given if isinstance(given, Policy) else policy(given)


def _of_dtypes(text: str) -> Policy:
    """The mode of `p=fp32,c=bf16,o=fp32`."""
    given: dict[str, str] = {}
    long = {name: letter for letter, name in LETTERS.items()}
    for part in text.split(","):
        key, _, value = (x.strip() for x in part.partition("="))
        letter = long.get(key, key)
        if letter not in LETTERS or letter in given or value not in DTYPE_NAMES:
            raise ValueError(
                f"'{part.strip()}' in the policy '{text}'{hint(value, DTYPE_NAMES)}; legal: "
                f"p=DTYPE,c=DTYPE,o=DTYPE (params, compute, output), each once, with a DTYPE of "
                f"{', '.join(DTYPE_NAMES)}"
            )
        given[letter] = DTYPE_NAMES[value]
    params = given.get("p", "float32")
    compute = given.get("c", params)
    modes = [policy(name) for name in BY_DTYPES]
    fitting = [x for x in modes if (x.param_dtype, x.compute_dtype) == (params, compute)]
    if not fitting:
        raise ValueError(
            f"no mode has parameters in {params} and computes in {compute} ('{text}'); legal: "
            + ", ".join(f"{x.notation} ({x.name})" for x in modes)
        )
    return replace(fitting[0], output_dtype=given.get("o", fitting[0].output_dtype))
