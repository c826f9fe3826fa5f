"""A matrix without a bias, and its gradients."""

from models import Array, module_of

from llama.train.parameters import Parameter


class Linear:
    """y = x W^T.

    Parameters
    ----------
    weight : Parameter, (outputs, inputs)
    """

    def __init__(self, weight: Parameter) -> None:
        self._weight = weight

    def forward(self, x: Array) -> Array:
        """Return y, (n, outputs), from x (n, inputs), which must not change before `backward`."""
        self._x = x
        return x @ self._weight.value.T

    def backward(self, dy: Array) -> Array:
        """Return dx from dy (n, outputs); write the gradient of the matrix."""
        module_of(dy).matmul(dy.T, self._x, out=self._weight.gradient)
        return dy @ self._weight.value
