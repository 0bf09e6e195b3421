"""More objects of Ray than its store has room for: ray_spills.py DIRECTORY. Prints the bytes spilled."""

import os
import sys

import numpy
import ray

MIB = 1 << 20


def bytes_of(seed):
    return numpy.random.default_rng(seed).integers(0, 256, 8 * MIB, dtype="u1")


ray.init(
    num_cpus=2, object_store_memory=96 * MIB, object_spilling_directory=sys.argv[1], include_dashboard=False,
    log_to_driver=False,
)  # fmt: skip
made = [ray.remote(bytes_of).remote(seed) for seed in range(60)]
ray.wait(made, num_returns=len(made))
print(sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(sys.argv[1]) for name in names))
for seed, reference in enumerate(made):
    if not numpy.array_equal(ray.get(reference), bytes_of(seed)):
        sys.exit(f"object {seed} comes back with other bytes")
