"""Bandwidth of the links between GPUs, within a node and between nodes."""

from __future__ import annotations

from typing import NamedTuple

from planner.catalog.card_profiles import GpuProfile
from planner.spec.job import Machine

NVLINK = 0.8
"""NCCL over NVLink: 20 % protocol overhead, 370 of 450 GB/s (a NCCL developer in NVIDIA/nccl-tests#212)."""

PCIE_BETWEEN_GPUS = 0.5
"""Without peer access every byte goes through host RAM: an RTX 4090 reaches 25.8 GB/s for both directions together,
about as much as a single copy to the host, 25 GB/s (tinygrad/open-gpu-kernel-modules#6)."""

NODE_BYTES_PER_SECOND = 12.5e9
"""Default between nodes: 100 Gbit/s Ethernet, shared by the node's GPUs; on nodes with NVLink twice that for each GPU
(DGX A100: one 200 Gbit/s adapter per GPU).

A ring with several GPUs on a node uses all of their adapters: NCCL builds one ring through each, and the speed it
reports is their sum (a NCCL developer in NVIDIA/nccl-tests#160: 80 GB/s over 4 of them; #252: 95 GB/s, "~24 GB/s per
NIC"; NVIDIA/nccl#495: 75 GB/s over 8 of 100 Gbit/s)."""


def all_reduced(nbytes: int, ranks: int) -> int:
    """Bytes each rank of a ring sends to all-reduce ``nbytes``."""
    return 2 * nbytes * (ranks - 1) // ranks


class Ring(NamedTuple):
    """The GPUs of a collective: ``ranks`` of them, ``stride`` ranks apart."""

    ranks: int
    stride: int = 1

    def crosses(self, machine: Machine) -> bool:
        """Whether this ring, or another of the same shape, spans several nodes."""
        return machine.gpus % (self.ranks * self.stride) != 0

    def rate(self, gpu: GpuProfile, machine: Machine) -> float:
        """Bytes per second that one GPU sends in the ring. The slowest link limits it; between nodes the adapters of
        all the ring's GPUs on a node count together."""
        within = gpu_rate(gpu, machine)
        if not self.crosses(machine):
            return within
        members = max(1, min(self.ranks, machine.gpus // self.stride))
        between = members * node_rate(gpu, machine)
        return between if members == 1 else min(within, between)


def gpu_rate(gpu: GpuProfile, machine: Machine) -> float:
    """Bytes per second from one GPU to another on the same node."""
    if machine.links and machine.links.gpu_gbs:
        return machine.links.gpu_gbs * 1e9
    return NVLINK * gpu.nvlink_gbs * 1e9 if gpu.nvlink_gbs else PCIE_BETWEEN_GPUS * gpu.link_gbs * 1e9


def node_rate(gpu: GpuProfile, machine: Machine) -> float:
    """Bytes per second from one GPU to another node while all GPUs of its node send."""
    if machine.links and machine.links.node_gbs:
        return machine.links.node_gbs * 1e9
    return 2 * NODE_BYTES_PER_SECOND if gpu.nvlink_gbs else NODE_BYTES_PER_SECOND / machine.gpus
