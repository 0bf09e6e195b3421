"""Sort, column scan or matrix product over arrays of a stated size. Answers are exact: small whole numbers in
floating point."""
import sys

import numpy as np

what, mib, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = np.random.default_rng(seed)
if what == "sort":
    a = rng.integers(0, 1 << 62, mib * (1 << 20) // 8, dtype=np.int64)
    before = int(np.bitwise_xor.reduce(a)), int(a.sum(dtype=np.uint64))
    a.sort()
    assert bool((a[:-1] <= a[1:]).all())
    assert before == (int(np.bitwise_xor.reduce(a)), int(a.sum(dtype=np.uint64)))
    print("ok", before, int(a[0]), int(a[len(a) // 2]), int(a[-1]))
elif what == "columns":
    columns = 256
    a = np.empty((mib * (1 << 20) // 8 // columns, columns))
    for at in range(0, len(a), 4096):
        a[at : at + 4096] = rng.integers(0, 1000, a[at : at + 4096].shape)
    sums = [float(a[:, c].sum()) for c in range(0, columns, 16)]
    assert sum(float(a[:, c].sum()) for c in range(columns)) == float(a.sum()) if mib <= 128 else True
    print("ok", sums)
elif what == "matmul":
    n = int((mib * (1 << 20) / 3 / 8) ** 0.5) // 64 * 64
    a, b = (rng.integers(0, 16, (n, n)).astype(np.float64) for _ in range(2))
    c = a @ b
    v = rng.integers(0, 16, n).astype(np.float64)
    assert bool((c @ v == a @ (b @ v)).all())
    print("ok", n, float(c.sum()), float(c[n // 2, n // 3]))
