"""What tiles cost a multiprocessor of Hopper, in microseconds.

Measured on an NVIDIA H200 on 2026-11-22
by ``python scripts/bench.py costs``, and written by ``python scripts/bench.py fit``.
"""

from __future__ import annotations

from cufa.planner.costs import Cost
from cufa.planner.tiles import TileShape

COSTS: dict[tuple[str, int, int, bool], dict[TileShape, Cost]] = {
    ("fa3_wgmma", 32, 32, False): {
        TileShape(192, 128, 3, 16, 1, True): Cost(3.089, 1.496, (1.0033,)),
        TileShape(128, 128, 3, 12, 1, True): Cost(2.948, 1.255, (0.75563,)),
        TileShape(64, 128, 3, 8, 2, False): Cost(2.388, 1.28, (0.60968, 0.82929)),
        TileShape(64, 64, 3, 8, 4, False): Cost(2.307, 1.223, (0.35822, 0.47996, 0.85467, 0.85679)),
    },
    ("fa3_wgmma", 32, 32, True): {
        TileShape(192, 128, 3, 16, 1, True): Cost(3.022, 1.894, (1.0352,)),
        TileShape(128, 128, 3, 12, 1, True): Cost(2.787, 1.63, (0.83185,)),
        TileShape(64, 128, 3, 8, 2, False): Cost(2.353, 1.584, (0.58534, 0.8299)),
        TileShape(64, 64, 3, 8, 4, False): Cost(2.104, 1.527, (0.3675, 0.42624, 0.64523, 0.80506)),
    },
    ("fa3_wgmma", 64, 64, False): {
        TileShape(192, 128, 3, 16, 1, True): Cost(3.478, 1.365, (1.2229,)),
        TileShape(192, 128, 2, 16, 1, True): Cost(3.341, 1.459, (1.2347,)),
        TileShape(128, 128, 3, 12, 1, True): Cost(3.052, 1.233, (0.96251,)),
        TileShape(64, 128, 2, 8, 2, False): Cost(2.721, 1.22, (0.71021, 1.0023)),
        TileShape(64, 64, 3, 8, 3, False): Cost(2.152, 1.264, (0.45665, 0.54436, 0.77605)),
    },
    ("fa3_wgmma", 64, 64, True): {
        TileShape(192, 128, 3, 16, 1, True): Cost(3.279, 1.843, (1.2674,)),
        TileShape(192, 128, 2, 16, 1, True): Cost(2.709, 2.434, (1.2453,)),
        TileShape(128, 128, 3, 12, 1, True): Cost(2.818, 1.772, (1.0181,)),
        TileShape(64, 128, 2, 8, 2, False): Cost(2.331, 1.82, (0.69051, 1.0526)),
        TileShape(64, 64, 3, 8, 3, False): Cost(2.259, 1.519, (0.41676, 0.4914, 0.84187)),
    },
    ("fa3_wgmma", 96, 96, False): {
        TileShape(192, 112, 2, 16, 1, True): Cost(3.13, 1.877, (1.3708,)),
        TileShape(128, 128, 2, 12, 1, True): Cost(3.259, 1.532, (1.1388,)),
        TileShape(64, 80, 2, 8, 2, False): Cost(3.165, 0.686, (0.61188, 1.0528)),
        TileShape(64, 64, 2, 8, 2, False): Cost(2.902, 0.8497, (0.51774, 0.85734)),
    },
    ("fa3_wgmma", 96, 96, True): {
        TileShape(192, 112, 2, 16, 1, True): Cost(2.375, 3.246, (1.313,)),
        TileShape(128, 128, 2, 12, 1, True): Cost(2.959, 2.309, (1.1713,)),
        TileShape(64, 80, 2, 8, 2, False): Cost(2.124, 2.189, (0.57773, 1.0578)),
        TileShape(64, 64, 2, 8, 2, False): Cost(1.909, 2.136, (0.51504, 0.86267)),
    },
    ("fa3_wgmma", 128, 128, False): {
        TileShape(192, 80, 3, 16, 1, True): Cost(1.402, 3.769, (1.0994,)),
        TileShape(192, 80, 2, 16, 1, True): Cost(2.57, 2.318, (1.1785,)),
        TileShape(128, 128, 2, 12, 1, True): Cost(3.488, 1.538, (1.3224,)),
        TileShape(64, 128, 2, 8, 1, False): Cost(3.068, 1.223, (1.0402,)),
        TileShape(64, 64, 2, 8, 2, False): Cost(2.199, 1.591, (0.59842, 0.79806)),
    },
    ("fa3_wgmma", 128, 128, True): {
        TileShape(192, 80, 3, 16, 1, True): Cost(2.015, 3.122, (1.1914,)),
        TileShape(192, 80, 2, 16, 1, True): Cost(2.315, 2.652, (1.2388,)),
        TileShape(128, 128, 2, 12, 1, True): Cost(2.723, 2.381, (1.3572,)),
        TileShape(64, 128, 2, 8, 1, False): Cost(2.868, 1.68, (1.0663,)),
        TileShape(64, 64, 2, 8, 2, False): Cost(1.701, 2.358, (0.56367, 0.92363)),
    },
    ("fa3_wgmma", 192, 128, False): {
        TileShape(192, 80, 2, 16, 1, True): Cost(2.402, 2.571, (1.5103,)),
        TileShape(128, 112, 2, 12, 1, True): Cost(2.501, 2.4, (1.4217,)),
        TileShape(64, 48, 2, 8, 2, False): Cost(1.46, 2.555, (0.55092, 0.73999)),
    },
    ("fa3_wgmma", 192, 128, True): {
        TileShape(192, 80, 2, 16, 1, True): Cost(1.06, 3.914, (1.5141,)),
        TileShape(128, 112, 2, 12, 1, True): Cost(1.493, 3.375, (1.4356,)),
        TileShape(64, 48, 2, 8, 2, False): Cost(0.7294, 3.329, (0.54622, 0.82956)),
    },
    ("fa3_wgmma", 192, 192, False): {
        TileShape(128, 96, 2, 12, 1, True): Cost(2.812, 2.237, (1.4155,)),
        TileShape(128, 80, 2, 12, 1, True): Cost(1.452, 3.516, (1.1198,)),
        TileShape(64, 96, 2, 8, 1, False): Cost(3.104, 1.477, (0.9022,)),
        TileShape(64, 64, 2, 8, 1, False): Cost(2.327, 1.668, (0.65659,)),
    },
    ("fa3_wgmma", 192, 192, True): {
        TileShape(128, 96, 2, 12, 1, True): Cost(1.826, 3.495, (1.456,)),
        TileShape(128, 80, 2, 12, 1, True): Cost(1.013, 4.022, (1.1667,)),
        TileShape(64, 96, 2, 8, 1, False): Cost(2.957, 1.841, (1.0261,)),
        TileShape(64, 64, 2, 8, 1, False): Cost(2.247, 2.08, (0.71981,)),
    },
    ("fa3_wgmma", 256, 256, False): {
        TileShape(128, 64, 2, 12, 1, True): Cost(1.806, 3.434, (1.2373,)),
        TileShape(128, 64, 2, 12, 1, False): Cost(2.08, 3.348, (1.2428,)),
        TileShape(64, 80, 2, 8, 1, False): Cost(1.937, 2.753, (0.88502,)),
        TileShape(64, 64, 2, 8, 1, False): Cost(2.408, 1.999, (0.75095,)),
    },
    ("fa3_wgmma", 256, 256, True): {
        TileShape(128, 64, 2, 12, 1, True): Cost(0.4107, 4.781, (1.2042,)),
        TileShape(128, 64, 2, 12, 1, False): Cost(0.5863, 4.962, (1.2043,)),
        TileShape(64, 80, 2, 8, 1, False): Cost(1.393, 3.461, (1.0062,)),
        TileShape(64, 64, 2, 8, 1, False): Cost(1.584, 2.837, (0.84149,)),
    },
}
