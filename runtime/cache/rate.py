"""How long things took of late: what a read from a file costs, and what it saves."""

FADE = 0.9  # of what was measured before, at each measurement


class Rate:
    """Seconds for one unit of an amount."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = FADE * self._amount + amount
        self._seconds = FADE * self._seconds + seconds

    def seconds(self, amount: float) -> float | None:
        """For so much; None before the first measurement."""
        return amount * self._seconds / self._amount if self._amount else None
