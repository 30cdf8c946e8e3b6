"""Events over OpenTelemetry's protocol, to the collector that the environment names.

    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 flockstep join 'flockstep://…?via=…'

Theory of operation. An event is a log record with a name, its fields are attributes. They are sent as OTLP/HTTP in JSON
(opentelemetry.io/docs/specs/otlp), which every collector takes at the port of its HTTP receiver: one page, where the SDK is
ten packages. A thread sends what has gathered. What a collector cannot take now is sent again; beyond `MAX_HELD` the oldest
are dropped. Nothing that trains or votes ever waits for it.
"""

import json
import math
import os
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from itertools import islice
from typing import Any
from urllib.parse import unquote, urlsplit

from ...peer.base.errors import UsageError
from ...peer.base.plain import plain_text
from ...peer.log.telemetry import Event

BASE, LOGS = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"
SEND_PERIOD = 1.0
"""Seconds between two requests: the default of OTEL_BLRP_SCHEDULE_DELAY, the delay of the SDK's batches."""
MAX_BATCH = 512
"""Records of a request: the default of OTEL_BLRP_MAX_EXPORT_BATCH_SIZE."""
MAX_HELD = 8192
"""Records that wait: an hour of a peer whose collector is gone, and 10 MB."""
TIMEOUT = 10.0
"""The default of OTEL_EXPORTER_OTLP_TIMEOUT, in seconds."""
CLOSE_SECONDS = 2.0
"""To send the last events: a peer ends within three seconds of Ctrl-C."""
BUSY = (429, 502, 503, 504)
"""Answers after which the same records are sent again (the protocol's list)."""
INFO = 9
"""The severity of a record, by the protocol's numbers."""


@contextmanager
def exported(failed: Callable[[str], object]) -> Iterator[Callable[[Event], None]]:
    """Yield what takes events: it exports them where the environment names a collector, and else does nothing.

    `failed` is called, in a thread of its own, with each new reason why records do not arrive. Raises `UsageError` for
    an endpoint that is none.
    """
    endpoint = _endpoint(os.environ)
    if not endpoint:
        yield lambda event: None
        return
    exporter = Exporter(endpoint, os.environ, failed)
    try:
        yield exporter.take
    finally:
        exporter.close()


class Exporter:
    """Exports events to the address of a collector, in a thread, until it is closed."""

    def __init__(self, endpoint: str, environment: Mapping[str, str], failed: Callable[[str], object]) -> None:
        self._endpoint, self._failed = endpoint, failed
        self._headers = {"Content-Type": "application/json"} | _pairs(environment.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
        named = {"service.name": "flockstep", "service.version": version("flockstep")}
        named |= _pairs(environment.get("OTEL_RESOURCE_ATTRIBUTES", ""))
        if name := environment.get("OTEL_SERVICE_NAME", ""):
            named["service.name"] = name
        self._resource = {"attributes": _attributes(named)}
        self._held: deque[dict[str, Any]] = deque(maxlen=MAX_HELD)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._send_all, name="OTLP", daemon=True)
        self._thread.start()

    def take(self, event: Event) -> None:
        """Take an event, in any thread."""
        with self._lock:
            self._held.append(record_of(event))

    def close(self) -> None:
        """Send what is left, as far as there is time."""
        self._ended.set()
        self._thread.join(CLOSE_SECONDS)

    def _send_all(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(SEND_PERIOD)
            while batch := self._batch():
                if reason := self._send(batch, CLOSE_SECONDS if is_last else TIMEOUT):
                    if reason != self._said:
                        self._failed(f"{self._endpoint}: {reason}")
                    self._said = reason
                    break
                self._said = ""

    def _batch(self) -> list[dict[str, Any]]:
        with self._lock:
            return list(islice(self._held, MAX_BATCH))

    def _send(self, batch: list[dict[str, Any]], timeout: float) -> str:
        """Send records, and let go of them unless they are to be sent again; returns why they have not arrived."""
        logs = {"resource": self._resource, "scopeLogs": [{"scope": {"name": "flockstep"}, "logRecords": batch}]}
        body = json.dumps({"resourceLogs": [logs]}).encode()
        request = urllib.request.Request(self._endpoint, body, self._headers)
        reason, again = "", False
        try:
            urllib.request.urlopen(request, timeout=timeout).close()
        except urllib.error.HTTPError as error:
            with error:
                reason, again = f"it answers {error.code} {plain_text(str(error.reason))}", error.code in BUSY
        except (OSError, ValueError) as error:  # A ValueError of http.client for a header that is none.
            reason, again = f"not reached: {plain_text(str(getattr(error, 'reason', error)))}", True
        if not again:
            with self._lock:
                sent = {id(record) for record in batch}
                while self._held and id(self._held[0]) in sent:  # Some may have been dropped meanwhile.
                    self._held.popleft()
        return reason


def record_of(event: Event) -> dict[str, Any]:
    """Return an event as a log record of the protocol."""
    name, at = str(event.get("event")), event.get("time")
    microseconds = round(at * 1e6) if isinstance(at, int | float) else 0
    fields = {key: value for key, value in event.items() if key not in ("time", "event") and value is not None}
    return {
        "timeUnixNano": str(1000 * microseconds),
        "severityNumber": INFO,
        "eventName": name,
        "body": {"stringValue": name},
        "attributes": _attributes(fields),
    }


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int() if abs(value) < 1 << 63:  # 64 bits, which JSON carries as a text.
            return {"intValue": str(value)}
        case float() if math.isfinite(value):
            return {"doubleValue": value}
        case list() | tuple():
            return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": str(value)}


def _endpoint(environment: Mapping[str, str]) -> str:
    """Return the address for log records; empty where none is named. Raises `UsageError`."""
    name = LOGS if environment.get(LOGS) else BASE
    address = environment.get(name, "")
    parts = urlsplit(address)
    if address and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise UsageError(f"{name}={address!r} is no address", remedy="such as http://127.0.0.1:4318")
    return address if name == LOGS or not address else address.rstrip("/") + "/v1/logs"


def _pairs(text: str) -> dict[str, str]:
    """Return the pairs of a variable of the environment, `a=b,c=d`, values percent-encoded."""
    pairs = (each.partition("=") for each in text.split(","))
    return {key.strip(): unquote(value.strip()) for key, _, value in pairs if key.strip()}
