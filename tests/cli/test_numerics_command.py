"""`mprun numerics`: what it finds, prints, leaves and refuses, and that the run is the same."""

from __future__ import annotations

import functools
import io
import itertools
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from mprun.cli.main import main
from mprun.config import compose
from mprun.config.settings import take
from mprun.errors import RunFailedError
from mprun.inspect import numerics_of_steps as built
from mprun.inspect.numerics import NumericsResult, NumericsSettings
from mprun.inspect.numerics_of_steps import inspect_steps, steps_to_inspect
from mprun.precision import backend_flags
from mprun.recipe import Recipe
from mprun.train.assemble import build_parts, make_plan
from mprun.train.data import DataRequest, Splits, TensorSet
from mprun.train.loop import Limits, StopRequestedError, Trainer, TrainingComponents
from tests.cli.small import LINEAR, MNIST

pytestmark = pytest.mark.usefixtures("native_is_fast")

ROOT = Path(__file__).resolve().parents[2]
FASHION = [
    *("recipe=fashion_mnist", "recipe.model.image_size=28", "data.source=generated"),
    *("device=cpu", "data.train_limit=64", "data.eval_limit=16", "train.batch_size=16"),
]
MNIST_IN_FP16 = [*MNIST, "precision=fp16_mixed", "numerics.top=3"]
FEW = ["numerics.steps=2", "numerics.warmup=1", "numerics.span=4"]


def found(*words: str, plots: bool = False) -> dict[str, Any]:
    """`numerics.json` of a run into the folder `run`."""
    given = {w.partition("=")[0] for w in words}
    few = [w for w in FEW if w.partition("=")[0] not in given]
    assert main(["numerics", *words, *few, f"numerics.plots={plots}", "run.dir=run"]) == 0
    return read()


@functools.cache
def _saved(*words: str) -> tuple[str, str, str]:
    """The file, the output and the errors of a run that several tests look at."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        found(*words)
    return Path("run/numerics.json").read_text(encoding="utf-8"), out.getvalue(), err.getvalue()


def of_mnist() -> dict[str, Any]:
    """`numerics.json` of MNIST in float16."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    made: dict[str, Any] = json.loads(_saved(*MNIST_IN_FP16)[0], parse_constant=refuse)
    return made


def read() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(Path("run/numerics.json").read_text(encoding="utf-8"))
    assert msgspec.convert(made, NumericsResult, strict=False).rows  # every field has its type
    return made


def rows_of(made: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["kind"], row["name"]): row for row in made["rows"]}


# ---- recipes of one's own ------------------------------------------------------------------------


class Shaped(nn.Module):
    """Two layers with something in between."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.drop(self.norm(self.first(x)))))
        return out


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": torch.tanh,
    "large": lambda x: x * 1e4 * 1e4 * 1e-8,
    "cancelling": lambda x: (x + 1000) - 1000,
    "tiny": lambda x: x * 1e-3 * 1e-4,
}


@dataclass(frozen=True)
class Own(Recipe):
    """A recipe with dropout and BatchNorm, and what `BETWEEN` says."""

    between: str

    def model(self) -> nn.Module:
        return Shaped(BETWEEN[self.between])

    def data(self, request: DataRequest) -> Splits:
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
        part = TensorSet(x, x[:, :4].clone())
        return Splits("points", "generated", part, part.first(0), part.first(0))

    def loss(self, output, batch):
        return (output - batch[1]).square().mean()


OWN = ["--config-dir=conf", "recipe=own", "device=cpu"]


@pytest.fixture
def own(in_empty_folder: Path) -> None:
    folder = in_empty_folder / "conf/recipe"
    folder.mkdir(parents=True)
    (folder / "own.yaml").write_text(
        "# @package _global_\n# Own\n"
        "recipe: {name: own, target: tests.cli.test_numerics_command.Own, "
        "model: {between: plain}}\n"
        "train: {epochs: 2, batch_size: 16, eval_batch_size: 16, lr: 0.01, "
        "optimizer: {name: sgd}}\n",
        encoding="utf-8",
    )


# ---- what it finds -------------------------------------------------------------------------------


@pytest.mark.usefixtures("own")
def test_a_model_that_underflows() -> None:
    """Its gradients fall by 1e-7 between the layers: the scale in use does not matter."""
    words = [*OWN, "recipe.model.between=tiny", "precision=fp16_mixed"]
    made = found(*words)
    verdicts = {v["label"]: v for v in made["loss_scale"]["verdicts"]}
    assert verdicts["none"]["word"] == "too low"
    assert verdicts["none"]["becoming_zero"] > 0.3
    assert verdicts["recommended"]["becoming_zero"] < verdicts["none"]["becoming_zero"]
    first = rows_of(made)["weight_gradients", "first.weight"]
    assert first["sqnr_db"]["fp16"] < 3
    assert first["sqnr_db"]["bf16"] > 50
    assert first["loss_scaled"]["fp16_db"] > first["sqnr_db"]["fp16"]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("between", "word"),
    [
        ("plain", "either"),
        ("large", "needs range: bf16"),  # 1e8 is no float16, and no loss scale helps
        ("cancelling", "needs precision: fp16"),  # of 1000 + x bfloat16 keeps no x: steps of 4
    ],
)
def test_range_or_precision(between: str, word: str) -> None:
    words = [f"recipe.model.between={between}", "precision=fp32", "numerics.steps=3"]
    verdict = found(*OWN, *words)["verdict"]
    assert verdict["word"] == word
    # A bias before BatchNorm changes nothing: its gradient is noise.
    assert verdict["undetermined"] == ["first.bias"]
    db = {k: float(v) for k, v in verdict["gradients_db"].items()}
    assert (db["fp16"] >= 20, db["bf16"] >= 20) == (
        word in ("either", "needs precision: fp16"),
        word in ("either", "needs range: bf16"),
    )


@pytest.mark.parametrize(("value", "word"), [("1e-6", "too low"), ("1e9", "too high")])
def test_the_scale_in_use_is_judged(value: str, word: str) -> None:
    words = ["precision=fp16_mixed", "loss_scale=static", f"loss_scale.value={value}"]
    made = found(*MNIST, *words)
    scale = made["loss_scale"]
    verdicts = {v["label"]: v["word"] for v in scale["verdicts"]}
    assert verdicts["in use"] == word
    assert (verdicts["recommended"], verdicts["published"]) == ("fine", "fine")
    assert scale["in_use"] == scale["lowest_in_use"] == pytest.approx(float(value))
    assert made["skipped"] == (made["steps"] if word == "too high" else [])
    held = [row["held"] for row in made["rows"] if row["kind"] == "weight_gradients"]
    assert (sum(h["infinite"] + h["nan"] for h in held) > 0) == (word == "too high")
    assert (max(h["became_zero"] for h in held) > 0.1) == (word == "too low")


def test_shares_follow_from_the_histogram() -> None:
    made = of_mnist()
    for row in made["rows"]:
        exponents = {int(e): n for e, n in row["histogram"]["exponents"].items()}
        powers = {int(e): n for e, n in row["histogram"]["powers"].items()}
        total = sum(exponents.values())

        def below(limit: int, counts: dict[int, int] = exponents) -> int:
            return sum(n for e, n in counts.items() if e < limit)

        for name, normal, smallest in (("fp16", -14, -24), ("bf16", -126, -133)):
            shares = row[name]
            assert shares["below_normal"] == below(normal) / total
            assert shares["below_smallest"] == below(smallest) / total
            zero = below(smallest - 1) + powers.get(smallest - 1, 0)
            assert shares["becoming_zero"] == zero / total
        if "gradients" in row["kind"]:
            assert row["loss_scaled"]["in_use"] == 2.0**16
            assert row["loss_scaled"]["fp16"]["below_normal"] == below(-14 - 16) / total


@pytest.mark.parametrize("rule", ["nearest", "kahan", "stochastic"])
def test_what_a_run_really_loses_is_what_its_rule_is_said_to_lose(rule: str) -> None:
    mode = "precision=bf16_sr" if rule == "stochastic" else "precision=bf16_true"
    lost = found(*MNIST, mode, f"precision.rounding={rule}")["lost_updates"]["all"]
    # Stochastic: four standard deviations of 20,000 coins are 0.014.
    allowed = 0.014 if rule == "stochastic" else 0
    assert lost["lost_in_run"] == pytest.approx(lost["bf16"][rule], abs=allowed)
    if rule != "kahan":
        assert lost["lost_in_run"] > 0.02


def test_steps_of_several_micro_batches() -> None:
    made = found(*MNIST, "precision=fp16_mixed", "train.accumulate=2")
    rows = rows_of(made)
    assert sum(rows["activations", "0"]["histogram"]["exponents"].values()) == 2 * 32 * 16
    whole = rows["weight_gradients", "2.weight"]["histogram"]
    seen = sum(whole["exponents"].values()) + whole["zero"]
    assert seen == 2 * 2 * 256  # two steps of two backward passes
    assert sum(rows["updates", "2.weight"]["histogram"]["exponents"].values()) <= 2 * 256


@pytest.mark.parametrize(
    "words",
    [
        ["precision=bf16_mixed", "op_lists=hmp"],
        ["precision=half_sr_full", "train.optimizer.name=adamw"],
        ["precision=fp16_mixed", "precision.layers={0: fp32}", "train.clip_norm=0.1"],
        ["precision=bf16_sr", "precision.layers={0: bf16_sr, 2: half_sr}"],
        ["precision=bf16_mixed", "precision.layers={2: {forward: fp8}}"],
    ],
    ids=str,
)
def test_every_kind_of_mode_runs(words: list[str]) -> None:
    made = found(*MNIST, *words)
    assert made["steps"] == [2, 4]
    assert made["verdict"]["word"] == "either"
    assert made["loss_scale"]["recommended"] > 1


def test_a_loss_in_float16_bounds_the_scale() -> None:
    """The gradient of the loss by itself is 1, and S in float16: 65,504 at most."""
    made = found(*MNIST, "precision=half_sr", "precision.output_dtype=float16")
    assert made["loss_scale"]["recommended"] == 2.0**14
    assert made["loss_scale"]["where"].endswith("in the loss")


# ---- which steps ---------------------------------------------------------------------------------


def inspected(*words: str) -> list[int]:
    settings, rest = take(words, NumericsSettings)
    chosen = make_plan(compose([*LINEAR, *rest]).config, ())
    return steps_to_inspect(chosen, settings.own(NumericsSettings))


def test_steps_are_spread_behind_the_warm_up() -> None:
    assert inspected("numerics.steps=5") == [4, 53, 102, 151, 200]
    assert inspected("numerics.steps=5", "train.max_steps=8") == [4, 5, 6, 7, 8]
    assert inspected("numerics.steps=20", "train.max_steps=6") == [4, 5, 6]
    assert inspected("numerics.steps=1", "numerics.span=50") == [50]
    assert inspected("numerics.steps=2", "numerics.warmup=0", "numerics.span=9") == [1, 9]
    assert len(set(inspected("numerics.span=25"))) == 20


def test_fewer_are_inspected_where_time_is_short_and_each_gives_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds, said = itertools.count(0, 3), list[str]()
    monkeypatch.setattr(built.time, "monotonic", lambda: next(seconds))
    chosen = make_plan(compose(LINEAR).config, ())

    def steps(**settings: Any) -> tuple[int, ...]:
        settings = {"warmup": 0, "span": 9, **settings}
        report = lambda text, *_: said.append(text)  # noqa: E731
        return inspect_steps(chosen, NumericsSettings(**settings), lambda: False, report).steps

    assert steps() == (1, 3, 5, 7, 9)
    assert said[0] == "inspecting step 1 of 9"
    assert said[1].startswith("inspecting step 3 of 9; so far: float16 and bfloat16 are both good")
    assert steps(steps=9) == tuple(range(1, 10))


# ---- the run is the same -------------------------------------------------------------------------


def weights_of(parts: TrainingComponents) -> dict[str, Tensor]:
    """Weights, buffers, optimizer state and the random state."""
    state = parts.optimizer.state_dict()["state"]
    moments = {f"{n}.{k}": v for n, entry in state.items() for k, v in entry.items()}
    tensors = {k: v for k, v in moments.items() if isinstance(v, Tensor)}
    return {**parts.model.state_dict(), **tensors, "random": torch.get_rng_state()}


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    "words", [[*OWN, "precision=fp16_mixed"], [*MNIST, "precision=half_sr_full"]], ids=str
)
def test_weights_are_bit_equal_with_and_without(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path("conf") if words[0].startswith("--") else None
    chosen = make_plan(compose([w for w in words if not w.startswith("--")], folder).config, ())
    made: list[TrainingComponents] = []

    def recording(*args: Any) -> TrainingComponents:
        made.append(build_parts(*args))
        return made[-1]

    monkeypatch.setattr(built, "build_parts", recording)
    settings = NumericsSettings(steps=3, warmup=1, span=6)
    with backend_flags(chosen.policy):
        assert inspect_steps(chosen, settings, lambda: False).steps == (2, 4, 6)
        watched = weights_of(made[0])
        none = chosen.splits.train.first(0)
        parts = build_parts(replace(chosen, splits=replace(chosen.splits, validation=none)))
        Trainer(parts, Limits(None, 6, None)).fit()
    alone = weights_of(parts)
    assert watched.keys() == alone.keys()
    for name, x in alone.items():
        assert torch.equal(watched[name], x), name


# ---- what it prints and leaves -------------------------------------------------------------------


# ---- runs that end early -------------------------------------------------------------------------

DIVERGES = ["precision=fp32", "train.lr=1e15", "recipe=linear", "device=cpu"]


def test_what_was_seen_of_a_run_that_fails_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*DIVERGES, "numerics.warmup=0", "numerics.steps=50", "numerics.span=50"]
    assert main(["numerics", *words, "numerics.plots=false", "run.dir=run"]) == 1
    out, err = capsys.readouterr()
    assert "recommended: " in out
    last = err.splitlines()[-1]  # on a slow machine, lines of progress come before
    assert last.startswith("the run ended early, its results are above: the loss became ")
    made = read()
    assert made["ended"].startswith("the loss became ")
    assert 0 < len(made["steps"]) < 50


def inspecting(stop: Callable[[], bool], **settings: Any) -> Any:
    chosen = make_plan(compose(LINEAR).config, ())
    return inspect_steps(chosen, NumericsSettings(**{"warmup": 0, "span": 9, **settings}), stop)


def test_what_was_seen_of_a_run_that_is_stopped_is_saved() -> None:
    asked = iter([False, False, True])
    result = inspecting(lambda: next(asked), steps=9)
    assert (result.steps, result.ended) == ((1, 2, 3), "stopped at step 3")
    assert result.result.rows
    with pytest.raises(StopRequestedError):
        inspecting(lambda: True, steps=1)


def test_time_that_runs_out_before_the_first_look_is_said() -> None:
    chosen = make_plan(compose([*LINEAR, "train.max_time_s=1e-9"]).config, ())
    with pytest.raises(RunFailedError, match=r"train.max_time_s=1e-09 ended the run before step 4"):
        inspect_steps(chosen, NumericsSettings(), lambda: False)
