import dataclasses

import pytest

import serving_toys as toys
from servax.runtime.stages_table import StagesTable
from servax.stages.buckets import Bucket
from servax.targets.target import LoadedProgram, ProgramTable

KEY = ("predict", Bucket.of(batch=1))
LOADED = LoadedProgram(
    lambda p, s, i: ((), ()),
    "aot",
    {"load": 0.0125},
    {"flops": 2e9},
    {"argument": 2048, "temp": 0, "code": 3 << 20},
    lambda: "module @net",
)
TABLE = StagesTable.of("net", ProgramTable({KEY: LOADED}), {KEY: 0.0007})


def test_rows_carry_every_stage():
    (row,) = TABLE
    assert (row.function, row.bucket, row.target) == ("predict", "batch=1", "aot")
    assert (row.trace, row.load, row.run) == (None, 0.0125, 0.0007)
    assert (row.argument_bytes, row.temp_bytes, row.code_bytes, row.flops) == (2048, 0, 3 << 20, 2e9)
    assert row.stablehlo == "module @net"
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.run = 1.0


def test_rows_are_found_by_program():
    assert TABLE["predict@batch=1"] is TABLE[0]
    assert len(TABLE) == 1
    with pytest.raises(KeyError, match=r"predict@batch=2; there are predict@batch=1"):
        TABLE["predict@batch=2"]


def test_it_shows_units_in_a_terminal_and_in_a_notebook():
    for text in (str(TABLE), TABLE._repr_html_()):
        for part in ("Stages of net", "predict@batch=1", "12.5 ms", "700 µs", "2.0 KiB", "3.0 MiB", "2e+09"):
            assert part in text
    assert TABLE._repr_html_().startswith("<table>")


def test_stablehlo_of_a_real_program_is_given_on_demand():
    with toys.toy() as servable:
        assert "stablehlo.add" in servable.stages["count@static"].stablehlo
        assert servable.stages["count@static"].run is None
        servable.warm()
        assert servable.stages["count@static"].run > 0


def test_a_program_without_a_module_has_no_text():
    bare = StagesTable.of("net", ProgramTable({KEY: LoadedProgram(LOADED.program, "aot")}), {})
    assert bare[0].stablehlo == ""
