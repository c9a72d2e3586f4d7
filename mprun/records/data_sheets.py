"""Published rates of GPUs, and of links between processes, for estimates. No torch.

Rates of GPUs are dense ones. A link's bandwidth is that of one process in one direction, which is
what a ring of processes uses: half of the total that vendors state for both directions.
"""

from __future__ import annotations

from typing import NamedTuple


class LinkBandwidth(NamedTuple):
    """A kind of link."""

    gigabytes_per_second: float
    """10^9 bytes a second, in one direction."""
    source: str
    """Who publishes it, and how it follows."""


_PCIE = "PCI-SIG, PCI Express Base Specification {}: {} GT/s x 16 lanes x 128/130 / 8"
_ETHERNET = "IEEE {}: {} Gbit/s / 8"
_INFINIBAND = "InfiniBand Trade Association, roadmap: {} Gbit/s of a 4x port / 8"
_NVLINK = "NVIDIA, data sheet of the {}: {} GB/s in both directions / 2"

LINK_BANDWIDTHS = {
    "nvlink3": LinkBandwidth(300.0, _NVLINK.format("A100 SXM", 600)),
    "nvlink4": LinkBandwidth(450.0, _NVLINK.format("H100 SXM", 900)),
    "nvlink5": LinkBandwidth(900.0, _NVLINK.format("HGX B200", 1800)),
    "pcie3": LinkBandwidth(15.754, _PCIE.format("3.0", 8)),
    "pcie4": LinkBandwidth(31.508, _PCIE.format("4.0", 16)),
    "pcie5": LinkBandwidth(63.015, _PCIE.format("5.0", 32)),
    "ethernet_1g": LinkBandwidth(0.125, _ETHERNET.format("802.3ab", 1)),
    "ethernet_10g": LinkBandwidth(1.25, _ETHERNET.format("802.3ae", 10)),
    "ethernet_25g": LinkBandwidth(3.125, _ETHERNET.format("802.3by", 25)),
    "ethernet_100g": LinkBandwidth(12.5, _ETHERNET.format("802.3ba", 100)),
    "ethernet_400g": LinkBandwidth(50.0, _ETHERNET.format("802.3bs", 400)),
    "infiniband_hdr": LinkBandwidth(25.0, _INFINIBAND.format(200)),
    "infiniband_ndr": LinkBandwidth(50.0, _INFINIBAND.format(400)),
    "infiniband_xdr": LinkBandwidth(100.0, _INFINIBAND.format(800)),
}
"""Name to bandwidth."""


class GpuRates(NamedTuple):
    """Published rates of a GPU, dense."""

    name: str
    bfloat16: float
    """10^12 operations a second, as the next two."""
    float8: float
    nvfp4: float | None
    bandwidth: float
    """10^9 bytes a second."""
    block_scales: bool = False
    """Whether its units multiply blocks with scales (mxfp8)."""
    row_scales: bool = True
    """Whether they take a factor per row."""


GPUS = {
    "rtx4090": GpuRates("NVIDIA RTX 4090", 165, 330, None, 1008, row_scales=False),
    "l40s": GpuRates("NVIDIA L40S", 362, 733, None, 864, row_scales=False),
    "h100": GpuRates("NVIDIA H100 SXM", 989, 1979, None, 3350),
    "h200": GpuRates("NVIDIA H200 SXM", 989, 1979, None, 4800),
    "b200": GpuRates("NVIDIA B200", 2250, 4500, 9000, 8000, block_scales=True),
    "mi300x": GpuRates("AMD MI300X", 1307, 2615, None, 5300),
}
