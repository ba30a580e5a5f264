"""A child process that proves one wrapper of a bundle: `python -m servax.targets.child JOB.json`.

It imports what that wrapper needs and no more: the model's source for `jit` only, TensorFlow and no JAX for
`saved_model`. `child_protocol.py` says what goes in and out.
"""

from __future__ import annotations

import sys

from servax.targets.child_protocol import Job, Part, main
from servax.targets.table import target


def open_part(job: Job) -> Part:
    """The part that the job names."""
    return target(job.target).open_part(job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], open_part))
