"""The dtypes that a configuration asks for: the policy, dtypes of single modules, op lists."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from mprun.config import Config
from mprun.config.schema import OpListsConfig
from mprun.errors import UsageError, as_usage_error
from mprun.precision import Policy
from mprun.precision.gemms import model_gemms
from mprun.precision.layers import (
    check_rounding,
    convert,
    layer_precisions,
    resolve,
    with_layer_formats,
)
from mprun.precision.op_lists import KINDS, Entry, OpLists, op_lists, read_list
from mprun.precision.op_lists.lists import of_this_version, spelled
from mprun.precision.policy import torch_dtype
from mprun.recipe import Recipe
from mprun.records.layer_values import layer_values
from mprun.records.reader import NotYamlError, read_yaml
from mprun.train.user_code import model_of, outline_of
from mprun.watch.memory_recorder import fake_tensors


@as_usage_error()
def build_policy(config: Config) -> Policy:
    """The policy a configuration's precision section describes."""
    # layers and layers_file are of single modules and need the model; see `choose_layers`
    row = {k: v for k, v in vars(config.precision).items() if not k.startswith("layers")}
    return Policy(**row)


def choose_layers(config: Config, recipe: Recipe, policy: Policy) -> dict[str, str]:
    """`precision.layers` over `precision.layers_file`, each key resolved to names of modules.

    A model on fake tensors is converted to these dtypes, to check that they can be used.
    """
    asked = dict(config.precision.layers)
    if config.precision.layers_file is not None:
        asked = {**_layers_file(Path(config.precision.layers_file)), **asked}
    if not asked:
        return {}
    with fake_tensors():  # the names of modules are enough: no weight is drawn
        model = model_of(recipe)
        with as_usage_error():
            layers = resolve(model, asked)
            check_rounding(layers, policy)
            stored = {n: layer.stored for n, layer in layer_precisions(layers, policy).items()}
            convert(model, torch.device("cpu"), torch_dtype(policy.param_dtype), layers=stored)
    return layers


def choose_op_lists(config: Config, device: torch.device, resumed: bool) -> OpLists | None:
    """The op lists for a device, or None where nothing is cast by name.

    PyTorch's own lists differ between devices. A resumed run has the names in the user's files in
    its configuration. Raises `UsageError` for an op on two lists of one origin and, with
    `op_lists.strict`, for a name that no op has.
    """
    if config.precision.casting != "op_lists":
        return None
    section = config.op_lists
    lower, fp32, promote = _without_displaced(section, device, resumed)
    with as_usage_error("op_lists: "):
        lists = op_lists(lower, fp32, promote, section.unlisted == "first_input")
    if section.strict and lists.unknown:
        first, rest = lists.unknown[:5], len(lists.unknown) - 5  # an error is one line
        more = f"; {rest} more" if rest > 0 else ""
        raise UsageError(f"op_lists.strict=true: {'; '.join(map(str, first))}{more}")
    return lists


def entries(
    section: OpListsConfig, kind: str, device: torch.device, resumed: bool = False
) -> list[Entry]:
    """The names on one list for a device, each with its source."""
    path = getattr(section, f"{kind}_file")
    if path is not None and not resumed:
        return read_list(Path(path), kind)
    own = getattr(section, f"{device.type}_{kind}", None)  # autocast's lists differ by device
    names = getattr(section, kind) if own is None else own
    source = path or f"op_lists={section.name}"
    return [Entry(name, source) for name in of_this_version(section.name, names)]


def _without_displaced(
    section: OpListsConfig, device: torch.device, resumed: bool
) -> list[list[Entry]]:
    """For each of `KINDS` its entries, without ops that are on a list of the user's files.

    An op that a file names is on the file's list only, also where a shipped list has another name
    for it. A shipped entry for several ops keeps the others. Lists from files lose nothing.
    """
    lists = {kind: entries(section, kind, device, resumed) for kind in KINDS}
    from_files = [kind for kind in KINDS if getattr(section, f"{kind}_file") is not None]
    # by op, because two lists may name one op differently
    taken = {op for kind in from_files for entry in lists[kind] for op in spelled(entry.text)}
    result = []
    for kind, listed in lists.items():
        remaining: list[Entry] = []
        for entry in listed:
            ops = spelled(entry.text)
            lost = () if kind in from_files else [op for op in ops if op in taken]
            rest = [Entry(op, entry.where) for op in ops if op not in lost]
            remaining += rest if lost else [entry]
        result.append(remaining)
    return result


def _layers_file(path: Path) -> dict[str, str]:
    """The mapping in a file, checked: name to dtype or mode."""
    try:
        content = read_yaml(path)
    except OSError as error:
        reason = error.strerror
        raise UsageError(f"precision.layers_file={path} cannot be read ({reason})") from None
    except NotYamlError as error:
        raise UsageError(f"precision.layers_file={path} is not YAML ({error})") from None
    if not isinstance(content, dict):
        raise UsageError(
            f"precision.layers_file={path}: it is not a mapping; legal is a line for each module, "
            "'name: dtype'"
        )
    with as_usage_error(f"precision.layers_file={path}: "):
        return layer_values(content)


def with_formats(policy: Policy, recipe: Recipe, layers: Mapping[str, str]) -> Policy:
    """The policy, which says whether `layers` names formats of products.

    Raises `UsageError` where the mode cannot have them, or where no layer of the recipe's model can
    have the mode's or its own, so that it would train like bf16_mixed.
    """
    with as_usage_error():
        policy = with_layer_formats(policy, layers.values())
    if policy.gemms == "none":
        return policy
    try:
        model = outline_of(recipe)
    except Exception:  # the user's model may need values: then the run itself reports the mistake
        return policy
    with as_usage_error(f"precision={policy.name}: "):
        model_gemms(model, layers, policy.gemms)
    return policy
