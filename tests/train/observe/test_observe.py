"""`mprun.observe`: steps by hooks, the record, and no bit of the training changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mprun
from mprun.cli.main import main
from mprun.records.console.formatting import size_text
from mprun.records.run_record import read_lines, read_summary
from mprun.train.observe.observe import Observation
from tests.run.clock import Clock

pytestmark = pytest.mark.usefixtures("quick_runs")

STEPS = 30


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "images":
        return nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)),
            nn.Linear(4 * 36, 3),
        )
    if kind == "tied":
        layer = nn.Linear(64, 64, bias=False)
        return nn.Sequential(nn.Flatten(), layer, nn.GELU(), layer, nn.Linear(64, 3))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 3))


def batches(count: int = STEPS, size: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(size, 1, 8, 8, generator=generator)
        yield x, (x.sum((1, 2, 3)) > 0).long()


Loop = Callable[[nn.Module, torch.optim.Optimizer, Any], None]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if run:
            run.log(loss=loss)


def autocast(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if run:
            run.log(loss=loss.item(), accuracy=0.5)


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    for n, (x, y) in enumerate(batches(), start=1):
        (nn.functional.cross_entropy(model(x), y) / 2).backward()
        if n % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


def closures(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    for n, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if run:
            run.log(loss=loss)
        if n % 10 == 9:
            model.eval()
            with torch.no_grad():
                for v, w in batches(2):
                    score = nn.functional.cross_entropy(model(v), w)
            model.train()
            if run:
                run.log(validation_loss=score, val_accuracy=0.75, train_norm=1.5)


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1000)
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y) * 1e4
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


LOOPS: dict[str, Loop] = {
    "plain": plain,
    "autocast": autocast,
    "accumulated": accumulated,
    "closures": closures,
    "evaluated": evaluated,
    "scaled": scaled,
}


def trained(loop: Loop, kind: str, out: Path | None, **options: Any) -> tuple[list[Tensor], Any]:
    """Weights, buffers, optimizer state and random state after a loop."""
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with nullcontext() if out is None else mprun.observe(model, optimizer, out, **options) as run:
        loop(model, optimizer, run)
    states = [x for state in optimizer.state.values() for x in state.values()]
    return [*model.parameters(), *model.buffers(), *states, torch.get_rng_state()], run


@pytest.mark.parametrize("options", [{"on_nonfinite": "save"}, {"memory": True}], ids=str)
@pytest.mark.parametrize("name", LOOPS)
def test_no_bit_of_the_training_changes(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    kind = "images" if name in ("plain", "evaluated") else "tied"
    expected, _ = trained(LOOPS[name], kind, None)
    got, _ = trained(LOOPS[name], kind, tmp_path / "run", **options)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert read_summary(tmp_path / "run").status == "completed"


def test_hooks_and_patches_are_gone_afterwards(tmp_path: Path) -> None:
    patched = (torch.amp.GradScaler.step, torch.amp.GradScaler.scale, torch.autograd.backward)
    model = model_of("tied")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mprun.observe(model, optimizer, tmp_path / "run", memory=True) as run:
        plain(model, optimizer, run)
    now = (torch.amp.GradScaler.step, torch.amp.GradScaler.scale, torch.autograd.backward)
    assert now == patched
    assert not any("__reduce_ex__" in vars(m) for m in model.modules())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_steps_losses_and_batches_are_those_of_the_loop(tmp_path: Path) -> None:
    trained(plain, "images", tmp_path / "run", seed=7, name="mine")
    summary, lines = read_summary(tmp_path / "run"), read_lines(tmp_path / "run")
    assert (summary.steps, summary.seed, summary.variant) == (STEPS, 7, "mine")
    assert (summary.batch_size, summary.batch.accumulate) == (16, 1)
    assert summary.recipe == "Sequential"
    losses = [x["loss"] for x in lines if x["kind"] == "step"]
    model = model_of("images")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == expected
    assert summary.train.loss == pytest.approx(sum(expected[-20:]) / 20)
    assert summary.page_faults_per_step is not None
    budget = summary.time_budget_s
    assert budget is not None
    assert sum(vars(budget).values()) == pytest.approx(summary.wall_time_s)


def test_accumulated_micro_batches_are_one_step(tmp_path: Path) -> None:
    trained(accumulated, "tied", tmp_path / "run")
    summary = read_summary(tmp_path / "run")
    assert (summary.steps, summary.batch_size) == (STEPS // 2, 32)
    assert (summary.batch.micro, summary.batch.accumulate) == (16, 2)


def test_steps_that_a_scaler_skips_are_counted(tmp_path: Path) -> None:
    """A scale of 2^120 times a loss of some 10,000 is infinite: the first steps overflow."""
    trained(scaled, "tied", tmp_path / "run")
    summary = read_summary(tmp_path / "run")
    model = model_of("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaled(model, optimizer, None)
    taken = int(next(iter(optimizer.state.values()))["step"])
    assert summary.steps == STEPS
    assert summary.skipped_steps == STEPS - taken > 0
    events = [x["event"] for x in read_lines(tmp_path / "run") if x["kind"] == "event"]
    assert events == ["skipped_step"] * summary.skipped_steps  # and no alarm of a NaN


def test_several_models_and_optimizers_make_one_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(4, 4), nn.Linear(4, 1)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b))
    with mprun.observe(nn.ModuleList([a, b]), [first, second], tmp_path / "run"):
        for _ in range(6):
            x = torch.randn(8, 4)
            b(a(x).detach()).mean().backward()
            second.step()
            b(a(x)).mean().backward()
            first.step()
            first.zero_grad()
            second.zero_grad()
    assert read_summary(tmp_path / "run").steps == 6


def test_an_evaluation_is_no_step_and_no_wait(tmp_path: Path) -> None:
    trained(evaluated, "images", tmp_path / "run", metric="accuracy")
    summary, lines = read_summary(tmp_path / "run"), read_lines(tmp_path / "run")
    assert summary.steps == STEPS
    assert [epoch.epoch for epoch in summary.history] == [1, 2, 3]
    assert summary.history[-1].validation.accuracy == 0.75
    assert summary.history[-1].train.metrics == {"train_norm": 1.5}
    waits = {x["step"]: x["data_time_ms"] for x in lines if x["kind"] == "step"}
    assert [step for step, wait in waits.items() if wait is None] == [1, 11, 21]
    assert summary.time_budget_s is not None
    assert summary.time_budget_s.evaluation > 0


def test_step_time_and_data_wait_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 20 ms, and 10 ms after and 40 ms before it pass outside of it."""
    clock = Clock(1e-6)  # a reading is a microsecond
    monkeypatch.setattr("time.perf_counter", clock)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mprun.observe(model, optimizer, tmp_path / "run") as run:
        for _ in range(8):
            clock.sleep(0.04)
            loss = model(torch.randn(2, 4)).mean()
            clock.sleep(0.02)
            loss.backward()
            optimizer.step()
            clock.sleep(0.01)
            run.log(loss=loss)
    summary = read_summary(tmp_path / "run")
    assert summary.step_time_ms.median == pytest.approx(20, abs=0.1)
    assert summary.data_time_ms.median == pytest.approx(50, abs=0.1)


@pytest.mark.parametrize(
    ("rounding", "mode"), [(None, "bf16_true"), ("stochastic", "bf16_sr"), ("kahan", "bf16_true")]
)
def test_the_mode_of_16_bit_parameters(rounding: str | None, mode: str, tmp_path: Path) -> None:
    model = model_of("tied").bfloat16()
    parameters = model.parameters()
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters, lr=1e-3)
        if rounding is None
        else mprun.optim.AdamW(parameters, lr=1e-3, rounding=rounding)
    )
    with mprun.observe(model, optimizer, tmp_path / "run") as run:
        for x, y in batches(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
            optimizer.step()
    summary = read_summary(tmp_path / "run")
    assert summary.effective.param_dtype == summary.effective.compute_dtype == "bfloat16"
    assert summary.precision == (mode if rounding != "kahan" else "custom")
    assert summary.effective.accum_dtype == "bfloat16"
    kinds = {finding.kind for finding in run.audit.findings}
    assert ("loaded_in_16_bits" in kinds) == (rounding is None)


def test_memory_is_that_of_a_counted_step(tmp_path: Path) -> None:
    """Parameters, gradients and state by hand; the peak is that of `numerics.memory`."""
    _, run = trained(plain, "images", tmp_path / "run", memory=True)
    model = model_of("images")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = sum(p.nbytes for p in model.parameters())
    x, y = next(batches())

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    expected = mprun.numerics.memory(step, model, optimizer, inputs=[x, y]).totals
    row = vars(run.summary.memory_bytes)
    assert row["parameters"] == own
    assert row["gradients"] == expected["gradients"]
    assert row["optimizer_state"] == expected["optimizer_state"]
    assert row["peak"] == pytest.approx(expected["peak"], rel=0.02)  # the batch is made inside


def test_without_memory_only_what_outlives_a_step_is_counted(tmp_path: Path) -> None:
    _, run = trained(plain, "images", tmp_path / "run")
    row = run.summary.memory_bytes
    own = sum(p.nbytes for p in model_of("images").parameters())
    assert (row.parameters, row.gradients) == (own, own)
    assert row.optimizer_state >= 2 * own
    assert (row.peak, row.activations) == (None, None)


def test_compare_reads_a_loop_that_logs_nothing(tmp_path: Path) -> None:
    for seed in (0, 1):
        trained(accumulated, "tied", tmp_path / f"run{seed}", seed=seed, name="silent")
    assert main(["compare", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "comparison.json").read_text())
    [variant] = content["variants"]
    assert (variant["label"], variant["metric"]) == ("silent", None)
    assert variant["step_time_ms"]["median"] > 0


def test_compare_reads_an_observed_loop_beside_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(plain, "tied", tmp_path / "observed", seed=0)
    run = ["recipe=linear", "train.max_steps=20", "seed=0", f"run.dir={tmp_path}/own"]
    assert main(run) == 0
    assert main(["compare", str(tmp_path)]) == 2
    assert "compare.mix=[recipes,data" in capsys.readouterr().err
    mixed = ["compare.mix=[recipes,data,hardware,code]"]
    assert main(["compare", str(tmp_path), *mixed]) == 0
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert len(content["variants"]) == 2


def test_a_nan_is_reported_once_with_its_step_and_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("tied")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mprun.observe(model, optimizer, tmp_path / "run") as run:
        for n, (x, y) in enumerate(batches(), start=1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            if n == 17:
                loss = loss + (loss * 0).log() * 0
            loss.backward()
            optimizer.step()
    assert run.nonfinite is not None
    assert run.nonfinite.step == 17
    assert run.nonfinite.names == ("the loss",)
    assert caplog.text.count("is not finite") == 1
    [event] = [x for x in read_lines(tmp_path / "run") if x["kind"] == "event"]
    assert (event["event"], event["step"]) == ("nonfinite", 17)
    assert "not finite at step 17" in str(run)


def test_a_sum_that_overflows_is_no_alarm(tmp_path: Path) -> None:
    """1e25 is finite and its square is not."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with mprun.observe(model, optimizer, tmp_path / "run") as run:
        (model(torch.full((2, 4), 1e25)).mean()).backward()
        optimizer.step()
    assert run.nonfinite is None


def ends_early(out: Path, kind: type[BaseException]) -> None:
    model = model_of("tied")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mprun.observe(model, optimizer, out) as run:
        for n, (x, y) in enumerate(batches()):
            if n == 4:
                raise kind("why")
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)


@pytest.mark.parametrize(
    ("kind", "status"), [(KeyboardInterrupt, "interrupted"), (ZeroDivisionError, "failed")]
)
def test_ctrl_c_and_errors_leave_a_readable_record(
    kind: type[BaseException], status: str, tmp_path: Path
) -> None:
    with pytest.raises(kind):
        ends_early(tmp_path / "run", kind)
    summary = read_summary(tmp_path / "run")
    assert (summary.status, summary.steps) == (status, 4)
    assert len([x for x in read_lines(tmp_path / "run") if x["kind"] == "step"]) == 4


def test_a_loop_that_never_steps_is_a_failed_record(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    other = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)
    with mprun.observe(model, other, tmp_path / "run"):
        model(torch.randn(2, 4)).mean().backward()
    summary = read_summary(tmp_path / "run")
    assert summary.status == "failed"
    assert "no step was observed" in (summary.error or "")


def test_a_full_disk_ends_the_record_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    model = model_of("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected, _ = trained(plain, "tied", None)
    with mprun.observe(model, optimizer, tmp_path / "run") as run:
        monkeypatch.setattr("mprun.records.run_folder.RunFolder.lines", full)
        plain(model, optimizer, run)
    assert all(torch.equal(a, b) for a, b in zip(expected, model.parameters(), strict=False))
    assert caplog.text.count("No space left") == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"metric": "bleu"}, "metric='bleu'; legal: loss"),
        ({"on_nonfinite": "halt"}, "on_nonfinite='halt'; legal: off, report, save"),
        ({"optimizer": []}, "there is no optimizer"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    given = {"optimizer": torch.optim.SGD(model.parameters()), **options}
    with pytest.raises(ValueError, match=text), mprun.observe(model, out=tmp_path / "x", **given):
        pass
    assert not (tmp_path / "x").exists()


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    trained(plain, "tied", tmp_path / "run")
    with pytest.raises(FileExistsError, match="already contains a run"):
        trained(plain, "tied", tmp_path / "run")


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with mprun.observe(model, optimizer, tmp_path / "run") as run:
        assert isinstance(run, Observation)
        with pytest.raises(TypeError, match="loss is str"):
            run.log(loss="0.5")
        with pytest.raises(ValueError, match=r"loss has the shape \[2\]"):
            run.log(loss=torch.ones(2))
        model(torch.ones(1, 2)).mean().backward()
        optimizer.step()


# ---- steps that a loss scale skips ---------------------------------------------------------------


def scaled_steps(overflows: str, out: Path, fused: bool = False, memory: bool = False) -> Any:
    """An observed loop whose steps overflow where the text has an `x`."""
    model = model_of("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with mprun.observe(model, optimizer, out, memory=memory) as run:
        for (x, y), mark in zip(batches(), overflows, strict=False):
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            if mark == "x":
                next(p for p in model.parameters() if p.grad is not None).grad[0] = torch.inf  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
    return run


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflows", [".x..........", "xx.xx.......", "..x.x......."])
def test_skipped_steps_are_not_the_ones_looked_at(
    overflows: str, fused: bool, tmp_path: Path
) -> None:
    """The second step that is taken is audited; memory is that of a loop without overflows."""
    expected = scaled_steps("." * 12, tmp_path / "plain", fused, memory=True)
    run = scaled_steps(overflows, tmp_path / "run", fused, memory=True)
    assert run.summary.skipped_steps == overflows.count("x")
    assert run.audit == expected.audit is not None
    assert "gradients" in run.audit.dtypes
    assert run.summary.memory_bytes == expected.summary.memory_bytes
    own = scaled_steps(overflows, tmp_path / "own", fused).summary.memory_bytes
    assert own.gradients == own.parameters
    assert run.summary.step_time_ms.median is not None


def test_what_no_step_showed_is_null_with_the_reason(tmp_path: Path) -> None:
    run = scaled_steps("xxxx", tmp_path / "run")
    summary = read_summary(tmp_path / "run")
    assert run.audit is summary.memory_bytes.gradients is summary.step_time_ms.median is None
    assert "no audit, and the memory of gradients is not known: fewer than two steps" in str(run)
    assert "no step time: of 4 steps the first ones are not timed" in str(run)
    assert any("no audit" in text for text in summary.warnings)


def test_gradients_of_an_optimizer_that_steps_twice_count_once(tmp_path: Path) -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 1)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b))
    with mprun.observe(nn.ModuleList([a, b]), [first, second], tmp_path / "run") as run:
        for n in range(12):
            b(a(torch.randn(8, 4))).mean().backward()
            first.step()
            if n % 2:
                second.step()
    assert run.summary.steps == 6
    assert run.summary.memory_bytes.gradients == run.summary.memory_bytes.parameters
    assert any("no audit: several optimizers" in text for text in run.summary.warnings)


def test_the_memory_line_says_what_its_sizes_are(tmp_path: Path) -> None:
    _, run = trained(plain, "tied", tmp_path / "peak", memory=True)
    total = size_text(run.summary.memory_bytes.peak)
    assert f"memory      {total} at the peak: parameters " in str(run)
    _, run = trained(plain, "tied", tmp_path / "own")
    assert "memory      each by itself: parameters " in str(run)


@pytest.mark.parametrize("writes", ["before", "after", ""])
def test_a_buffer_that_the_loop_writes_is_in_the_audit(writes: str, tmp_path: Path) -> None:
    """Before the forward pass, or after the optimizer's step, as an average of weights is."""
    model = nn.Linear(4, 1)
    model.register_buffer("average", model.weight.detach().bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mprun.observe(model, optimizer, tmp_path / "run") as run:
        for _ in range(3):
            if writes == "before":
                model.average = model.average * 0.999  # type: ignore[operator]
            model(torch.randn(2, 4)).mean().backward()
            optimizer.step()
            if writes == "after":
                model.average.lerp_(model.weight.detach().bfloat16(), 0.001)  # type: ignore[operator, union-attr]
    kinds = [finding.kind for finding in run.audit.findings]
    assert kinds == (["buffer_in_16_bits"] if writes else [])
    assert any("buffer_in_16_bits" in x for x in run.summary.warnings) == bool(writes)
