"""What depends on the machine: device, execution, kernels, and which layers go their own way."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from mprun.config import Config
from mprun.config.schema import Casting, LayerDType, OpListsConfig, Unlisted
from mprun.errors import UsageError, first_line
from mprun.numerics.memory_recorder import fake_tensors
from mprun.precision import Policy, accelerated, has_tf32
from mprun.precision.convert import convert
from mprun.precision.layers import check_rounding, layer_precisions, resolve
from mprun.precision.op_lists import KINDS, Entry, OpLists, op_lists, read_list
from mprun.precision.op_lists.names import spelled
from mprun.precision.policy import torch_dtype
from mprun.recipe import Recipe


def build_policy(config: Config) -> Policy:
    """The policy a configuration's precision section describes."""
    row: dict[str, Any] = {
        k: v.name if isinstance(v, Enum) else v
        for k, v in vars(config.precision).items()
        if not k.startswith("layers")
    }
    try:
        return Policy(**row)
    except ValueError as error:
        raise UsageError(str(error)) from None


def choose_device(wanted: str) -> torch.device:
    """The device; `auto` is CUDA where there is one."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UsageError("device=cuda: PyTorch finds no CUDA device here; legal: auto, cpu")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def choose_execution(wanted: str, policy: Policy, device: torch.device) -> str:
    """native or emulated: what was asked for, else native where that can be."""
    can, reason = executions(policy, device)
    if wanted != "auto" and wanted not in can:
        raise UsageError(f"execution={wanted}: {reason}; legal: auto, {', '.join(can)}")
    return can[0] if wanted == "auto" else wanted


def executions(policy: Policy, device: torch.device) -> tuple[tuple[str, ...], str]:
    """How a policy can be carried out, the best first, and why not otherwise."""
    emulated, both = ("emulated",), ("native", "emulated")
    if policy.rounding_scope == "all":
        return emulated, (
            "precision.rounding_scope=all rounds every result stochastically, and what a kernel "
            "returns is already rounded to nearest"
        )
    if policy.partials_dtype == "float16" and device.type != "cuda":
        return emulated, (
            "precision.partials_dtype=float16: CPU kernels have no switch for what they add up in"
        )
    if policy.tf32:
        no = f"{device.type} here has no TensorFloat-32"
        return (both, "") if has_tf32(device) else (emulated, no)
    if policy.is_low:
        return both, ""
    no = f"precision={policy.name} runs natively on every device and has no emulation"
    return ("native",), no


def choose_layers(config: Config, recipe: Recipe, policy: Policy) -> dict[str, str]:
    """`precision.layers` over `precision.layers_file`, each key resolved to modules' names.

    On a fake model, which is brought to its dtypes to see whether that can be done.
    """
    wanted = {str(key): dtype.name for key, dtype in config.precision.layers.items()}
    if config.precision.layers_file is not None:
        wanted = {**_layers_file(Path(config.precision.layers_file)), **wanted}
    if not wanted:
        return {}
    with fake_tensors():
        model = recipe.model()
        try:
            found = resolve(model, wanted)
            check_rounding(found, policy)
            stored = {n: layer.stored for n, layer in layer_precisions(found, policy).items()}
            convert(model, torch.device("cpu"), torch_dtype(policy.param_dtype), layers=stored)
        except ValueError as error:
            raise UsageError(str(error)) from None
    return found


def choose_op_lists(config: Config, device: torch.device, resumed: bool) -> OpLists | None:
    """The op lists for a device, or None where nothing is cast by name.

    Args:
        config: the configuration; its lists hold the names in the user's files already.
        device: PyTorch's own lists differ between devices.
        resumed: whether the run goes on; the files may be gone.

    Raises:
        UsageError: two files of the user's, or two of the configuration's lists, have one op; with
            `op_lists.strict`, a name no op has.
    """
    if config.precision.casting is not Casting.op_lists:
        return None
    section = config.op_lists
    lower, fp32, promote = (kept for kept, _ in _without_displaced(section, device, resumed))
    try:
        first_input = section.unlisted is Unlisted.first_input
        found = op_lists(lower, fp32, promote, first_input)
    except ValueError as error:
        raise UsageError(f"op_lists: {error}") from None
    if section.strict and found.unknown:
        first, rest = found.unknown[:5], len(found.unknown) - 5
        more = f"; {rest} more" if rest > 0 else ""
        raise UsageError(f"op_lists.strict=true: {'; '.join(map(str, first))}{more}")
    return found


def entries(
    section: OpListsConfig, kind: str, device: torch.device, resumed: bool = False
) -> list[Entry]:
    """The names on one list for a device, with where each is from."""
    path = getattr(section, f"{kind}_file")
    if path is not None and not resumed:
        return read_list(Path(path), kind)
    own = getattr(section, f"{device.type}_{kind}", None)
    names = getattr(section, kind) if own is None else own
    return [Entry(name, path or f"op_lists={section.name}") for name in names]


def displaced_ops(config: Config, device: torch.device, resumed: bool) -> str | None:
    """A sentence about ops that the user's files take from the other lists, or None.

    An op that leaves the promote list is not mentioned: by HMP's rules the other two lists take
    precedence over it anyway.
    """
    section = config.op_lists
    if config.precision.casting is not Casting.op_lists or not _kinds_from_files(section):
        return None
    settled = zip(KINDS, _without_displaced(section, device, resumed), strict=True)
    gone = [(kind, names) for kind, (_, names) in settled if names and kind != "promote"]
    if not gone:
        return None
    files = " and ".join(f"op_lists.{kind}_file" for kind in _kinds_from_files(section))
    moved = ", ".join(f"{', '.join(names)} from the {kind} list" for kind, names in gone)
    return (
        f"{files} takes precedence over op_lists={section.name}, whose other lists lose what it "
        f"names: {moved}"
    )


def _kinds_from_files(section: OpListsConfig) -> tuple[str, ...]:
    """The lists that the user's files take the place of."""
    return tuple(kind for kind in KINDS if getattr(section, f"{kind}_file") is not None)


def _without_displaced(
    section: OpListsConfig, device: torch.device, resumed: bool
) -> list[tuple[list[Entry], list[str]]]:
    """For each of `KINDS` its entries, and the ops that left it for a list of the user's files.

    What a file names is on the file's list, whatever name the shipped lists have for that op. A
    shipped entry that stands for several ops keeps the others. Lists from files lose nothing.
    """
    lists = {kind: entries(section, kind, device, resumed) for kind in KINDS}
    from_files = _kinds_from_files(section)
    taken = {op for kind in from_files for entry in lists[kind] for op in spelled(entry.text)}
    settled = []
    for kind, listed in lists.items():
        kept: list[Entry] = []
        left: dict[str, None] = {}
        for entry in listed:
            ops = spelled(entry.text)
            lost = () if kind in from_files else [op for op in ops if op in taken]
            left |= dict.fromkeys(lost)
            kept += [entry] if not lost else [Entry(o, entry.where) for o in ops if o not in lost]
        settled.append((kept, list(left)))
    return settled


def _layers_file(path: Path) -> dict[str, str]:
    """The mapping in a file, checked: names to dtypes or modes."""
    legal = list(LayerDType.__members__)
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = first_line(error)
        raise UsageError(f"precision.layers_file={path} cannot be read ({reason})") from None
    if not isinstance(found, dict) or not all(v in legal for v in found.values()):
        raise UsageError(
            f"precision.layers_file={path}: a line for each module, 'name: dtype', "
            f"with dtype (or mode) one of {', '.join(legal)}"
        )
    return {str(key): LayerDType[value].name for key, value in found.items()}


def choose_fp32_fallback(speed: str, policy: Policy, execution: str, device: torch.device) -> str:
    """Which float16 ops a CPU computes in float32: none, backward (convolutions') or all.

    `speed=plain` keeps every kernel, and emulation has none. Else it depends on whether float16
    matmuls have instructions of their own here, which is measured.
    """
    native = execution == "native" and policy.compute_dtype == "float16"
    if speed == "plain" or not native or device.type != "cpu":
        return "none"
    # Kernels with their own instructions run near float32's speed, reference loops 50 times slower.
    return "backward" if accelerated(torch.float16, device, tolerance=4.0) else "all"
