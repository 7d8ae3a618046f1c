"""A process that writes to a store until it is done or killed: `python writer.py FOLDER FIRST COUNT BATCH`.

Prints the seed of every row once it is acknowledged, and nothing before. Without arguments it reads such arguments from
standard input, one set per line, and forks a writer for each: a killed one costs no new interpreter.
"""

from __future__ import annotations

import os
import sys

from rag_explain.store.codec import encode
from rag_explain.store.disk import Disk
from rag_explain.store.tier import Row, owner
from tests.support.synthetic import make_factors, make_key


def say(text: str) -> None:
    os.write(1, text.encode())


def write(arguments: list[str]) -> None:
    folder, first, count, batch = arguments[0], *map(int, arguments[1:])
    disk = Disk(folder)
    say("ready\n")
    for start in range(first, first + count, batch):
        seeds = range(start, start + batch)
        disk.put(
            [
                Row(make_key(seed), encode(make_key(seed), make_factors(seed, n=20, h=64)), (owner(f"doc {seed}"),))
                for seed in seeds
            ]
        )
        say("".join(f"{seed}\n" for seed in seeds))
    disk.close()


def serve() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            say(f"{os.getpid()}\n")
            write(line.rstrip("\n").split("\t"))
            os._exit(0)
        os.waitpid(pid, 0)
        say("ended\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        write(sys.argv[1:])
    else:
        serve()
