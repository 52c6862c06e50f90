"""The command `terrane`, also as `python -m terrane_kv`."""

import signal
import sys

from terrane_kv import _native


def main() -> int:
    """Runs the command with the arguments of this process, and returns its exit status."""
    # By default, Python would not handle an interrupt until the command returns.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # `-P`: a child process must not import modules from the current directory.
    return _native.run_command(["terrane", *sys.argv[1:]], sys.executable, ["-P", "-m", "terrane_kv"])


if __name__ == "__main__":
    sys.exit(main())
