"""Prints the OpenAPI document."""

import sys

from edge.node.api.openapi import formatted

sys.stdout.buffer.write(formatted())
