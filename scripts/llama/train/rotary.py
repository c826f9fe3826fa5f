"""Rotary position embedding (Su et al. 2021) in its half-split form, and its gradient."""

from typing import Any

import numpy as np
from models import Array, module_of

from llama.train.sizes import Sizes


class Rotary:
    """Turns pairs of elements, (i, i + head_dim / 2), by an angle that grows with the position.

    Parameters
    ----------
    sizes : Sizes
    xp : module
        `numpy` or `cupy`.
    dtype : numpy.dtype
    """

    def __init__(self, sizes: Sizes, xp: Any, dtype: np.dtype) -> None:
        steps = np.arange(0, sizes.head_dim, 2) / sizes.head_dim
        angles = np.arange(sizes.positions)[:, None, None] * sizes.theta**-steps
        # (positions, 2, head_dim / 2): an element, and the other of its pair with its sign.
        self._cos = xp.asarray(np.cos(angles).repeat(2, axis=1).astype(dtype))
        self._sin = xp.asarray(np.concatenate([-np.sin(angles), np.sin(angles)], 1).astype(dtype))

    def turn(self, x: Array, out: Array, *, back: bool = False) -> None:
        """Write the turned `x` to `out`, which may be `x`.

        Parameters
        ----------
        x, out : array, (batch, heads, seq, head_dim)
            Their last axes are contiguous.
        back : bool
            Turn by the negative angle: this makes dx from dy.
        """
        pairs, turned = (each.reshape(*each.shape[:-1], 2, -1) for each in (x, out))
        xp, seq = module_of(x), x.shape[2]
        others = pairs[..., ::-1, :] * self._sin[:seq]
        own = pairs * self._cos[:seq]
        (xp.subtract if back else xp.add)(own, others, out=turned)
