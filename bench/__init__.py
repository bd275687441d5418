"""One file for each claim. `python -m bench.NAME [--quick]` prints what it does and, as its last line, JSON."""
