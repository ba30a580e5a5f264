"""Peak memory of a restore, over the baseline of a process that has already restored something small.

Each case is measured in a child process of its own: resident memory before, peak resident memory after
(`VmHWM`, reset before the restore), divided by the bytes restored. Contract 3: at most 1.3 in float32, 1.5 with a
cast, for checkpoints of 256 MiB and more.

    python bench/restore_memory.py [--mib 256] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "restore_memory.json"
LAYERS = 12


def params(mib: int, rng):
    """A transformer's shapes: an embedding of an eighth of the bytes, layers of two matrices and a bias."""
    import numpy as np

    total = mib * 2**20 // 4
    width = 1024
    tree = {"embed": {"table": rng.standard_normal((total // 8 // width, width), dtype=np.float32)}}
    rows = total * 7 // 8 // LAYERS // 4 // width // 64 * 64
    for layer in range(LAYERS):
        tree[f"layer_{layer}"] = {
            "up": rng.standard_normal((width, 2 * rows), dtype=np.float32),
            "down": rng.standard_normal((2 * rows, width), dtype=np.float32),
            "bias": rng.standard_normal((width,), dtype=np.float32),
        }
    return tree


def write(kind: str, path: Path, mib: int) -> None:
    import jax
    import numpy as np

    tree = params(mib, np.random.default_rng(0))
    if kind == "gguf":
        import gguf

        writer = gguf.GGUFWriter(path, "llama")
        for name, layer in tree.items():
            for leaf, array in layer.items():
                quantised = array if array.ndim == 1 else gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0)
                raw = None if array.ndim == 1 else gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(f"{name}.{leaf}", quantised, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return
    if kind == "safetensors":
        from safetensors.numpy import save_file

        save_file({f"{name}.{leaf}": array for name, layer in tree.items() for leaf, array in layer.items()}, path)
        return
    zeros = jax.tree.map(np.zeros_like, tree)
    state = jax.tree.map(jax.numpy.asarray, {"model": tree, "opt_state": {"mu": zeros, "nu": zeros}})
    if kind == "servax":
        from servax.checkpoint import save

        save(path, state["model"])
    elif kind == "orbax v1":
        from orbax.checkpoint import v1 as ocp

        ocp.save(path, state)
    else:
        import orbax.checkpoint as ocp

        with ocp.CheckpointManager(path) as run:
            run.save(1, args=ocp.args.StandardSave(state))


def resident(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure(path: str, dtype: str, mib: int) -> dict[str, float]:
    """One restore in this process."""
    import numpy as np

    from servax.checkpoint import restore, save
    from servax.core.trees import flatten

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "small", {"w": np.ones((4, 4), np.float32)})
        restore(Path(folder) / "small", like=None)
    shapes = params_shapes(mib)
    Path("/proc/self/clear_refs").write_text("5")
    baseline = resident("VmRSS")
    start = time.perf_counter()
    restored = restore(path, like=shapes, dtype=dtype)
    seconds = time.perf_counter() - start
    size = sum(array.nbytes for array in flatten(restored.params).values())
    peak = resident("VmHWM") - baseline
    return {"restored_mib": size / 2**20, "ratio": round(peak / size, 3), "seconds": round(seconds, 3)}


def params_shapes(mib: int):
    import jax
    import numpy as np

    class Shapes:
        def standard_normal(self, shape, dtype):
            return jax.ShapeDtypeStruct(shape, np.dtype(dtype))

    return params(mib, Shapes())


def child(*arguments: str) -> str:
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written; default: a temporary folder")
    parser.add_argument("--write", nargs=2, metavar=("KIND", "PATH"), help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=2, metavar=("PATH", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(options.write[0], Path(options.write[1]), options.mib)
        return
    if options.measure:
        print(json.dumps(measure(*options.measure, options.mib)))
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for kind, name in (
            ("orbax v1", "v1"),
            ("orbax v0", "v0"),
            ("servax", "own"),
            ("safetensors", "a.safetensors"),
            ("gguf", "a.gguf"),
        ):
            path = str(Path(folder) / name)
            child("--write", kind, path, "--mib", str(options.mib))
            for dtype in ("float32", "bfloat16"):
                row = {"format": kind, "dtype": dtype, "stored_mib": options.mib}
                row |= json.loads(child("--measure", path, dtype, "--mib", str(options.mib)))
                rows.append(row)
                limit = 1.3 if dtype == "float32" else 1.5
                print(
                    f"{kind:<12} {dtype:<9} {row['restored_mib']:7.0f} MiB restored  peak {row['ratio']:.2f}x"
                    f"  (limit {limit})  {row['seconds']:.2f} s",
                    flush=True,
                )
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps({"machine": platform.machine(), "python": platform.python_version(), "cases": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
