"""A process that writes to a store until it is done or killed: `python writer.py FOLDER FIRST COUNT BATCH [JOURNAL]`.

Prints the seed of every row once it is acknowledged, and nothing before.
"""

from __future__ import annotations

import sys

from synthetic import make_factors, make_key

from rag_explain.store.codec import encode
from rag_explain.store.sqlite import Disk
from rag_explain.store.tier import Row


def main() -> None:
    folder, first, count, batch = sys.argv[1], *map(int, sys.argv[2:5])
    disk = Disk(folder, journal=sys.argv[5] if len(sys.argv) > 5 else None)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for start in range(first, first + count, batch):
        seeds = range(start, start + batch)
        disk.put(
            [
                Row(make_key(seed), encode(make_key(seed), make_factors(seed, n=20, h=64)), (f"doc {seed}",))
                for seed in seeds
            ]
        )
        sys.stdout.write("".join(f"{seed}\n" for seed in seeds))
        sys.stdout.flush()
    disk.close()


if __name__ == "__main__":
    main()
