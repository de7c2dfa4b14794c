"""What the checks report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Finding:
    """One thing wrong with a kernel, as `race: source line 12: written by ... and read by ...`"""

    kind: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}{': ' if self.where else ''}{self.text}"


class MetalError(Exception):
    """A kernel was refused (stage check), could not be built, or did something wrong (stage run)."""

    def __init__(self, stage: str, findings: Sequence[Finding]) -> None:
        self.stage = stage
        self.findings = list(findings)
        super().__init__(f"{stage}: " + "\n  ".join(str(f) for f in self.findings[:12]))

    @property
    def kinds(self) -> set[str]:
        return {f.kind for f in self.findings}
