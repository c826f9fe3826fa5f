"""SwiGLU (Shazeer 2020) and its gradients."""

from models import Array, module_of

from llama.train.linear import Linear


class Perceptron:
    """y = down(silu(gate(x)) * up(x)).

    Parameters
    ----------
    gate_up : Linear
        Gives `gate` and `up`, one after the other.
    down : Linear
    """

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up, self._down = gate_up, down

    def forward(self, x: Array) -> Array:
        """Return y from x, (n, hidden) both."""
        gate, up = _halves(self._gate_up.forward(x))
        # The logistic function by tanh, which cannot overflow.
        logistic = gate * 0.5
        module_of(x).tanh(logistic, out=logistic)
        logistic *= 0.5
        logistic += 0.5
        silu = gate * logistic
        self._saved = up, logistic, silu
        return self._down.forward(silu * up)

    def backward(self, dy: Array) -> Array:
        """Return dx from dy; the matrices write their gradients.

        The derivative of silu(a) = a s(a), with the logistic function s, is s + silu(a) (1 - s).
        """
        up, logistic, silu = self._saved
        xp = module_of(dy)
        inner = self._down.backward(dy)
        d_gate_up = xp.empty((len(dy), 2 * up.shape[1]), dy.dtype)
        d_gate, d_up = _halves(d_gate_up)
        xp.multiply(inner, silu, out=d_up)
        slope = 1 - logistic
        slope *= silu
        slope += logistic
        slope *= up
        xp.multiply(inner, slope, out=d_gate)
        return self._gate_up.backward(d_gate_up)


def _halves(rows: Array) -> tuple[Array, Array]:
    width = rows.shape[1] // 2
    return rows[:, :width], rows[:, width:]
