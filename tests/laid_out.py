"""The same array in other places: axes in another order in memory, gaps, steps back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from played_gpu import Array
from reference import to_host


class LaidOut(NamedTuple):
    """An array of the host as a view of a contiguous one, and how to see that view in a copy.

    Attributes
    ----------
    base : ndarray
        In whose gaps is NaN, if its dtype has one.
    view : callable
        Returns the view of a copy of `base`.
    """

    base: np.ndarray
    view: Callable[[Any], Any]

    @property
    def host(self) -> np.ndarray:
        """The array itself."""
        return self.view(self.base)

    def there(self, base: Any) -> Any:
        """Return the view of a copy of `base` that is anywhere, a played GPU included."""
        return base.view_of(self.view(base.host)) if isinstance(base, Array) else self.view(base)

    def assert_gaps_are_untouched(self, base: Any) -> None:
        """Assert that in a copy of `base`, what is not of the view is still NaN."""
        inside = np.zeros(self.base.shape, bool)
        self.view(inside)[...] = True
        assert np.isnan(to_host(base).astype(np.float32)[~inside]).all()


def laid_out(array: np.ndarray, order: Sequence[int], step: int = 1, gap: int = 0) -> LaidOut:
    """Lay an array out in memory.

    Parameters
    ----------
    array : ndarray
        With one axis or more.
    order : sequence of int
        Its axes as they are in memory, the outermost first.
    step : int
        Along the innermost one; may be negative.
    gap : int
        Elements behind each line along that axis.
    """
    *outer, inner = (array.shape[axis] for axis in order)
    back = tuple(int(axis) for axis in np.argsort(order))

    def view(base: Any) -> Any:
        lines = base[..., : inner * abs(step)]
        return lines[..., ::step].transpose(back)

    shape = (*outer, inner * abs(step) + gap)
    has_nan = array.dtype.kind not in "biu"
    base = np.full(shape, np.nan if has_nan else 1, array.dtype)
    view(base)[...] = array
    return LaidOut(base, view)
