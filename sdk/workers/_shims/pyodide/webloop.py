"""`pyodide.webloop`: the names of its event loop, which here is asyncio's own."""

from asyncio import AbstractEventLoop as WebLoop
from asyncio import DefaultEventLoopPolicy as WebLoopPolicy

__all__ = ["WebLoop", "WebLoopPolicy"]
