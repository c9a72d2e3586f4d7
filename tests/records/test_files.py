"""What torchrun's variables say about a process."""

from __future__ import annotations

import pytest

from mprun.records.files import Launch, launch_of

SET = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "1",
}


def test_torchruns_variables_are_read() -> None:
    assert launch_of(SET) == Launch(3, 4, 1, 1)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"])
def test_a_process_that_torchrun_did_not_start_is_alone(missing: str) -> None:
    assert launch_of({k: v for k, v in SET.items() if k != missing}) == Launch()
    assert launch_of({**SET, missing: ""}) == Launch()
    assert (Launch().rank, Launch().world_size) == (0, 1)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_variables_of_another_program_are_no_launch(name: str) -> None:
    assert launch_of({**SET, name: "node-a"}) == Launch()


def test_it_is_the_first_start_without_a_count_of_restarts() -> None:
    assert launch_of({k: v for k, v in SET.items() if "ELASTIC" not in k}).restarts == 0
