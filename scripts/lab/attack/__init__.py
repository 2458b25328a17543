"""The parts of `scripts/lab/run attack`."""

ATTACK = "scripts/lab/run attack"
