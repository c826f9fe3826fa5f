"""Rows of a matrix by token, and their gradient."""

from models import Array, module_of

from llama.train.parameters import Parameter


class Embedding:
    """A row for each token.

    Parameters
    ----------
    weight : Parameter, (vocabulary, hidden)
    """

    def __init__(self, weight: Parameter) -> None:
        self._weight = weight

    def forward(self, ids: Array) -> Array:
        """Return y, (tokens, hidden), from token ids (tokens,)."""
        self._ids = ids
        return self._weight.value[ids]

    def backward(self, dy: Array) -> None:
        """Add the gradient of the matrix, from dy, to what is there: the head's part.

        It is a product with the tokens as unit vectors, which adds in the same order each time.
        """
        xp = module_of(dy)
        tokens = xp.arange(len(self._weight.value), dtype=self._ids.dtype)
        units = (tokens[:, None] == self._ids).astype(dy.dtype)
        self._weight.gradient[...] += units @ dy
