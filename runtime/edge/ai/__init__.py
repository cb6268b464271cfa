"""The gate that every model call passes, and the dialects in which callers speak to it."""
