"""The node process: HTTP in and out. `app` alone constructs the parts and joins them."""
