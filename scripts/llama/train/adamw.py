"""AdamW (Loshchilov and Hutter 2019), and gradients that are clipped to a norm."""

from models import Array, module_of

from llama.train.parameters import Parameters


def clip(gradients: Array, most: float) -> None:
    """Scale gradients, (parameters,), in place to the Euclidean norm `most`, if theirs is larger.

    On a GPU, the host does not wait for the norm.
    """
    xp = module_of(gradients)
    norm = xp.sqrt(xp.dot(gradients, gradients))
    gradients *= xp.minimum(most / (norm + 1e-6), 1)  # 1e-6: no division by zero


class AdamW:
    """Adam with a decay of the weights that does not pass its moments.

    Parameters
    ----------
    parameters : Parameters
        Changed in place.
    betas : tuple of float
        How much of the moments, the means of gradients and of their squares, each step keeps.
    decay : float
        Share of a parameter that a step of rate 1 takes off.
    eps : float
        Added to the root of the second moment.
    """

    def __init__(
        self,
        parameters: Parameters,
        betas: tuple[float, float] = (0.9, 0.98),
        decay: float = 0.01,
        eps: float = 1e-8,
    ) -> None:
        self._parameters, self._betas, self._decay, self._eps = parameters, betas, decay, eps
        xp = module_of(parameters.values)
        self._mean, self._square = (xp.zeros_like(parameters.values) for _ in range(2))
        self._steps = 0

    def step(self, rate: float) -> None:
        """Change the parameters by their gradients, at a learning rate."""
        values, gradients = self._parameters.values, self._parameters.gradients
        mean_keeps, square_keeps = self._betas
        self._steps += 1
        self._mean *= mean_keeps
        self._mean += (1 - mean_keeps) * gradients
        self._square *= square_keeps
        self._square += (1 - square_keeps) * gradients * gradients
        # The moments began at zero: divided by the share of them that is of gradients.
        root = module_of(values).sqrt(self._square)
        root *= (1 - square_keeps**self._steps) ** -0.5
        root += self._eps
        change = self._mean / root
        change *= rate / (1 - mean_keeps**self._steps)
        values *= 1 - rate * self._decay
        values -= change
