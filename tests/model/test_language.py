import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import language_toys as toys


def test_no_program_copies_the_cache():
    """By XLA's memory analysis: what a program needs beside its arguments is less than one of four caches."""
    toy = toys.compiled(toys.network(), slots=16, context=1000, chunks=(8,), batches=(1, 16))
    kept = [spec for spec in toy.source.functions["decode"].state if spec.name.startswith("cache")]
    assert [spec.concrete({}) for spec in kept] == [(16, 2, 1024, 8)] * 4
    for function in ("begin", "prefill", "decode"):
        for bucket in toy.source.grid[function]:
            assert toy.table[function, bucket].memory["temp"] < 16 * 2 * 1024 * 8 * 4, (function, bucket.label)
