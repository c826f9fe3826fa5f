"""What an exploration found: a row a variant, best first, and its exports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cufa.device import Device
from cufa.explorer import export
from cufa.problem import Problem
from cufa.variant import Variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Row(NamedTuple):
    """One variant of an exploration; what is not known is None.

    Attributes
    ----------
    variant : Variant
    error : str or None
        Why it is illegal, does not compile or does not launch.
    notes : tuple of str
        What ptxas remarked on the treatment of wgmma, each with its code, such as C7512.
    registers, spill_bytes : int or None
        A thread's.
    static_smem_bytes, dynamic_smem_bytes : int or None
        Shared memory of a block.
    blocks_per_sm : int or None
        Blocks that a multiprocessor holds together.
    occupancy : float or None
        Share of a multiprocessor's threads that they fill.
    code_bytes : int or None
        Size of the instructions.
    compile_s : float or None
        Seconds, beside the other compilations.
    correct : bool or None
    max_error : float or None
        Largest absolute difference from the oracle.
    median_us, spread : float or None
        Time of a call, and the interquartile range of its samples relative to it.
    tflops, gbs : float or None
        Operations, and bytes of Q, K, V and O, by time.
    ceiling_fraction : float or None
        Of the speed that the measured ceilings allow for the problem.
    """

    variant: Variant
    error: str | None = None
    notes: tuple[str, ...] = ()
    registers: int | None = None
    spill_bytes: int | None = None
    static_smem_bytes: int | None = None
    dynamic_smem_bytes: int | None = None
    blocks_per_sm: int | None = None
    occupancy: float | None = None
    code_bytes: int | None = None
    compile_s: float | None = None
    correct: bool | None = None
    max_error: float | None = None
    median_us: float | None = None
    spread: float | None = None
    tflops: float | None = None
    gbs: float | None = None
    ceiling_fraction: float | None = None


def ranked(rows: list[Row]) -> list[Row]:
    """Return rows in order: the fastest, the untimed with fewest spills, wrong ones, errors."""

    def place(row: Row) -> tuple[Any, ...]:
        if row.error is not None:
            return 3, row.variant
        if row.correct is False:
            return 2, row.variant
        if row.median_us is not None:
            return 0, row.median_us, row.variant
        return 1, row.spill_bytes or 0, -(row.occupancy or 0.0), row.registers or 0, row.variant

    return sorted(rows, key=place)


class Exploration:
    """What `cufa.explore` found.

    Parameters
    ----------
    problem : Problem
    device : Device
    arch : str
        That the variants were compiled for.
    rows : list of Row
        In any order.
    planned : Variant
        What the planner chooses for the problem; of the explored kernels if its own is not among
        them.
    compiler : str
        Such as "NVRTC 13.0".
    ceilings : dict of str to float or None
        "read_gbs", "copy_gbs" and, with cuBLAS, "gemm_tflops", measured beside the variants.
    seconds : float
        That it took.
    date : str
        ISO day.

    Attributes
    ----------
    rows : list of Row
        Fastest first, then the untimed by spills and occupancy, then wrong ones, errors last.
    """

    def __init__(
        self,
        *,
        problem: Problem,
        device: Device,
        arch: str,
        rows: list[Row],
        planned: Variant,
        compiler: str,
        ceilings: dict[str, float] | None,
        seconds: float,
        date: str,
    ) -> None:
        self.problem = problem
        self.device = device
        self.arch = arch
        self.rows = ranked(rows)
        self.planned = planned
        self.compiler = compiler
        self.ceilings = ceilings
        self.seconds = seconds
        self.date = date

    @property
    def best(self) -> Row | None:
        """The fastest variant that is correct, or None where nothing was timed."""
        timed = (row for row in self.rows if row.median_us is not None and row.error is None)
        return next((row for row in timed if row.correct is not False), None)

    def __repr__(self) -> str:
        """One line."""
        return f"<Exploration of {len(self.rows)} variants for {self.arch} on {self.date}>"

    def __str__(self) -> str:
        """Return a table as plain text."""
        from cufa.explorer.table import text

        return text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can hold; a row is flat.

        Returns
        -------
        dict of str to object
            "version" of the format, "date", "seconds", "device", "arch", "compiler", "problem",
            "planned", "ceilings", and "rows", a dict each. A row's `Variant.blocks_per_sm` is
            "min_blocks_per_sm" there.
        """
        return export.as_dict(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return `to_dict` as JSON, a row a line, and write it if a path is given.

        Parameters
        ----------
        path : str or Path, optional
            Where to write it.

        Returns
        -------
        str

        Raises
        ------
        OSError
            The file cannot be written.
        """
        return export.written(export.as_json(self), path)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return the rows as CSV with a line of headings, and write it if a path is given.

        Parameters
        ----------
        path : str or Path, optional
            Where to write it.

        Returns
        -------
        str

        Raises
        ------
        OSError
            The file cannot be written.
        """
        return export.written(export.as_csv(self), path)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the variants and return the figure; needs matplotlib.

        With timings: the time of each tile, and a roofline. Without: registers and occupancy.

        Parameters
        ----------
        path : str or Path, optional
            Where to write it; the suffix names the format.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ImportError
            Without matplotlib.
        ValueError
            matplotlib does not know the format.
        OSError
            The file cannot be written.
        """
        from cufa.explorer.plot import figure

        drawn = figure(self)
        if path is not None:
            drawn.savefig(path, dpi=150)
        return drawn


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during an exploration.

    Attributes
    ----------
    exploration : Exploration
        What was found until then.
    """

    def __init__(self, exploration: Exploration) -> None:
        super().__init__(f"interrupted after {len(exploration.rows)} variants")
        self.exploration = exploration
