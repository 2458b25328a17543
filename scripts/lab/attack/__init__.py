"""The parts of `scripts/lab/run attack`, which attack the program and check its answers."""

ATTACK = "scripts/lab/run attack"
