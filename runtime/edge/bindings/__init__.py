"""What stands behind the bindings of a worker's `env` in the node: one module a kind."""
