"""`python -m rampool [OPTIONS] script.py [ARGUMENTS]`: a Python program with more memory than this machine
lends it.

It is `rampool run [OPTIONS] -- python script.py [ARGUMENTS]` with this Python. OPTIONS are those of `rampool
run`; `-m MODULE` and `-c PROGRAM` work as for Python. Without arguments it says so.
"""

import os
import sys

from rampool._command import command

# Options of `rampool run` that take no value of their own.
_FLAGS = {"--compression", "--no-follow", "--progress", "--stats"}


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The options of `rampool run`, and what Python is given."""
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            return arguments[:at], arguments[at + 1 :]
        if not word.startswith("--"):
            break
        at += 1 if word in _FLAGS or "=" in word else 2
    return arguments[:at], arguments[at:]


def main() -> None:
    """Becomes `rampool run`."""
    options, program = split(sys.argv[1:])
    if not program or program[0] in ("-h", "--help") or "--help" in options:
        print(__doc__)
        print("The options: rampool run --help")
        sys.exit(0 if "--help" in options or program else 2)
    path = command()
    os.execv(path, [path, "run", *options, "--", sys.executable, *program])


if __name__ == "__main__":
    main()
