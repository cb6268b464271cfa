"""The runtime: what an operator installs and runs."""
