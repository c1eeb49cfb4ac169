"""The entry point `pagedkv`: one clear line on stderr for every error that is the user's to fix.

Exit status: 0 done, 1 a request failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from pagedkv import __version__, extras
from pagedkv.errors import PagedKVError, ReportError

# How long a thread of the kernels waits actively for the others before it gives its core away:
# some tens of microseconds, longer than the gaps between kernels. libgomp's own default is
# milliseconds, in which a core that somebody else needs too is lost to both.
SPIN_COUNT = "10000"

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line; ends with SystemExit."""
    sys.exit(run(list(sys.argv[1:] if args is None else args)))


def run(args: list[str]) -> int:
    """Runs the command line and returns the exit status."""
    if args == ["--version"]:
        print(f"pagedkv {__version__}")
        return 0
    if sys.stdout is None:  # it was closed before we started
        return _complain("stdout is closed: send it to a file or to /dev/null")
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded
    try:
        with extras():
            from pagedkv.cli.app import invoke

            status = invoke(args)
        sys.stdout.flush()  # here, where a failure has a message
        return status
    except ReportError as error:
        print("pagedkv:", error, file=sys.stderr)
        return FAILED
    except PagedKVError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        print("pagedkv: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; keep the interpreter from flushing into the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        print(f"pagedkv: cannot write the output: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _complain(message: str) -> int:
    print("pagedkv:", " ".join(message.split()), file=sys.stderr)
    return BAD_INPUT
