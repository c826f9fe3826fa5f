"""RMSNorm (Zhang and Sennrich 2019) and its gradients."""

from models import Array

from llama.train.parameters import Parameter


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight, with the mean over the last axis.

    Parameters
    ----------
    weight : Parameter, (width,)
    eps : float
    """

    def __init__(self, weight: Parameter, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def forward(self, x: Array) -> Array:
        """Return y, a new array of the shape of x, (n, width)."""
        scale = (x * x).mean(axis=-1, keepdims=True)
        scale += self._eps
        scale **= -0.5
        self._scale, self._normed = scale, x * scale
        return self._normed * self._weight.value

    def backward(self, dy: Array) -> Array:
        """Return dx from dy; write the gradient of the weight.

        With n = x * scale and g = dy * weight: dx = scale * (g - n * mean(g * n)).
        """
        products = dy * self._normed
        products.sum(axis=0, out=self._weight.gradient)
        products *= self._weight.value
        dx = dy * self._weight.value
        dx -= self._normed * products.mean(axis=-1, keepdims=True)
        dx *= self._scale
        return dx
