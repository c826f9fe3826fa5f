"""Training of Llamas on NumPy or CuPy arrays: layers with their gradients, a loss, AdamW.

Each layer has `forward`, which keeps what `backward` needs, and `backward`, which takes the
gradient of the loss by the layer's output, writes those by its parameters, and returns that by its
input. Arrays of tokens have two axes, (tokens, width): the sequences of a batch follow each other.
"""

from llama.train.adamw import AdamW, clip
from llama.train.loss import cross_entropy
from llama.train.model import TrainedLlama
from llama.train.parameters import Parameter, Parameters
from llama.train.schedule import learning_rate
from llama.train.sizes import Sizes

__all__ = [
    "AdamW",
    "Parameter",
    "Parameters",
    "Sizes",
    "TrainedLlama",
    "clip",
    "cross_entropy",
    "learning_rate",
]
