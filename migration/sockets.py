"""Connections between processes of one machine."""

import asyncio
import socket


async def open_local(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The streams of a connection to the Unix socket at `address`, of an abstract name, too. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        # Connected here, since uvloop refuses abstract names. A local connection does not wait for its other end.
        connection.connect(address)
        return await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise
