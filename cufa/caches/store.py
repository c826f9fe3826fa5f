"""Storage of a cache: keys and values of all layers, lengths, tables; on the device and the host.

The host decides, and the device follows on the current stream: lengths and tables keep their
addresses, and each change is sent there. Nothing is read back.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from cufa.arrays import Array, whole_chunks
from cufa.caches.kinds import dtype_of
from cufa.caches.outbox import Outbox
from cufa.caches.pages import Change, Pages
from cufa.caches.rotaries import rotaries_of
from cufa.checks import check_flag, check_layout, check_module, check_size
from cufa.launch.capture import is_capturing
from cufa.quantized.rows import KINDS
from cufa.specs.spec import MAX_HEAD_DIM


class Store:
    """The memory that a cache and all views of it share.

    Parameters
    ----------
    arguments : mapping
        The arguments `heads_kv`, `head_dim`, `head_dim_v`, `dtype`, `smooth`, `layers`, `layout`,
        `rotary` and `xp` of `KVCache`, by name.
    sequences : int
    capacity : int
        Tokens of the longest sequence.
    pages : Pages, optional
        All of them are free.

    Attributes
    ----------
    xp : module
        `numpy` or `cupy`.
    layout : str
    kind : Kind or None
        The numbers, if they have 8 bits.
    dtype : numpy.dtype
        The dtype of the arrays.
    layers : int
    shape : tuple of int
        (batch, heads_kv, capacity) or (pages, heads_kv, page_size).
    head_dims : tuple of int
        Head dims of keys and of values.
    pages : Pages or None
    rotaries : tuple of Rotary or None
        One for each layer.
    k, v : array, (layers, *shape, head_dim)
        In the order of the layout. Rows are padded with zeros to whole chunks of 16 bytes.
    k_scale, v_scale : array of float32, (layers, *shape), or None
        The scales of rows of 8 bits.
    k_mean : array of float32, (layers, sequences, heads_kv, head_dim), or None
        Rows that were taken off keys.
    host : ndarray, (2, sequences) int32
        Tokens of each sequence before the newest ones, and with them.
    in_use : ndarray, (sequences,) bool
    written : ndarray, (layers, sequences) int32
        Tokens of each sequence that a layer holds, as far as the host knows.
    is_captured : bool
        Whether a CUDA graph also writes tokens, which the host does not know of.
    device, table : array
        `host` and the table of `pages` where kernels read them.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        sequences: int,
        capacity: int,
        pages: Pages | None = None,
    ) -> None:
        self.layout = layout = arguments["layout"]
        check_layout(layout)
        self.pages, heads = pages, check_size("heads_kv", arguments["heads_kv"])
        blocks, keys = (sequences, capacity) if pages is None else (pages.free, pages.page_size)
        self.shape = shape = blocks, heads, keys
        head_dim = check_size("head_dim", arguments["head_dim"], MAX_HEAD_DIM)
        head_dim_v = head_dim if arguments["head_dim_v"] is None else arguments["head_dim_v"]
        head_dims = head_dim, check_size("head_dim_v", head_dim_v, MAX_HEAD_DIM)
        self.head_dims = head_dims
        self.layers = layers = check_size("layers", arguments["layers"])
        self.xp = xp = arguments["xp"]
        check_module(xp)
        self.rotaries = rotaries_of(arguments["rotary"], layers, head_dim, capacity, xp)
        kinds = KINDS.values()
        known = dtype_of(arguments["dtype"], kinds)
        self.kind = kind = next((kind for kind in kinds if kind.on_host == known), None)
        smooth = check_flag("smooth", arguments["smooth"])
        if smooth and kind is None:
            raise ValueError(
                f"smooth must be False where dtype is {known.name}: it is for caches of 8 bits, "
                f"{', '.join(KINDS)}"
            )
        self.dtype = dtype = known if kind is None or xp is np else kind.on_device
        ordered = shape if layout == "bhsd" else (blocks, keys, heads)
        self._bases = [
            xp.zeros((layers, *ordered, whole_chunks(d, dtype.itemsize)), dtype) for d in head_dims
        ]
        self._scales = [xp.zeros((layers, *shape), np.float32) for _ in head_dims if kind]
        of_means = layers, sequences, heads, head_dim
        self._means = xp.zeros(of_means, np.float32) if smooth else None
        self.host = np.zeros((2, sequences), np.int32)
        # Numbers of a paged cache are in use when they have been allocated, and others always.
        self.in_use = np.full(sequences, pages is None)
        self.written = np.zeros((layers, sequences), np.int32)
        self.is_captured = False
        self._place()

    def _place(self) -> None:
        """Make what follows from the other attributes: views, and memory of the device for them."""
        xp = self.xp
        self.k, self.v = (
            base[..., :d] for base, d in zip(self._bases, self.head_dims, strict=True)
        )
        scales: Any = self._scales or (None, None)
        self.k_scale, self.v_scale = scales
        self.k_mean = self._means
        own = *self._bases, *self._scales
        self._spans = [(at := address_of(array), at + array.nbytes) for array in own]
        self._outbox = Outbox()
        self.device: Array = self.host if xp is np else xp.zeros(self.host.shape, np.int32)
        self.table: Array = None
        if self.pages is not None:
            table = self.pages.table
            self.table = table if xp is np else xp.zeros(table.shape, np.int32)
            self.pages.changed |= {(int(i), int(j)) for i, j in np.argwhere(table)}

    def __getstate__(self) -> dict[str, Any]:
        """Return the arrays that a copy has of its own; arrays of the device pass by the host."""
        self.refuse_capture("a copy of a cache")
        made = ("k", "v", "k_scale", "v_scale", "k_mean", "device", "table", "_spans", "_outbox")
        return {name: x for name, x in self.__dict__.items() if name not in made} | {
            "xp": self.xp.__name__
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of another store, of which no CUDA graph writes here.

        Where replays may have written, or a store of an older version has not counted, all tokens
        pass for written.
        """
        counted = not state.get("is_captured", True)
        state = {"kind": None, "_scales": [], "_means": None} | state
        state |= {"xp": importlib.import_module(state["xp"]), "is_captured": False}
        self.__dict__.update(state)
        if not counted:
            self.written = np.tile(self.host[1], (self.layers, 1))
        self._place()
        self.send()

    def described(self) -> str:
        """Say what kind of cache it is, and how large."""
        blocks, heads, keys = self.shape
        d, dv = self.head_dims
        head_dim = f"head_dim {d}" if d == dv else f"head_dim {d} and {dv}"
        name, sizes = "KVCache", f"capacity {keys}"
        if self.pages is not None:
            name = "PagedKVCache"
            sizes = f"{blocks - self.pages.free} of {blocks} pages of {keys} tokens in use"
        dtype = self.dtype.name if self.kind is None else self.kind.name
        kind = f"{dtype}, {self.layout}, {self.xp.__name__}"
        held = [*self._bases, *self._scales]
        if self._means is not None:
            kind = f"smooth {kind}"
            held.append(self._means)
        mb = sum(array.nbytes for array in held) / 1e6
        return (
            f"{name} of {self.in_use.size} sequences, {sizes}, heads_kv {heads}, {head_dim}, "
            f"layers {self.layers}, {kind}, {mb:.3g} MB"
        )

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return self.xp is not np and is_capturing()

    def refuse_capture(self, what: str) -> None:
        """Raise an error if the current stream is being captured into a CUDA graph."""
        if self.is_capturing():
            raise RuntimeError(
                f"{what} cannot be captured into a CUDA graph, where it would do the same in each "
                "replay: call it before each replay, and capture what follows it"
            )

    def owns(self, array: Array) -> bool:
        """Whether an array is a view of keys, values or scales."""
        address = address_of(array)
        return any(first <= address < end for first, end in self._spans)

    def copy_pages(self, changes: Sequence[Change]) -> None:
        """Copy the pages of all layers that will no longer be shared."""
        copies = [(each.old, each.new) for each in changes if each.old is not None]
        if copies:
            old, new = self.xp.asarray(np.array([*zip(*copies, strict=True)]))
            for array in (*self._bases, *self._scales):
                array[:, new] = array[:, old]

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Give sequences the tokens that others have now; pages are shared, rows are copied.

        Parameters
        ----------
        sources, targets : ndarray of int
            Which sequences, all in use; no target comes twice.

        Raises
        ------
        ValueError
            A source has tokens that a layer does not hold.
        """
        for layer in range(self.layers):
            self.check_written(layer, sources)
        if not targets.size:
            return
        pages = self.pages
        with self.changing(
            [] if pages is None else pages.moved(sources.tolist(), targets.tolist())
        ):
            self.host[:, targets] = self.host[1, sources]
            self.written[:, targets] = self.host[1, targets]
            self.send()
            self._copy_rows(sources, targets)  # last: it is not undone

    def check_written(self, layer: int, sequences: np.ndarray | slice) -> None:
        """Refuse to use tokens that `extend` has made room for, and that no `write` has filled."""
        written, lengths = self.written[layer, sequences], self.host[1, sequences]
        if (written == lengths).all() or self.is_captured or self.is_capturing():
            return
        i = int(np.flatnonzero(written != lengths)[0])
        number = np.arange(self.in_use.size)[sequences][i]
        raise ValueError(
            f"layer {layer} holds {written[i]} of the {lengths[i]} tokens of sequence {number}: "
            "write those that extend has made room for first, or truncate the sequence"
        )

    def _copy_rows(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy to sequences what others hold in all layers: tokens without pages, and means."""
        keys = int(self.host[1, targets].max())
        arrays = [] if self._means is None else [self._means]
        if self.pages is None and keys:
            for array in (*self._bases, *self._scales):
                by_head = self.layout == "bhsd" or array.ndim == 4  # of scales
                arrays.append(array[:, :, :, :keys] if by_head else array[:, :, :keys])
        # Where there is memory for the first copy, there is for the others.
        layers = sorted((layer for array in arrays for layer in array), key=lambda x: -x.nbytes)
        if layers:
            old, new = self.xp.asarray(np.stack([sources, targets]))
            for layer in layers:
                layer[new] = layer[old]

    @contextmanager
    def changing(self, changes: Sequence[Change] = ()) -> Iterator[None]:
        """Change pages; if the block fails, leave these and the host's numbers as they were."""
        before = self.host.copy(), self.in_use.copy(), self.written.copy()
        if self.pages is not None:
            self.pages.apply(changes)
        try:
            yield
        except BaseException:
            if self.pages is not None:
                self.pages.undo(changes)
            self.host[...], self.in_use[...], self.written[...] = before
            self.send()
            raise

    def send(self) -> None:
        """Bring the device up to what the host has decided."""
        if self.xp is np:
            return
        self._outbox.send(self.host, self.device)
        if self.pages is not None and self.pages.changed:
            table = self.pages.table
            places = np.array([row * table.shape[1] + column for row, column in self.pages.changed])
            sent = self.xp.asarray(np.stack([places, table.ravel()[places]]).astype(np.int32))
            self.table.ravel()[sent[0]] = sent[1]
            self.pages.changed.clear()


def address_of(array: Array) -> int:
    """Return where the first element of an array is."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
