"""The test kit: pytest fixtures that run a worker from its configuration, with real bindings. See docs/testing.md."""
