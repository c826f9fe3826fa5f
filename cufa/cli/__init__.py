"""The command line, ``python -m cufa``: one module a command, and what they share.

`main` turns whatever goes wrong into one line on the standard error and an exit status: 2 for
arguments and for what the machine lacks, 1 for work that failed, 130 for Ctrl-C.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType

from cufa import __version__
from cufa.cli import compile, explain, explore, info, inspect, tune
from cufa.cli.parser import PROGRAM, Parser, add_command

_COMMANDS = (info, explain, explore, compile, inspect, tune)
_EPILOG = f"""\
start here:
  {PROGRAM} info
  {PROGRAM} explain --q 4,32,4096,128 --dtype bfloat16 --causal --gpu h100
  {PROGRAM} explore --q 4,32,4096,128 --dtype bfloat16 --causal --arch sm_90a

Shapes are batch,heads,seq,head_dim. With --gpu or --arch no GPU is needed.
'{PROGRAM} COMMAND --help' explains a command."""


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description="See, compile, time and rank the attention kernels of cufa.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"cufa {__version__}")
    parser.set_defaults(run=None, prog=PROGRAM)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in _COMMANDS:
        add_command(commands, command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    arguments : sequence of str, optional
        The words after the program's name; those of this process by default.

    Returns
    -------
    int
        The exit status.
    """
    with warnings.catch_warnings():
        warnings.showwarning = _one_line
        try:
            return _run(arguments)
        except BrokenPipeError:
            _drop_output()
            return 1


def interrupt_once(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: stop once, and let what was found be kept and printed without another stop.

    A second one could also end the process while the compiler still runs in threads, which it does
    not survive. It meets a handler that does nothing: with SIG_IGN, Python may complain of a signal
    that was on its way.
    """
    signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    prog = PROGRAM
    try:
        words = sys.argv[1:] if arguments is None else arguments
        options = parser.parse_args(words)
        options.command = f"{PROGRAM} {shlex.join(words)}"
        prog = options.prog
        if options.run is None:
            parser.print_help()
            return 2
        status: int = options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except SystemExit as stop:  # argparse ends so, after --help and after an error
        return int(stop.code or 0)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    # Arguments that do not fit each other, a full disk, what CUDA and CuPy raise.
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def _one_line(message: Warning | str, *_: object, **__: object) -> None:
    print(f"{PROGRAM}: warning: {message}", file=sys.stderr)


def _drop_output() -> None:
    """Let go of an output whose reader is gone, or Python complains about it on its way out."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        os.dup2(nowhere, stream.fileno())
