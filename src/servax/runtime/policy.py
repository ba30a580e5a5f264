"""Which versions of a model are served, and what they are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from servax.core.errors import UsageError
from servax.runtime.labels import LATEST, Split


@dataclass(frozen=True, slots=True)
class Policy:
    """Which of the versions there are to serve.

    Attributes:
      kind: `latest`: the newest `count`; `all`; `specific`: those in `versions`.
    """

    kind: Literal["latest", "all", "specific"] = "latest"
    count: int = 1
    versions: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Policy:
        """The policy that `latest:2`, `latest`, `all` or `specific:1,2` means.

        Raises:
          UsageError: it is none of these.
        """
        kind, _, rest = (part.strip() for part in text.partition(":"))
        numbers = [part.strip() for part in rest.split(",")] if rest else []
        if all(number.isdecimal() for number in numbers):
            if kind == "all" and not numbers:
                return cls("all")
            if kind == "latest" and len(numbers) <= 1 and (not numbers or int(numbers[0])):
                return cls("latest", int(numbers[0]) if numbers else 1)
            if kind == "specific" and numbers:
                return cls("specific", versions=tuple(sorted(set(map(int, numbers)))))
        raise UsageError(
            "a version policy cannot be read", seen=text, expected="latest:N with N of 1 and more, all, or specific:1,2"
        )

    def choose(self, versions: Iterable[int]) -> tuple[int, ...]:
        """Those of `versions` that are to be served, the newest first."""
        ordered = sorted(versions, reverse=True)
        if self.kind == "specific":
            return tuple(version for version in ordered if version in self.versions)
        return tuple(ordered if self.kind == "all" else ordered[: self.count])

    def __str__(self) -> str:
        if self.kind == "all":
            return "all"
        return f"{self.kind}:{self.count if self.kind == 'latest' else ','.join(map(str, self.versions))}"


@dataclass(frozen=True, slots=True)
class Rules:
    """How one model is served.

    Attributes:
      policy: the versions to serve.
      labels: versions by label, `latest` for the newest that serves; a labelled version is served whatever the policy
        says.
      split: shares of the requests that name neither version nor label.
    """

    policy: Policy = Policy()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    split: Split | None = None

    def wanted(self, versions: Iterable[int]) -> tuple[int, ...]:
        """Those of `versions` that are to be served, the newest first."""
        there = set(versions)
        named = {int(version) for version in self.labels.values() if version != LATEST}
        return tuple(sorted({*self.policy.choose(there), *(named & there)}, reverse=True))

    def labels_of(self, served: Iterable[int]) -> dict[str, str]:
        """Versions by label, of those that are served."""
        there = sorted(served)
        found: dict[str, str] = {}
        for label, version in self.labels.items():
            if version == LATEST and there:
                found[label] = str(there[-1])
            elif version != LATEST and int(version) in there:
                found[label] = version
        return found
