"""Figures of GPUs, as their vendors' data sheets give them: no measurement of this project."""

from __future__ import annotations

from specdec_fast.errors import ConfigError
from specdec_fast.planner.costs import Device

# Memory bandwidth, and operations per second of dense 16-bit matrix products with fp32 sums. Data sheets:
# h200: NVIDIA H200, SXM: 4.8 TB/s; 1,979 TFLOPS with sparsity, which is twice the dense rate.
# h100: NVIDIA H100, SXM: 3.35 TB/s; the same rate.
# a100: NVIDIA A100 80GB, SXM: 2,039 GB/s; 312 TFLOPS.
# mi300x: AMD Instinct MI300X: 5.3 TB/s; 1,307.4 TFLOPS.
DEVICES = {
    "h200": Device(4.8e12, 989.5e12),
    "h100": Device(3.35e12, 989.5e12),
    "a100": Device(2.039e12, 312e12),
    "mi300x": Device(5.3e12, 1307.4e12),
}


def device_named(name: str) -> Device:
    """Return the figures of a device.

    Raises:
        ConfigError: there are none.

    """
    if name not in DEVICES:
        raise ConfigError(f"device {name!r} is unknown; known are {', '.join(DEVICES)}.")
    return DEVICES[name]
