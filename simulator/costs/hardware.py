"""Data sheets of models and GPUs, by which measured costs are scaled to others."""

from collections.abc import Mapping
from dataclasses import dataclass

from policies.model import Bytes
from simulator.costs.costs import LinkCosts

BYTES_PER_NUMBER = 2
"""Weights and KV in 16 bits."""


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder's shape. `kv_width` is the width of the keys of one token in one layer, all heads together."""

    parameters: float
    layers: int
    hidden: int
    kv_width: int

    @property
    def kv_bytes(self) -> Bytes:
        """Bytes of keys and values per token, over all layers."""
        return Bytes(2 * self.layers * self.kv_width * BYTES_PER_NUMBER)

    @property
    def attention_share(self) -> float:
        """Attention's arithmetic per token and token before it, as a share of the parameters' arithmetic per token."""
        return 4 * self.layers * self.hidden / (2 * self.parameters)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's data sheet: dense 16-bit arithmetic, and memory bandwidth."""

    flops_per_s: float
    bytes_per_s: float


MODELS: Mapping[str, Model] = {
    "Llama-2-7b-hf": Model(6.74e9, layers=32, hidden=4096, kv_width=4096),
    "Llama-2-13b-hf": Model(13.02e9, layers=40, hidden=5120, kv_width=5120),
    "Meta-Llama-3-8B": Model(8.03e9, layers=32, hidden=4096, kv_width=1024),
    "Qwen2.5-14B": Model(14.77e9, layers=48, hidden=5120, kv_width=1024),
    "llama2-70b": Model(68.98e9, layers=80, hidden=8192, kv_width=1024),
    "bloom-176b": Model(176.2e9, layers=70, hidden=14336, kv_width=14336),
}

GPUS: Mapping[str, Gpu] = {
    "a40": Gpu(149.7e12, 0.696e12),
    "a100-40g": Gpu(312e12, 1.555e12),
    "a100": Gpu(312e12, 2.039e12),
    "h100": Gpu(989e12, 3.35e12),
    "h200": Gpu(989e12, 4.8e12),
    "rtx4090": Gpu(165.2e12, 1.008e12),
}
"""`a100` is the one with 80 GB; `h100` and `h200` are SXM modules."""

STATED_LINKS: Mapping[str, LinkCosts] = {
    "pcie4": LinkCosts(25e9, 20e-6),
    "10gbe": LinkCosts(1.25e9, 50e-6),
    "25gbe": LinkCosts(3.125e9, 50e-6),
    "100gbe": LinkCosts(12.5e9, 20e-6),
    "200gbe": LinkCosts(25e9, 20e-6),
}
"""Links by their nominal speed, for want of a profile: 16 lanes of PCIe 4.0 as copies reach it, and Ethernet."""
