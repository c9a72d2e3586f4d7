"""Weights in files: those that a run starts from (`train.init_from`), and those it is exported to.

A run starts from a run's folder, a checkpoint of mprun, the result of
`torch.save(model.state_dict(), path)`, or a safetensors file or the index of several. Only weights
are loaded: optimizer, step and order of the data start from zero, so this is no resumed run.
Reading someone else's file runs no code: safetensors has none, and see `load_torch_file`.

Weights are rounded at most once, and `range_warning` warns if that rounding can cost much.

`mprun export` writes the weights of a run's last checkpoint for other programs, in their dtype, as
safetensors or as `torch.save(model.state_dict())`.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from mprun.errors import UsageError, first_line
from mprun.precision import Policy
from mprun.precision.formats import float16_range
from mprun.precision.layers import dtype_of
from mprun.recipe import Recipe
from mprun.records.console.formatting import listed
from mprun.records.files import write_atomic
from mprun.records.layer_values import computes_float16
from mprun.records.reader import DamagedArchiveError, open_regular, read_bytes
from mprun.train import checkpoint
from mprun.train.user_code import explain_mistakes, form_of, model_of

LEGAL = (
    "legal is a run's folder with a checkpoint (train.checkpoint_every_steps, or the run's end), a "
    "checkpoint of mprun, a safetensors file, or one saved by torch.save(model.state_dict(), path)"
)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# float16 rounds to zero below 2^-25. Of usual initial weights, one in a million is that small
# (uniform within 0.03: 2^-25 / 0.03). A larger share is a property of the weights.
ZERO_SHARE = 1e-3
NAMED = 3  # The number of names that a message lists before it counts the rest

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
# Names of the weights in a folder that Hugging Face's libraries wrote
IN_FOLDER = (f"model{SUFFIX}", f"model{INDEX_SUFFIX}")
MAX_INDEX_BYTES = 2**26  # 64 MiB of names: a larger one would fill the memory for nothing


@dataclass(frozen=True)
class Weights:
    """Weights that fit a recipe's model."""

    state: dict[str, Tensor]
    """For `Module.load_state_dict`; on the CPU, floating tensors in float32."""
    parameters: tuple[str, ...]  # Names of the parameters; the others are buffers
    dtypes: frozenset[str]
    """Dtypes that their run stored and computed in; for a plain file, those of the tensors."""

    def load_into(self, model: nn.Module) -> None:
        """Replace the values of `model`'s parameters and buffers."""
        if self.state:
            model.load_state_dict(self.state)


DRAWN = Weights({}, (), frozenset())  # No weights: the model draws its own


def load_weights(path: str, recipe: Recipe, name: str) -> Weights:
    """The weights at `path`, for the model of `recipe`, which is called `name`.

    Raises:
        UsageError: they do not exist, cannot be read, do not fit, or contain NaN.
    """
    (read, dtypes, of_recipe), model = _read(Path(path)), model_to_fill(recipe)
    loaded = with_tied(read, model)
    if misfits := _misfits(loaded, model.state_dict()):
        of = f" (they are from recipe={of_recipe})" if of_recipe not in (None, name) else ""
        raise UsageError(
            f"train.init_from={path}: the weights do not fit the model of recipe={name}{of}: "
            f"{'; '.join(misfits)}; give the recipe and the recipe.model.* they were trained with, "
            "and names without module. or _orig_mod. before them"
        )
    # float32 holds every float16 and bfloat16 value; the mode casts once, from these
    state = {k: v.float() if v.is_floating_point() else v for k, v in loaded.items()}
    for key, tensor in state.items():
        if count := int(tensor.isnan().sum()):
            raise UsageError(
                f"train.init_from={path}: {key} contains NaN ({count:,} of {tensor.numel():,} "
                "values); take weights from before training broke down"
            )
    return Weights(state, tuple(key for key, _ in model.named_parameters()), dtypes)


def range_warning(weights: Weights, policy: Policy, layers: Mapping[str, str]) -> str | None:
    """A warning that the range of float16 is too small for the weights, or None.

    Weights trained in bfloat16 always get one. Others get one if a weight becomes infinite, or more
    than `ZERO_SHARE` of them become zero. `layers` maps names of modules to another dtype or mode.
    """
    mode = "fp16" if "float16" in (policy.param_dtype, policy.compute_dtype) else "another"
    lower = [k for k in weights.parameters if computes_float16(dtype_of(k, layers, mode))]
    cast = [weights.state[k] for k in lower]
    if not cast:
        return None
    lost, trained = float16_range(cast), ""
    if "bfloat16" in weights.dtypes:
        trained = "were trained in bfloat16 and "
    elif not lost.overflow and lost.zero <= ZERO_SHARE * lost.total:
        return None
    return (
        f"these weights {trained}continue in float16, whose range is smaller: {lost}; "
        "precision=bf16_mixed or bf16_true keeps it"
    )


def _read(path: Path) -> tuple[dict[str, Tensor], frozenset[str], str | None]:
    """Weights, dtypes (see `Weights`) and recipe, if known, of a file or folder."""
    # os.path.isdir is False for a name that is too long, or behind a locked folder.
    file = path
    if os.path.isdir(path):  # noqa: PTH112
        own = checkpoint.path_in(path)  # a run's checkpoint, else safetensors
        known = (own, *(path / name for name in IN_FOLDER))
        file = next((x for x in known if x.exists()), own)
    try:
        is_safetensors = file.name.endswith((SUFFIX, INDEX_SUFFIX))
        content = load_safetensors(file) if is_safetensors else checkpoint.load_torch_file(file)
    except Exception as error:  # unpickling a damaged file raises almost anything
        reason = "is damaged, or contains more than tensors and plain values, which is not loaded"
        if isinstance(error, OSError):
            reason = f"cannot be read ({error.strerror})"
        elif isinstance(error, DamagedArchiveError):
            reason = f"is damaged: {error}"
        raise UsageError(f"train.init_from={path}: {file} {reason}; {LEGAL}") from None
    if not isinstance(content, Mapping) or "format_version" not in content:
        state = _state(content, f"train.init_from={path}")
        return state, _dtypes(state), None
    saved = checkpoint.checked(content, file)
    trainer, effective = saved["trainer"], saved.get("effective")
    weights = trainer.get("model") if isinstance(trainer, dict) else None
    state = _state(weights, f"train.init_from={path}")
    row = effective if isinstance(effective, dict) else {}
    trained_in = {str(row[key]) for key in ("param_dtype", "compute_dtype") if key in row}
    return state, _dtypes(state) | trained_in, saved.get("recipe")


def _state(content: Any, source: object) -> dict[str, Tensor]:
    named = content.items() if isinstance(content, Mapping) else ()
    is_known = all(
        isinstance(name, str)
        and isinstance(x, Tensor)
        and x.layout == torch.strided
        # a meta tensor has a shape and no values
        and not x.is_meta
        for name, x in named
    )
    if not (named and is_known):
        raise UsageError(f"{source} contains no weights by name; {LEGAL}")
    return {key: tensor.detach() for key, tensor in content.items()}


def _dtypes(state: Mapping[str, Tensor]) -> frozenset[str]:
    return frozenset(str(x.dtype).removeprefix("torch.") for x in state.values())


def model_to_fill(recipe: Recipe) -> nn.Module:
    """A model of the recipe for weights that exist; nobody's random numbers are drawn."""
    what = f"the model of {type(recipe).__name__} cannot be made"
    with explain_mistakes(what), torch.random.fork_rng(devices=[]):
        return model_of(recipe)


def _misfits(loaded: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> list[str]:
    """The reasons why `loaded` cannot replace the state of the model; empty where it can."""
    named = {
        "missing ": [key for key in model if key not in loaded],
        "unexpected ": [key for key in loaded if key not in model],
        "": [
            f"{key} is {form_of(loaded[key])}, not {form_of(own)}"
            for key, own in model.items()
            if key in loaded and not _fits(loaded[key], own)
        ],
    }
    return [f"{what}{listed(items, NAMED)}" for what, items in named.items() if items]


def _fits(loaded: Tensor, own: Tensor) -> bool:
    # 8-bit codes mean nothing without their scales
    legal = FLOATS if own.is_floating_point() else (own.dtype,)
    return loaded.shape == own.shape and loaded.dtype in legal


def load_safetensors(file: Path) -> dict[str, Tensor]:
    """The tensors by name, on the CPU.

    Raises:
        OSError: it cannot be read.
        DamagedArchiveError: it is no such file.
    """
    state: dict[str, Tensor] = {}
    for part in _parts(file):
        open_regular(part).close()  # a FIFO or a device would block `load_file`
        try:
            state |= load_file(part)
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise DamagedArchiveError(f"{part.name}: {error}") from None
    return state


def _parts(file: Path) -> list[Path]:
    """The file, or those that an index names, which lie beside it."""
    if not file.name.endswith(INDEX_SUFFIX):
        return [file]
    data = read_bytes(file, MAX_INDEX_BYTES)
    try:
        names = sorted(set(json.loads(data)["weight_map"].values()))
        # no paths: someone else's index must not read another folder's files
        plain = all(Path(name).name == name and name.endswith(SUFFIX) for name in names)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamagedArchiveError("it has no weight_map from names to files") from None
    if not plain or not names:
        raise DamagedArchiveError("its weight_map names other files than *.safetensors here")
    return [file.parent / name for name in names]


def with_tied(loaded: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The weights with every name of a tied parameter of which one name is known."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):  # each name of a tied one
        names.setdefault(id(p), []).append(name)
    state = dict(loaded)
    for tied in names.values():
        if known := [name for name in tied if name in loaded]:
            state |= {name: loaded[known[0]] for name in tied if name not in loaded}
    return state


TORCH_SUFFIXES = (".pt", ".pth", ".bin")
EXPORTS = "legal is NAME.safetensors or NAME.pt (a state_dict)"


def weights_of(run: Path) -> dict[str, Tensor]:
    """The model's state in a run's last checkpoint, on the CPU, by name.

    Raises:
        UsageError: there is no checkpoint, or it is damaged.
    """
    saved = checkpoint.load(run)
    if saved is None:
        raise UsageError(
            f"{run} has no checkpoint ({checkpoint.path_in(run)} is missing); a run writes one at "
            "its end, or earlier with train.checkpoint_every_steps"
        )
    return _state(saved["trainer"].get("model"), checkpoint.path_in(run))


def write_file(state: Mapping[str, Tensor], path: Path, facts: Mapping[str, str]) -> None:
    """Write weights into a new file, whose name says in which form.

    `facts` about the run become the metadata of a safetensors file.

    Raises:
        UsageError: the file exists, or its form is not known.
        OSError: it cannot be written.
    """
    if path.exists():
        raise UsageError(f"{path} already exists; choose another name")
    if path.suffix == SUFFIX:
        write_atomic(path, _safetensors(state, facts))
        return
    if path.suffix not in TORCH_SUFFIXES:
        raise UsageError(f"{path}: {EXPORTS}")
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write_atomic(path, buffer.getvalue())


def fill(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a model a run's weights, in their dtypes.

    Raises:
        UsageError: they do not fit.
    """
    own = dict([*model.named_parameters(), *model.named_buffers()])
    # `load_state_dict` would cast to the model's dtypes
    for name, tensor in state.items():
        if name in own:
            own[name].data = own[name].data.to(tensor.dtype)
    try:
        model.load_state_dict(dict(state))
    except RuntimeError as error:
        raise UsageError(
            f"the weights do not fit the recipe's model: {first_line(error)}"
        ) from None


def _safetensors(state: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    # Names of one tied parameter share memory, which safetensors refuses: it gets the first one.
    # `train.init_from` and Hugging Face's libraries know the others from the model.
    places: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        storage = tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)
        # empty tensors all have the address 0, and share nothing
        places.setdefault((storage, tensor.storage_offset(), tuple(tensor.shape)), name)
    whole = {name: state[name].contiguous().clone() for name in places.values()}
    return save(whole, metadata={"format": "pt", **facts})
