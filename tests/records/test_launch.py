"""What torchrun's variables say about a process."""

from __future__ import annotations

import pytest

from mprun.records.launch import Launch, launch_of

SET = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "1",
}


def test_torchruns_variables_are_read() -> None:
    launch = launch_of(SET)
    assert launch == Launch(3, 4, 1, 2, 1, True)
    assert not launch.is_alone
    assert not launch.is_first


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"])
def test_a_process_that_torchrun_did_not_start_is_alone(missing: str) -> None:
    assert launch_of({k: v for k, v in SET.items() if k != missing}) == Launch()
    assert launch_of({**SET, missing: ""}) == Launch()
    assert Launch().is_alone
    assert Launch().is_first


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_variables_of_another_program_are_no_launch(name: str) -> None:
    assert launch_of({**SET, name: "node-a"}) == Launch()


def test_optional_variables_have_defaults() -> None:
    needed = {k: v for k, v in SET.items() if "LOCAL_WORLD" not in k and "ELASTIC" not in k}
    launch = launch_of(needed)
    assert launch.local_size == 1
    assert launch.restarts == 0
