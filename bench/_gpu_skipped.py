"""How a check says that it cannot run here."""


class Skipped(Exception):
    """A check that cannot run here; the message says why."""
