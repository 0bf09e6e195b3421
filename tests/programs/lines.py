"""Random lines for sort: `lines.py BYTES SEED` on standard output, the same for the same seed."""
import random
import sys

left, rng = int(sys.argv[1]), random.Random(int(sys.argv[2]))
while left > 0:
    # 24 to 72 letters a line.
    raw = rng.randbytes(1 << 16).hex()
    lines, at = [], 0
    while at < len(raw) - 72:
        n = 24 + int(raw[at : at + 2], 16) % 48
        lines.append(raw[at : at + n])
        at += n
    text = ("\n".join(lines) + "\n")[: max(left, 2)]
    if not text.endswith("\n"):
        text = text[:-1] + "\n"
    sys.stdout.write(text)
    left -= len(text)
