"""Training of Llamas on NumPy or CuPy arrays: layers with their gradients, a loss, AdamW.

Each layer maps x to y by `forward`, which keeps what `backward` needs. `backward` takes dy, the
gradient of the loss with respect to y, writes the gradients of the layer's parameters, and returns
dx. x and y have two axes, (tokens, width): the sequences of a batch follow each other.
"""

from llama.train.adamw import AdamW, clip
from llama.train.loss import IGNORED, cross_entropy
from llama.train.model import TrainedLlama
from llama.train.parameters import Parameter, Parameters
from llama.train.schedule import learning_rate
from llama.train.sizes import Sizes

__all__ = [
    "IGNORED",
    "AdamW",
    "Parameter",
    "Parameters",
    "Sizes",
    "TrainedLlama",
    "clip",
    "cross_entropy",
    "learning_rate",
]
