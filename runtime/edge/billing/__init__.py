"""Usage records, prices and bills. Money and tokens are integers."""
