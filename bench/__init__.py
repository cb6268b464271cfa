"""What the product reaches on this machine, beside its peers where asked: `python -m bench NAME [--peers] [--json]`.

Nothing here is part of the product, and nothing of the product knows of it.
"""
