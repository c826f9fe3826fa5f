"""The features between Q K^T and the softmax: a file each, and this list of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cufa.features.alibi import Alibi
from cufa.features.attention_chunk import AttentionChunk
from cufa.features.bias import Bias
from cufa.features.causal import Causal
from cufa.features.dropout import Dropout
from cufa.features.feature import Feature, Reading, Value
from cufa.features.mask import Mask
from cufa.features.sinks import Sinks
from cufa.features.softcap import Softcap
from cufa.features.user_functions import Blocks, MaskMod, ScoreMod
from cufa.features.window import Window

FEATURES: tuple[type[Feature], ...] = (
    Softcap,
    Alibi,
    Bias,
    Causal,
    Window,
    AttentionChunk,
    Mask,
    Sinks,
    Blocks,
    Dropout,
    ScoreMod,
    MaskMod,
)
"""All features. They apply in this order, but that masks hide after all else is done."""

VALUES = {kind.ARGUMENT: kind for kind in FEATURES if issubclass(kind, Value)}
"""Those whose arguments are plain values, by argument."""

READINGS = {kind.ARGUMENT: kind for kind in FEATURES if issubclass(kind, Reading)}
"""Those that read arrays, or are a caller's own functions, by argument."""


def values_of(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return those of a call's arguments that say of the scores what plain values can."""
    return {name: arguments[name] for name in VALUES if name in arguments}


def parse(asked: Mapping[str, object]) -> tuple[Feature, ...]:
    """Check arguments that are plain values, and return the features of which they ask.

    Parameters
    ----------
    asked : mapping
        By argument; those that are left out ask for nothing.

    Raises
    ------
    TypeError, ValueError
        They name the argument.
    """
    for name in asked.keys() - VALUES.keys():
        raise TypeError(f"there is no {name} among {', '.join(VALUES)}")
    found: dict[str, Value] = {}
    for name, kind in VALUES.items():
        given = asked.get(name, kind.DEFAULT)
        feature = None if given is None is kind.DEFAULT else kind.parse(given)
        if feature is not None:
            found[name] = feature
    for feature in tuple(found.values()):
        feature.settle(found)
    return ordered(found.values())


def ordered(features: Iterable[Feature]) -> tuple[Feature, ...]:
    """Return features in the order of `FEATURES`."""
    return tuple(sorted(features, key=lambda feature: FEATURES.index(type(feature))))
