"""What tiles cost a multiprocessor, and the time of a problem that follows."""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """Microseconds that a variant takes for what it does.

    Attributes
    ----------
    launch : float
        For a launch, whatever it computes.
    tile : float
        For a tile of rows, beside its keys.
    keys : tuple of float
        For a tile of keys, by how many blocks a multiprocessor runs: one, two, and so on.
    """

    launch: float
    tile: float
    keys: tuple[float, ...]

    def of(
        self,
        heads: int,
        rows: int,
        keys: int,
        bm: int,
        bn: int,
        step: int,
        sms: int,
        pack: int,
        causal: bool,
    ) -> float:
        """Return the time of a problem, by the way its tiles differ.

        Parameters
        ----------
        heads, rows, keys : int
            Rows and keys of each head.
        bm, bn : int
            Rows and keys of a tile.
        step : int
            The greatest common divisor of `bm` and `bn`.
        sms : int
            Multiprocessors.
        pack : int
            Heads whose rows a tile holds together; there is one tile then, of nearly all keys.
        causal : bool
        """
        if causal and pack == 1:
            return self.causal_tiles(heads, rows, keys, bm, bn, step, sms)
        return self.equal_tiles(heads // pack, rows * pack, keys, bm, bn, sms)

    def equal_tiles(self, heads: int, rows: int, keys: int, bm: int, bn: int, sms: int) -> float:
        """Return the time where all rows see all keys: a tile of each wave, and what is left over.

        Parameters
        ----------
        heads, rows, keys, bm, bn, sms
            As of `of`.
        """
        launch, tile, of_keys = self
        of_busiest, key_tiles = -(-heads * -(-rows // bm) // sms), -(-keys // bn)
        waves, left = divmod(of_busiest, len(of_keys))
        time = launch + waves * (tile + key_tiles * of_keys[-1])
        return time + tile + key_tiles * of_keys[left - 1] if left else time

    def causal_tiles(
        self, heads: int, rows: int, keys: int, bm: int, bn: int, step: int, sms: int
    ) -> float:
        """Return the time with a causal mask, whose tiles come longest first.

        The busiest multiprocessor has its share of all; or as many tiles as there are waves, of
        the length that the last wave begins with; or the longest alone: whichever takes longest.

        Parameters
        ----------
        heads, rows, keys, bm, bn, step, sms
            As of `of`.
        """
        launch, tile, of_keys = self
        seeing = rows if rows < keys else keys
        tiles, row_tiles = heads * -(-rows // bm), -(-seeing // bm)
        if tiles * keys == 0:
            return launch + tiles * tile
        before = keys - seeing  # keys that all rows see
        longest = -(-keys // bn)
        # From a tile's last row to its last key, on average
        fill = before + -before % step + (bn - step) / 2
        total = heads * (longest + (row_tiles - 1) * (bm * row_tiles / 2 + fill) / bn)
        at_once = min(len(of_keys), -(-tiles // sms))
        each, places = of_keys[at_once - 1], sms * at_once
        alone, shared = tile + longest * each, (tiles * tile + total * each) / places
        if tiles <= places:
            return launch + (alone if alone > shared else shared)
        shortest = min(longest, (bm + fill) / bn)
        waves = -(-tiles // places)
        last = longest - (longest - shortest) * (waves - 1) * places / tiles
        return launch + max(alone, shared, waves * (tile + last * each))
