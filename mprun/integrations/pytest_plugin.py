"""A plugin of pytest: `mprun check` of a model in a test. Loaded where mprun is installed.

    @pytest.mark.precision("bf16_mixed", "fp16_mixed")      # a test for each mode
    def test_low_precision(mprun_check):
        mprun_check(model, (inputs, target), torch.nn.functional.cross_entropy)

pytest loads it in every project where mprun is installed, so it imports neither mprun's other
modules nor torch until a test calls the fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mprun.records.result import Result

MARK = "precision"


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    # else pytest warns of an unknown mark, or refuses it with --strict-markers
    text = f"{MARK}(*modes): run the test with mprun_check in each of these precision modes"
    config.addinivalue_line("markers", text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A marked test runs once for each mode."""
    mark = metafunc.definition.get_closest_marker(MARK)
    if mark is None or "mprun_check" not in metafunc.fixturenames:
        return
    if not mark.args or not all(isinstance(mode, str) for mode in mark.args):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: the arguments of the mark {MARK} are names of modes: "
            f'@pytest.mark.{MARK}("bf16_mixed", "fp16_mixed")'
        )
    metafunc.parametrize("mprun_check", mark.args, indirect=True)


@pytest.fixture
def mprun_check(request: pytest.FixtureRequest) -> Callable[..., Result]:
    """Check a model in a precision mode beside float32: `mprun_check(model, batch, loss)`.

    It takes the arguments of `mprun.check`, a recipe's overrides too; `precision` is that of the
    test's mark, else bf16_mixed. The test fails with a line for each finding of severity error;
    warnings are warnings of pytest. It returns the Result.
    """
    marked = getattr(request, "param", "bf16_mixed")

    def check(*given: Any, precision: str = marked, **settings: Any) -> Result:
        __tracebackhide__ = True  # pytest shows the line of the test, not this one
        import mprun
        from mprun.errors import UsageError
        from mprun.inspect.check.check_result import ERROR

        try:
            result = mprun.check(*given, precision=precision, **settings)
        except UsageError as error:
            pytest.fail(str(error), pytrace=False)  # the message has all that a user needs
        errors = []
        for label, x in result.record.findings:
            if x.severity == ERROR:
                errors.append(f"{label}: {x.with_cure(label)}")
            else:
                request.node.warn(pytest.PytestWarning(f"{label}: {x}"))
        if errors:
            pytest.fail("\n".join(errors), pytrace=False)
        return result

    return check
