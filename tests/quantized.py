"""Arrays in 8 bits as ``kernels/fp8_wgmma.cu`` takes them, made with NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448
KEYS = 128  # of a block of V


def quantized(x: np.ndarray, block: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bytes of (b, h, s, d) numbers, their scales, and what they then stand for."""
    b, h, s, _ = x.shape
    rows = s if block is None else block
    blocks = -(-s // rows)
    padded = np.zeros((b, h, blocks * rows, x.shape[3]))
    padded[:, :, :s] = x
    largest = np.abs(padded).reshape(b, h, blocks, -1).max(axis=-1)
    scales = np.where(largest > 0, largest / LARGEST, 1).astype(np.float32)
    of_rows = scales.repeat(rows, axis=2)[:, :, :s, None]
    values = (x / of_rows).astype(E4M3)
    return values.view(np.uint8), scales, values.astype(np.float64) * of_rows


def transposed(values: np.ndarray) -> np.ndarray:
    """Return the bytes of V as ``VTile8`` of ``kernels/fp8_config.cuh`` orders them."""
    b, h, s, d = values.shape
    blocks = -(-s // KEYS)
    padded = np.zeros((b, h, blocks * KEYS, d), np.uint8)
    padded[:, :, :s] = values
    # 16 keys are two halves of four pairs; a thread holds a pair of each half.
    parts = padded.reshape(b, h, blocks, KEYS // 16, 2, 4, 2, d)
    by_column = parts.transpose(0, 1, 2, 7, 3, 5, 4, 6).reshape(b, h, blocks, d, KEYS)
    # A thread's four pairs of 32 columns follow each other: eight rows apart here.
    places = [32 * (c // 32) + 8 * (c % 8 // 2) + 2 * (c % 32 // 8) + c % 2 for c in range(d)]
    ordered = np.empty_like(by_column)
    ordered[:, :, :, places] = by_column
    return ordered
