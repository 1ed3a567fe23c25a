"""What a verification found, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One kind of fault that was looked for: what ``name`` says, in ``looked_at``; ``problems`` are a sentence each,
    with a mend, none if all is well."""

    name: str
    looked_at: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verification:
    """``checks`` are those that could be made of ``folder``, ``notes`` what to know beside, such as what could not."""

    folder: str
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """All that is wrong, a sentence each."""
        return tuple(dict.fromkeys(problem for check in self.checks for problem in check.problems))

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def table(self) -> Iterator[dict[str, Any]]:
        """A row for each check, of plain values: ``pandas.DataFrame(verification.table())``."""
        for check in self.checks:
            yield {
                "check": check.name, "looked_at": check.looked_at, "ok": not check.problems,
                "problems": list(check.problems),
            }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        return {"folder": self.folder, "ok": self.ok, "checks": list(self.table()), "notes": list(self.notes)}
