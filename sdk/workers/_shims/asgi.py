"""`import asgi`: the old name of `workers.asgi`."""

import sys

from workers import asgi

sys.modules[__name__] = asgi
