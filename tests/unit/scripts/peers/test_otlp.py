"""Events to an OpenTelemetry collector: what arrives is valid by the protocol's own schema, and nothing is lost meanwhile."""

import threading
from pathlib import Path
from typing import Any

import pytest
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import UsageError
from flockstep.peer.log.telemetry import Event
from flockstep.scripts.peers import otlp
from flockstep.scripts.peers.join import recorded
from flockstep.scripts.peers.loggers import Loggers
from flockstep.scripts.peers.otlp import MAX_BATCH, MAX_HELD, Exporter, exported
from support.collector import collector


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "SEND_PERIOD", 0.01)
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS"):
        monkeypatch.delenv(name, raising=False)


def records(data: bytes) -> Any:
    json_format = pytest.importorskip("google.protobuf.json_format")
    service = pytest.importorskip("opentelemetry.proto.collector.logs.v1.logs_service_pb2")
    request = json_format.Parse(data, service.ExportLogsServiceRequest())  # An unknown or wrong field raises.
    (logs,) = request.resource_logs
    return logs


def test_events_arrive_as_log_records_with_their_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as there:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", there.address + "/")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b, x-tenant = 7")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab")
        event: Event = {"time": 1_700_000_000.25, "event": "round.done", "round": 3, "loss": 2.5, "cut": ["a", "b"]}
        event |= {"reason": "ü\n", "empty": None, "is": True, "large": 1 << 70, "none": float("nan")}
        with exported(lambda reason: pytest.fail(reason)) as take:
            take(event)
            there.wait(1)
    ((path, headers, data),) = there.asked
    assert (path, headers["api-key"], headers["x-tenant"]) == ("/v1/logs", "a b", "7")
    logs = records(data)
    resource = {each.key: each.value.string_value for each in logs.resource.attributes}
    assert (resource["service.name"], resource["deployment.environment"]) == ("mine", "lab")
    ((record,),) = (scope.log_records for scope in logs.scope_logs)
    assert (record.event_name, record.body.string_value) == ("round.done", "round.done")
    assert record.time_unix_nano == 1_700_000_000_250_000_000
    fields = {each.key: each.value for each in record.attributes}
    assert (fields["round"].int_value, fields["loss"].double_value, fields["is"].bool_value) == (3, 2.5, True)
    assert [each.string_value for each in fields["cut"].array_value.values] == ["a", "b"]
    assert (fields["reason"].string_value, fields["large"].string_value) == ("ü\n", str(1 << 70))
    assert "empty" not in fields


def test_without_an_endpoint_nothing_is_sent_and_a_wrong_one_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    with exported(lambda reason: pytest.fail(reason)) as take:
        take({"event": "step"})
        assert threading.active_count() == before
    for wrong in ("127.0.0.1:4318", "grpc://x:4317", "http://"):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", wrong)
        with pytest.raises(UsageError, match="is no address"), exported(print):
            pass
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with collector() as there:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", there.address + "/mine")
        with exported(lambda reason: pytest.fail(reason)) as take:
            take({"event": "step"})
    assert [path for path, _, _ in there.asked] == ["/mine"]


def test_what_a_busy_collector_refuses_is_sent_again_and_what_it_never_takes_is_dropped() -> None:
    said: list[str] = []
    with collector(503, 503, 200) as there:
        exporter = Exporter(there.address, {}, said.append)
        exporter.take({"event": "a"})
        there.wait(3)
        exporter.close()
    assert len(set(there.taken()[:3])) == 1
    assert said == [f"{there.address}: it answers 503 Service Unavailable"]  # Once.
    said.clear()
    with collector(400, 200) as there:
        exporter = Exporter(there.address, {}, said.append)
        exporter.take({"event": "a"})
        there.wait(1)
        exporter.take({"event": "b"})
        there.wait(2)
        exporter.close()
    assert [b'"a"' in data for data in there.taken()] == [True, False]
    assert said == [f"{there.address}: it answers 400 Bad Request"]


def test_a_collector_that_is_gone_holds_up_nothing() -> None:
    with collector() as there:
        gone = there.address
    news, said = threading.Event(), list[str]()

    def failed(reason: str) -> None:
        said.append(reason)
        news.set()

    exporter = Exporter(gone, {}, failed)
    exporter.take({"event": "step"})
    assert news.wait(120)
    exporter.close()
    assert len(said) == 1
    assert said[0].startswith(f"{gone}: not reached: ")


def test_of_what_waits_for_a_collector_the_oldest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "SEND_PERIOD", 3600.0)
    with collector() as there:
        exporter = Exporter(there.address, {}, pytest.fail)
        for number in range(MAX_HELD + 5):
            exporter.take({"event": "step", "step": number})
        exporter.close()  # Now they are sent.
        there.wait_for(lambda: sum(there.accepted) >= MAX_HELD)
    assert there.accepted == [MAX_BATCH] * (MAX_HELD // MAX_BATCH)
    first = records(there.asked[0][2]).scope_logs[0].log_records[0]
    assert first.attributes[0].value.int_value == 5


def test_join_exports_its_events_and_says_once_where_they_do_not_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Event] = []
    with collector(400) as there:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", there.address)
        with recorded("", Loggers([]), PeerConfig(home=tmp_path), shown.append) as on_event:
            on_event({"time": 1.0, "event": "step", "step": 7})
            there.wait_for_text(b"log.unsent")
    assert b'"step"' in there.taken()[0]
    assert [event["event"] for event in shown] == ["step", "log.unsent"]
