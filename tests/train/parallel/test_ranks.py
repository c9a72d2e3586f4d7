"""What processes exchange beside gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mprun.train.parallel.ranks import GroupRanks, PeerLostError, lost
from tests.train.parallel.processes import Groups


def everything() -> dict[str, Any]:
    ranks = GroupRanks(torch.device("cpu"))
    rank = dist.get_rank()
    tensors = [torch.full((2,), rank + 1.0), torch.tensor(2**40 + rank)]
    for tensor in tensors:
        ranks.begin_sum(tensor)()
    ranks.barrier()
    return {
        "totals": ranks.totals([0.1 + rank]),
        "any": [ranks.any(flag) for flag in (rank == 1, False, True)],
        "gather": ranks.gather({"rank": rank}),
        "share": ranks.share(f"of {rank}"),
        "tensors": tensors,
        "largest": ranks.largest(torch.tensor([rank, -rank, 3])),
        "waited": ranks.waited_s,
    }


def test_processes_agree(groups: Groups) -> None:
    results = groups.call(everything, processes=3)
    for found in results:
        assert found["totals"] == pytest.approx([3.3], rel=1e-15)
        assert found["totals"] == results[0]["totals"]
        assert found["any"] == [True, False, True]
        assert found["gather"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert found["share"] == "of 0"
        assert found["tensors"][0].tolist() == [6.0, 6.0]
        assert found["tensors"][1].item() == 3 * 2**40 + 3
        assert found["largest"].tolist() == [2, 0, 3]
        assert found["waited"] > 0


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:4",
        "Read error [127.0.0.1]:1: Connection reset by peer",
        "NCCL error: remote process exited or there was a network error; Broken pipe",
    ],
)
def test_a_lost_process_is_known_by_what_its_library_says(text: str) -> None:
    assert isinstance(lost(RuntimeError(text)), PeerLostError)


def test_another_error_is_no_lost_process() -> None:
    assert lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert lost(ValueError("Connection closed by peer")) is None
