"""A child that does to each bucket what the environment's script says; answers `y = 2 * x` by NumPy, without JAX."""

import json
import os
import signal
import sys
import threading

import numpy as np

from servax.core.errors import ArtifactUnavailable, ModelError, PlatformError
from servax.targets.child_protocol import Answer, main
from servax.targets.samples import Expected

SCRIPT = json.loads(os.environ["CHILD_SCRIPT"])


class Scripted:
    def __init__(self, job):
        self.job = job
        act("open")

    def load(self, function, bucket):
        action = act(bucket.label)

        def answering(sample):
            outputs = [2 * step.inputs["x"] for step in sample.steps]
            if action == "wrong":
                outputs[0][0] += 1
            if action == "nan":
                outputs[0][0] = np.nan
            if action == "integers":
                outputs = [output.astype(np.int32) for output in outputs]
            if action == "other name":
                return [Answer({"z": output}) for output in outputs]
            state = {"s": Expected.of(np.full(2, 7.0, np.float32))}
            return [Answer({"y": output}, state if action == "wrong state" else {}) for output in outputs]

        return answering

    def device(self):
        act("device")
        return "abacus"

    def versions(self):
        return {"numpy": np.__version__}


def act(place):
    action = SCRIPT.get(place)
    if action == "segfault":
        print("about to read address 0", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if action == "hang":
        threading.Event().wait()
    if action == "exit":
        os._exit(7)
    if action == "raise":
        raise ModelError("the model is odd", seen="3 legs")
    if action == "platform":
        raise PlatformError("JAX has no cuda device on this machine")
    if action == "unavailable":
        raise ArtifactUnavailable("the bundle has no executable of this bucket")
    return action


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Scripted))
