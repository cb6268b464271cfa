"""Names of the workflows API, for code that imports them. Workflows themselves are not supported yet."""

from __future__ import annotations


class NonRetryableError(Exception):
    """A step of a workflow failed for good."""
