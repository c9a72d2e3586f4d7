"""The rebuilt threads: what is said of them is judged, and the cheapest has the right answers."""

from __future__ import annotations

import pytest

from benchmarks.check_threads import THREADS, Answer, main, text_of, widened_tolerances


def test_widened_tolerances_pass_a_wrong_kernel_and_assert_explained_does_not() -> None:
    answer = widened_tolerances()
    assert answer.wrong == []
    assert answer.before[0] == "1e-3: sound fail, wrong fail"
    assert answer.before[-1] == "the widened 5e-2: sound pass, wrong pass"
    assert answer.here[0] == "sound: pass"
    assert answer.here[1].startswith("wrong: output")


def test_an_answer_that_is_not_right_ends_with_status_1(monkeypatch, capsys) -> None:
    answer = Answer("flat_reference", ["within 5 %: pass"])
    answer.expect(True, "flat")
    monkeypatch.setitem(THREADS, "flat_reference", lambda: answer)
    assert main(["flat_reference"]) == 0
    answer.expect(False, "healthy: 1 finding")
    assert main(["flat_reference"]) == 1
    assert text_of(answer) in capsys.readouterr().out
    assert text_of(answer).splitlines()[-2:] == [
        "- here: flat",
        "- here: healthy: 1 finding (wrong)",
    ]
    with pytest.raises(SystemExit):
        main(["flat"])


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_every_thread_has_the_right_answers() -> None:
    assert main([]) == 0
