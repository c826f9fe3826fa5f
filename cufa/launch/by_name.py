"""Parameters whose numbers are given by name, of calls that are prepared as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cufa.arrays import Ints
from cufa.launch.params import Layout, scale_log2
from cufa.launch.signature import AddressSlot
from cufa.problem.extras import Extras
from cufa.problem.problem import Problem


def numbers(
    problem: Problem, q_tiles: int, section_heads: int, steps: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Return the numbers of ``Params`` that kernels of all such calls have.

    Parameters
    ----------
    problem : Problem
        With a scale that is not negative.
    q_tiles, section_heads : int
        As in its plan.
    steps : mapping
        By tensor: the elements from one batch index, head and row to the next.
    """
    known = {
        "scale_log2": scale_log2(problem.scale),
        "heads_q": problem.heads_q,
        "group": problem.group,
        "seq_q": problem.seq_q,
        "seq_kv": problem.seq_kv,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "q_tiles": q_tiles,
        "heads": problem.batch * problem.heads_q,
        "section_heads": section_heads,
    }
    for name, (batch, head, seq) in steps.items():
        # The tiles' sequences are not along this axis where they follow each other.
        known[f"{name}.stride_batch"] = 0 if problem.kv == "Varlen" else batch
        known[f"{name}.stride_head"], known[f"{name}.stride_seq"] = head, seq
    return known


class NamedLayout(Layout):
    """The layout of a parameter whose numbers are given by name."""

    def filled(
        self,
        known: Mapping[str, float],
        problem: Problem,
        strides: tuple[Ints, ...],
        of_parts: Mapping[str, float] | None = None,
        last: Sequence[int] = (),
    ) -> bytes:
        """Return what follows tensor maps: all numbers; addresses are 0.

        Parameters
        ----------
        known : mapping
            The numbers of ``Params`` that are not 0.
        problem, strides, of_parts
            As in `ScoreLayout.values`.
        last : sequence of int
            The numbers behind those of the score.
        """
        own = [name.removeprefix("params.") for name in self.words if name.startswith("params.")]
        return self._numbers.pack(
            *(known.get(name, 0) for name in own),
            *self._score.values(problem, strides, of_parts or {}),
            *last,
        )

    def places(self, names: Sequence[str], first: int, extras: Extras) -> tuple[AddressSlot, ...]:
        """Return where addresses go.

        Parameters
        ----------
        names : sequence of str
            The numbers that are the first addresses of a launch, in order.
        first : int
            Which of its addresses is the first of those of extras.
        extras : Extras
        """
        own = ((self.words[name], i) for i, name in enumerate(names))
        return *own, *self._score.placed(first, extras)
