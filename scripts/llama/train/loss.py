"""Cross-entropy and its gradient."""

from models import Array, module_of

IGNORED = -100


def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Return the mean cross-entropy of the targets, and its gradient.

    Parameters
    ----------
    logits : array, (tokens, vocabulary)
    targets : array of integers, (tokens,)
        `IGNORED` does not count; one at least does.

    Returns
    -------
    loss : array, ()
        On a GPU, the host does not wait for it.
    gradient : array, (tokens, vocabulary)
        With respect to the logits.
    """
    xp = module_of(logits)
    is_target = targets[:, None] == xp.arange(logits.shape[1], dtype=targets.dtype)
    counts = (targets != IGNORED).astype(logits.dtype)[:, None]
    total = counts.sum()
    shifted = logits - logits.max(axis=-1, keepdims=True)
    gradient = xp.exp(shifted)
    sums = gradient.sum(axis=-1, keepdims=True)
    loss = ((xp.log(sums) * counts).sum() - (shifted * is_target).sum()) / total
    gradient *= counts / sums
    gradient -= is_target
    gradient /= total
    return loss, gradient
