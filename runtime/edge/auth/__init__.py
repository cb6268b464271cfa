"""Who may call a node's API: tokens of accounts, what they may do, and a log of what happened to them.

An account is a name: that of a token, of a worker's `account_id`, of the records in the ledger. What belongs to one
is nobody else's. This package knows nothing about HTTP.
"""
