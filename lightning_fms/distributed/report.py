"""What the strategy did to the module, for the start-of-run summary."""

from dataclasses import dataclass, field


@dataclass
class SetupReport:
    """One entry a decision; `lines()` is what a reader sees."""

    mesh: str = ""
    precision: str = ""
    blocks: list[str] = field(default_factory=list)
    sharded: list[str] = field(default_factory=list)
    recomputed: list[str] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as text, one line a concern."""
        return [
            f"mesh: {self.mesh}",
            f"precision: {self.precision}",
            f"blocks: {_names(self.blocks)}",
            f"sharded: {f'{_names(self.sharded)} and the root' if self.sharded else 'nothing'}",
            f"activations recomputed: {_names(self.recomputed)}",
            f"compiled: {_names(self.compiled)}",
            *self.notes,
        ]


def _names(names: list[str]) -> str:
    if len(names) <= 3:
        return ", ".join(names) or "none"
    return f"{len(names)} ({names[0]} ... {names[-1]})"
