"""TLS of the ingress's own server: its files, and their renewal."""

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from app.settings import IngressSettings

log = logging.getLogger("ray.serve")

_REFRESH_S = 10.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The certificate of the server, and the certificates of authorities by which clients' own are checked."""

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = int(ssl.CERT_NONE)
    ciphers: str | None = None

    @classmethod
    def of(cls, settings: IngressSettings) -> Self | None:
        """The files of the settings, None without a certificate."""
        if settings.ssl_certfile is None:
            return None
        return cls(
            settings.ssl_certfile,
            settings.ssl_keyfile,
            settings.ssl_ca_certs,
            settings.ssl_cert_reqs,
            settings.ssl_ciphers,
        )

    @property
    def for_uvicorn(self) -> dict[str, Any]:
        """Arguments of uvicorn's configuration."""
        ciphers = {} if self.ciphers is None else {"ssl_ciphers": self.ciphers}
        return ciphers | {
            "ssl_certfile": self.certfile,
            "ssl_keyfile": self.keyfile,
            "ssl_ca_certs": self.ca_certs,
            "ssl_cert_reqs": self.cert_reqs,
        }

    async def refresh(self, context: ssl.SSLContext, every_s: float = _REFRESH_S) -> None:
        """Load changed files into the context, for new connections. Files that cannot be loaded change nothing."""
        seen = self._changed()
        while True:
            await asyncio.sleep(every_s)
            if (now := self._changed()) == seen:
                continue
            seen = now
            try:
                context.load_cert_chain(self.certfile, self.keyfile)
                if self.ca_certs is not None:
                    context.load_verify_locations(self.ca_certs)
            except OSError as error:  # ssl.SSLError is one
                log.error("the certificates remain unchanged: %s", error)
            else:
                log.info("changed certificates loaded")

    def _changed(self) -> list[tuple[int, int] | None]:
        """Inode and time of change of each file, None for one that cannot be seen."""
        return [_identity(Path(file)) for file in (self.certfile, self.keyfile, self.ca_certs) if file is not None]


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
