"""Composition: good overrides, presets, a user's own folder, and every shipped file."""

from __future__ import annotations

import importlib
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from hydra import compose as hydra_compose
from omegaconf import OmegaConf

from mprun.config import Config, compose
from mprun.config.reference import GROUPS
from mprun.errors import UsageError
from tests.each import each

# By name: `mprun.config` exports a function of the module's name.
compose_module = importlib.import_module("mprun.config.compose")

CONF = Path(str(files("mprun.conf")))
SHIPPED = sorted(path.relative_to(CONF) for path in CONF.glob("*/*.yaml"))

# As published: epochs, batch, evaluation batch, optimizer.
RECIPES = {
    "char_gpt": (None, 12, 64, "adamw"),
    "transformer": (None, 12, 64, "adamw"),
    "tabular": (20, 32, 512, "adamw"),
    "resnet": (10, 64, 256, "sgd"),
    "torchvision_model": (10, 64, 256, "sgd"),
    "linear": (500, 64, 64, "sgd"),
    "mnist": (5, 8192, 8192, "rmsprop"),
    "fashion_mnist": (10, 12, 32, "adamw"),
}
RATES = {"tabular": 3e-3, "resnet": 0.01, "torchvision_model": 0.01}
"""Learning rates other than 1e-3."""
PRECISIONS = {
    "fp32": ("float32", "none"),
    "bf16_mixed": ("bfloat16", "autocast"),
}


def composed(*overrides: str, config_dir: Path | None = None) -> Config:
    return compose(overrides, config_dir).config


def refusal(*overrides: str, config_dir: Path | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        compose(overrides, config_dir)
    return str(caught.value)


@pytest.mark.representative("*-bf16_mixed")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_in_a_precision_is_a_typed_config(recipe: str, precision: str) -> None:
    config = composed(f"recipe={recipe}", f"precision={precision}")
    assert isinstance(config, Config)
    assert (config.recipe.name, config.precision.name) == (recipe, precision)
    train, row = config.train, config.precision
    found = (train.epochs, train.batch_size, train.eval_batch_size, train.optimizer.name)
    assert found == RECIPES[recipe]
    assert train.lr == RATES.get(recipe, 1e-3)
    assert (row.compute_dtype, row.casting) == PRECISIONS[precision]
    assert row.param_dtype == "float32"
    assert row.tf32 is False


@each(
    "override,value",
    [
        ("seed=4294967295", 2**32 - 1),
        ("device=cuda:1", "cuda:1"),
        ("train.lr=1", 1.0),
        ("data.root='with space, and ü'", "with space, and ü"),
        ("data.root=null", None),
        ("precision.name=123", "123"),
        ("+seed=7", 7),
    ],
)
def test_a_value_has_its_fields_type(override: str, value: object) -> None:
    key = override.partition("=")[0].lstrip("+")
    found: object = composed(override)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("recipe", "lr"),
    [("linear", 1.0), ("mnist", 1e-3), ("fashion_mnist", 1e-3), ("char_gpt", 1e-3)],
)
def test_the_smoke_preset_shortens_each_recipe(recipe: str, lr: float) -> None:
    config = composed("preset=smoke", f"recipe={recipe}")
    assert (config.train.max_steps, config.train.eval_batch_size) == (36, 16)
    assert config.train.max_time_s == 24
    assert (config.data.train_limit, config.data.fallback) == (4096, "generated")
    assert config.preset.loss_must_fall
    assert config.train.lr == lr
    assert config.recipe.name == recipe


@pytest.mark.representative("-1")
@pytest.mark.parametrize("order", [1, -1])
def test_the_users_value_beats_the_presets(order: int) -> None:
    words = ["recipe=linear", "preset=smoke", "train.lr=0.5", "train.max_steps=3"]
    config = composed(*words[::order])
    assert (config.train.lr, config.train.max_steps) == (0.5, 3)
    assert config.data.train_limit == 4096


@each(
    "words",
    [
        (),
        ("recipe=linear", "precision=half_sr", "seed=3", "train.lr=0.1"),
        ("train.max_steps=5", "preset=smoke", "recipe=fashion_mnist"),
        ("recipe=linear", "recipe=mnist", "seed=1", "seed=2"),
        ("op_lists=hmp", "op_lists.lower=[mm]", "+seed=3"),
        ("precision.layers={a: fp32}", "precision.layers.b=fp16"),
        ("recipe.model.units=64", "recipe.model={more: x}", "logger.tags.a=b"),
        ("train.optimizer.name=sgd", "train.optimizer.momentum=0.9"),
        ("batch=double", "loss_scale=static", "loss_scale.value=8", "run.dir=null"),
    ],
)
def test_the_configuration_is_the_one_that_hydra_composes(words: tuple[str, ...]) -> None:
    """Hydra chooses the options once per process; fields are set on a copy."""
    compose([*words, "train.batch_size=7", "precision.layers={left: fp32}"])  # leaves no trace
    with compose_module.hydra_here():
        parsed = [compose_module.parse(text) for text in words]
        texts = [compose_module.for_hydra(override) for override in parsed]
        by_hydra = hydra_compose(compose_module.CONFIG_NAME, overrides=texts)
        own = compose_module._compose(texts, parsed)
    assert OmegaConf.to_container(own) == OmegaConf.to_container(by_hydra)
    assert list(own) == list(by_hydra)


@pytest.mark.representative(
    "op_lists/hmp.yaml",
    "preset_recipe/smoke_char_gpt.yaml",
    "preset_recipe/smoke_linear.yaml",
    "batch/double.yaml",
    "logger/tensorboard.yaml",
)
@pytest.mark.parametrize("path", SHIPPED, ids=str)
def test_every_shipped_file_composes(path: Path) -> None:
    group, option = path.parent.name, path.stem
    text = yaml.safe_load((CONF / path).read_text(encoding="utf-8"))
    if group == "preset_recipe":
        preset, _, recipe = option.partition("_")
        found = compose([f"preset={preset}", f"recipe={recipe}"]).resolved["train"]
        without = compose([f"recipe={recipe}"]).resolved["train"]
        assert found == found | text["train"]
        assert without != without | text["train"]
    else:
        found = compose([f"{group}={option}"]).resolved[group]
        assert found == found | text.get(group, text)


def test_the_groups_are_the_folders() -> None:
    assert {path.parent.name for path in SHIPPED} == {*GROUPS, "preset_recipe"}


# A user's own folder.

OWN_RECIPE = """\
# @package _global_
# My own
recipe:
  name: own
  target: my_module.Mine
  model:
    width: 4
train:
  epochs: 1
  batch_size: 2
  eval_batch_size: 2
  lr: 0.1
  optimizer:
    name: sgd
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "it's, ünïcode"
    (folder / "recipe").mkdir(parents=True)
    (folder / "recipe/own.yaml").write_text(OWN_RECIPE, encoding="utf-8")
    return folder


def test_an_own_recipe_stands_beside_the_shipped_ones(own: Path) -> None:
    config = composed("recipe=own", "recipe.model.width=8", config_dir=own)
    assert (config.recipe.target, config.recipe.model) == ("my_module.Mine", {"width": 8})
    assert composed("recipe=linear", config_dir=own) == composed("recipe=linear")
    smoke = composed("recipe=own", "preset=smoke", config_dir=own)
    assert (smoke.train.lr, smoke.train.max_steps) == (0.1, 36)


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("recipe: {name: [\n", ["own.yaml", "line 2"]),
        ("- 1\n- 2\n", ["In 'recipe/own'", "list is not a subclass of RecipeConfig"]),
        ("name: own\ntarget: m.M\nnmae: 3\n", ["'nmae'", "did you mean 'recipe.name'?"]),
        ("# @package _global_\ntrain: {lr: abc}\n", ["train.lr is a number", "'abc'"]),
        (OWN_RECIPE + "execution: fast\n", ["'execution=fast': execution is one of auto"]),
        (OWN_RECIPE + "seed: ${nope}\n", ["seed is a whole number", "'nope' not found"]),
        ("defaults:\n  - nope\n", ["In 'recipe/own'", "Could not load 'recipe/nope'"]),
        ("name: own\ntarget: m.M\n", ["the run would never end", "set train.epochs"]),
        ("\udcff\0", ["own.yaml is not a valid configuration (line 1: not text (UTF-8))"]),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_a_line(
    text: str, fragments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/own.yaml").write_bytes(text.encode(errors="surrogateescape"))
    message = refusal("recipe=own", config_dir=tmp_path)
    assert all(fragment in message for fragment in fragments), message
    assert message.isprintable()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nope", "No such file or directory"),
        ("file", "Not a directory"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "null"),
    ],
    ids=["missing", "file", "long", "nul"],
)
def test_a_config_dir_that_is_none_is_refused(name: str, reason: str) -> None:
    Path("file").write_text("", encoding="utf-8")
    message = refusal("recipe=linear", config_dir=Path(name))
    assert message.startswith(f"--config-dir {name} cannot be read: ")
    assert reason in message


# What Hydra refuses, in the words of the schema.


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=abc", "seed=1"], "'seed=abc': seed is a whole number"),
        (
            ["execution=nativ"],
            "'execution=nativ': execution is one of auto, native, emulated; did you mean 'native'?",
        ),
        (
            ["device=cuba"],
            "device=cuba; did you mean 'cuda'?; legal: auto, cpu, cuda, xpu, mps, hpu, and one of "
            "several as cuda:1",
        ),
        (  # of an earlier version
            ["train.optimizer.target=torch.optim.NAdam"],
            "'train.optimizer.target=torch.optim.NAdam': there is no field "
            "'train.optimizer.target'; optimizer(model) of a recipe makes any optimizer",
        ),
    ],
)
def test_a_refused_value_is_named_as_it_was_typed(overrides: list[str], message: str) -> None:
    assert refusal(*overrides) == message


def test_an_unset_interpolation_in_a_recipes_parameter_is_named() -> None:
    message = refusal("recipe.model.units=${nope}")
    assert "recipe.model.units=${nope}" in message
    assert "'nope' not found" in message
