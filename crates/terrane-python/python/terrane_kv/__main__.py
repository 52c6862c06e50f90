"""The command `terrane`, also as `python -m terrane_kv`."""

import signal
import sys

from terrane_kv import _native


def main() -> int:
    """Runs the command with the arguments of this process, and returns its exit status."""
    # Python would only note an interrupt until the command returns.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.run_command(["terrane", *sys.argv[1:]], sys.executable, ["-m", "terrane_kv"])


if __name__ == "__main__":
    sys.exit(main())
