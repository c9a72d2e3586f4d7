"""Published bandwidths of links between processes, for estimates. No torch.

A bandwidth is that of one process in one direction, which is what a ring of processes uses: half of
the total that vendors state for both directions.
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
