"""Where the `octavo` command begins: Ctrl-C ends it as quietly while Python imports as it does later."""

from __future__ import annotations

import signal


def main() -> int:
    """`octavo.cli.main.main`, which takes half a second to import. A SIGINT that was ignored stays so (a job in the background)."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from octavo.cli.main import main as run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
