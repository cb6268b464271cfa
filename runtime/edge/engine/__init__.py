"""The torch side: one process that loads models and runs their requests in one step loop."""
