"""The TLS certificate of a server, from files; read again when they change, as ACME clients renew them every few weeks."""

import ipaddress
import ssl
from pathlib import Path

from cryptography.x509 import DNSName, IPAddress, SubjectAlternativeName, load_pem_x509_certificate
from cryptography.x509.extensions import ExtensionNotFound

from ..base.errors import UsageError
from ..log.telemetry import Telemetry

MAX_NAMES = 4
"""Names of a certificate that are announced: an operator of more announces what peers should use."""
REMEDY = "name a PEM file with the whole chain (fullchain.pem) and one with its key (privkey.pem)"


class TlsCertificate:
    """A certificate chain and its key. Raises `UsageError` if they cannot be used."""

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain = chain
        self._key = key
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._read_at: tuple[int, ...] = ()
        try:
            self._read()
            names = load_pem_x509_certificate(chain.read_bytes()).extensions.get_extension_for_class(SubjectAlternativeName)
        except ExtensionNotFound:
            self.hosts: tuple[str, ...] = ()
        except (OSError, ValueError) as error:
            raise UsageError(f"{chain} and {key} are no certificate: {_reason(error)}", remedy=REMEDY) from None
        else:
            dns = [f"/dns/{name}" for name in names.value.get_values_for_type(DNSName) if "*" not in name]
            ips = names.value.get_values_for_type(IPAddress)
            self.hosts = (*dns, *(f"/ip{ip.version}/{ip}" for ip in ips if isinstance(ip, _Ip)))[:MAX_NAMES]
            """The hosts that it is for, as the beginnings of addresses."""

    def context(self, telemetry: Telemetry) -> ssl.SSLContext:
        """Return the context for the next connection; files that cannot be read leave the certificate as it was."""
        try:
            self._read()
        except (OSError, ValueError) as error:
            telemetry.emit("tls.unread", step="renew", reason=f"{self._chain}: {_reason(error)}")
        return self._context

    def _read(self) -> None:
        changed_at = tuple(path.stat().st_mtime_ns for path in (self._chain, self._key))
        if changed_at != self._read_at:
            self._read_at = changed_at  # Not twice, if it cannot be read.
            self._context.load_cert_chain(self._chain, self._key)


_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def _reason(error: OSError | ValueError) -> str:
    """`ssl.SSLError`, which is an `OSError`, has the reason of OpenSSL."""
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
