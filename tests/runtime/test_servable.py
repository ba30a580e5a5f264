import subprocess
import sys

import numpy as np

import servax.runtime
from servax.core.tensors import Signature
from servax.runtime.servable import default_function, flat_inputs

EMPTY = Signature(())


def test_a_call_without_a_function_means_predict_or_the_only_one():
    assert default_function(None, {"predict": EMPTY, "embed": EMPTY}) == "predict"
    assert default_function(None, {"embed": EMPTY}) == "embed"
    assert default_function("embed", {"predict": EMPTY, "embed": EMPTY}) == "embed"


def test_the_protocol_has_all_that_a_loaded_model_is_used_for(tmp_path):
    """pyright itself, over the lines that the README and the design show."""
    code = tmp_path / "use.py"
    code.write_text(
        "from servax.runtime import LocalServable, Servable\n"
        "from servax.protocols import RemoteServable\n"
        "def use(servable: Servable, local: LocalServable, remote: RemoteServable) -> None:\n"
        "    print(servable.swap('runs/gpt', step='latest').drift['predict'])\n"
        "    print(servable.app)\n"
        "    print(servable.embed(tokens=[[1]])['embedding'].shape)\n"
        "    use(local, local, remote)\n"
        "    use(remote, local, remote)\n"
    )
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    checked = subprocess.run(
        [sys.executable, "-m", "pyright", "-p", str(tmp_path), "--pythonpath", sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout


def test_nested_inputs_are_joined_by_dots():
    x = np.zeros(1)
    assert flat_inputs({"image": {"left": x, "meta": {"at": 1}}, "n": [2]}) == {
        "image.left": x,
        "image.meta.at": 1,
        "n": [2],
    }


def test_the_room_s_table_of_contents_is_complete():
    for name in servax.runtime.__all__:
        assert getattr(servax.runtime, name).__name__ == name
