"""Parts of the machines that `--hardware` names. Data alone, so that `--help` loads quickly."""

from __future__ import annotations

# Memory in GiB, the data sheet's memory rate in GB/s, and the TFLOPS that prompts reached.
CARDS = {
    "RTX 2080": (8, 448, 9), "RTX 3060": (12, 360, 9), "RTX 3070": (8, 448, 12),
    "RTX 3090": (24, 936, 22), "RTX 3090 Ti": (24, 1008, 24), "RTX 4070": (12, 504, 22),
    "RTX 4060 Laptop": (8, 256, 10), "Tesla V100": (32, 900, 14),
    "RTX 4080": (16, 717, 30), "RTX 4090": (24, 1008, 40), "RTX 5060 Ti": (16, 448, 18),
    "RTX 5070 Ti": (16, 896, 32), "RTX 5090": (32, 1792, 58), "RTX A6000": (48, 768, 22),
    "RTX PRO 6000": (96, 1792, 60), "H100": (80, 3350, 250), "RX 6900 XT": (16, 512, 9),
    "Radeon Pro V620": (30, 512, 9),
}  # fmt: skip
# RAM in GiB, the data sheet's RAM rate in GB/s, channels, sockets, cores, and the rate of pinned
# copies to the GPU in GB/s (over 16 lanes of PCIe 3.0, 4.0 or 5.0).
HOSTS = {
    "ddr4": (56, 51.2, 2, 1, 8, 12), "ddr4-pcie4": (120, 51.2, 2, 1, 12, 25),
    "ddr5": (120, 89.6, 2, 1, 16, 25), "ddr5-pcie5": (184, 96.0, 2, 1, 16, 50),
    "threadripper": (248, 358.4, 8, 1, 32, 50), "epyc-ddr4": (504, 204.8, 8, 1, 32, 25),
    "epyc": (760, 614.4, 12, 1, 32, 50), "xeon-2-sockets": (1016, 614.4, 16, 2, 64, 50),
}  # fmt: skip

# The card and the host of each machine.
MACHINES = {
    "rtx-3060-ddr4": ("RTX 3060", "ddr4"),
    "rtx-3090-ddr4": ("RTX 3090", "ddr4-pcie4"),
    "rtx-3090-epyc-ddr4": ("RTX 3090", "epyc-ddr4"),
    "rtx-4070-ddr5": ("RTX 4070", "ddr5"),
    "rtx-4090-ddr5": ("RTX 4090", "ddr5"),
    "rtx-4090-epyc": ("RTX 4090", "epyc"),
    "rtx-5060ti-ddr5": ("RTX 5060 Ti", "ddr5-pcie5"),
    "rtx-5070ti-ddr5": ("RTX 5070 Ti", "ddr5-pcie5"),
    "rtx-5090-ddr5": ("RTX 5090", "ddr5-pcie5"),
    "rtx-5090-threadripper": ("RTX 5090", "threadripper"),
    "rtx-5090-xeon-2-sockets": ("RTX 5090", "xeon-2-sockets"),
    "a6000-threadripper": ("RTX A6000", "threadripper"),
    "rtx-pro-6000-epyc": ("RTX PRO 6000", "epyc"),
    "h100": ("H100", "xeon-2-sockets"),
}
UNIFIED = "strix-halo"  # its GPU reads weights in the CPU's memory, so copies gain nothing
NAMES = (*MACHINES, UNIFIED)
