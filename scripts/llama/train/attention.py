"""Grouped-query attention with rotary positions, by `cufa.attention` and its gradients."""

from models import Array, module_of

import cufa
from llama.train.linear import Linear
from llama.train.rotary import Rotary
from llama.train.sizes import Sizes


class Attention:
    """Causal attention of each sequence of a batch.

    Parameters
    ----------
    qkv : Linear
        Gives the heads of queries, keys and values, one after another.
    output : Linear
    rotary : Rotary
    sizes : Sizes
    """

    def __init__(self, qkv: Linear, output: Linear, rotary: Rotary, sizes: Sizes) -> None:
        self._qkv, self._output, self._rotary, self._sizes = qkv, output, rotary, sizes

    def forward(self, x: Array, batch: int) -> Array:
        """Return y from x, (tokens, hidden): `batch` sequences of one length."""
        s = self._sizes
        qkv = self._qkv.forward(x)
        q, k, v = self._parts(qkv, batch)
        turned = self._turned(qkv, batch)
        self._rotary.turn(turned, out=turned)
        rows = module_of(x).empty((len(x), s.heads * s.head_dim), x.dtype)
        out = self._heads(rows, batch)
        _, lse = cufa.attention(q, k, v, causal=True, out=out, return_lse=True)
        self._saved = q, k, v, out, lse
        return self._output.forward(rows)

    def backward(self, dy: Array) -> Array:
        """Return dx from dy; the matrices write their gradients."""
        q, k, v, out, lse = self._saved
        dout = self._heads(self._output.backward(dy), len(q))
        s = self._sizes
        width = (s.heads + 2 * s.kv_heads) * s.head_dim
        dqkv = module_of(dy).empty((len(dy), width), dy.dtype)
        dq, dk, dv = self._parts(dqkv, len(q))
        cufa.attention_backward(
            *(dout, q, k, v, out, lse), causal=True, dq=dq, dk=dk, dv=dv, deterministic=True
        )
        turned = self._turned(dqkv, len(q))
        self._rotary.turn(turned, out=turned, back=True)
        return self._qkv.backward(dqkv)

    def _heads(self, rows: Array, batch: int) -> Array:
        """Return (tokens, heads * head_dim) as (batch, heads, seq, head_dim), a view."""
        return rows.reshape(batch, len(rows) // batch, -1, self._sizes.head_dim).swapaxes(1, 2)

    def _parts(self, rows: Array, batch: int) -> tuple[Array, Array, Array]:
        """Return the heads of queries, of keys and of values, as views."""
        heads, (queries, keys) = self._heads(rows, batch), (self._sizes.heads, self._sizes.kv_heads)
        return heads[:, :queries], heads[:, queries : queries + keys], heads[:, queries + keys :]

    def _turned(self, rows: Array, batch: int) -> Array:
        """Return the heads of queries and keys, as a view."""
        return self._heads(rows, batch)[:, : self._sizes.heads + self._sizes.kv_heads]
