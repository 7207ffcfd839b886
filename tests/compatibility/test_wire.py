"""Old clients work with new servers, and new clients with old servers."""

import json

import grpc
import pytest

import camserve
from compatibility import calls, comparing, record, storage, surfaces, tape

pytestmark = pytest.mark.slow
RECORDED = storage.read("calls")
INFERENCES = storage.read("inferences")
WIRE = storage.read("wire")
KNOWN = {name.replace("inference.", "open_inference.v2.", 1): fields for name, fields in WIRE["messages"].items()}
PARAMETERS = {
    method["name"]: {parameter["name"] for parameter in method["parameters"]} for method in RECORDED["methods"]["value"]
}
CALLS = calls.everything(PARAMETERS)


@pytest.fixture(scope="module")
def channel(address):
    with grpc.insecure_channel(address) as channel:
        yield channel


@pytest.fixture(scope="module")
def client(replay_server):
    with camserve.Client(replay_server.address, retries=0) as client:
        yield client


def test_server_describes_every_recorded_message_enum_and_rpc(address):
    assert comparing.lost(WIRE, record.described(address)) == []


def test_stubs_have_every_recorded_message_enum_and_rpc():
    own_package = {
        part: {name: entry for name, entry in entries.items() if name.startswith("camserve.v1.")}
        for part, entries in WIRE.items()
    }

    assert len(own_package["services"]) == 3
    assert comparing.lost(own_package, surfaces.descriptors(record.stub_files())) == []


def changed_replies(channel, entry, *, streams):
    """Send recorded requests again; return a line for each difference from the recorded replies."""
    requests = [tape.data_of(request) for request in entry["requests"]]
    now = tape.exchange(channel, entry["rpc"], requests, streams=streams)
    if "error" in entry:
        assert "error" in now
        return comparing.lost(failure(entry["error"]), failure(now["error"]))
    assert "error" not in now, now
    if entry["rpc"].startswith("/grpc.health."):
        return comparing.lost(entry["replies"], now["replies"])
    kind = tape.messages(entry["rpc"])[1]
    before, after = ([kind.FromString(tape.data_of(reply)) for reply in source["replies"]] for source in (entry, now))
    if entry["rpc"] in tape.STREAMS:
        before, after = map(by_request, (before, after))
    assert len(before) == len(after)
    pairs = zip(before, after, strict=True)
    return [line for then, new in pairs for line in comparing.differences(then, new, KNOWN)]


def by_request(replies):
    """Return the final reply to each request of a stream, in the order of the requests."""
    ended = [reply for reply in replies if reply.WhichOneof("outcome") != "progress"]
    return sorted(ended, key=lambda reply: int(reply.request_id.rpartition("-")[2]))


def failure(error):
    """Return the status code of an error and its invalid fields, without its wording."""
    return {"code": error["code"], "fields": tape.fields_of(error)}


@pytest.mark.parametrize("name", CALLS)
def test_server_answers_recorded_requests_as_recorded(name, channel):
    for entry in RECORDED[name]["exchanges"]:
        assert changed_replies(channel, entry, streams=entry["rpc"] in tape.STREAMS) == []


def test_server_unloads_and_loads_a_model_as_recorded(channel):
    for name in calls.LOADING:
        (entry,) = RECORDED[name]["exchanges"]
        assert changed_replies(channel, entry, streams=False) == [], name


@pytest.mark.parametrize("name", INFERENCES)
def test_server_answers_recorded_inferences_as_recorded(name, channel):
    entry = INFERENCES[name]

    assert changed_replies(channel, entry, streams=entry["rpc"].endswith("StreamInfer")) == []


def changed_requests(replay_server, name):
    """Return a line for each difference between the recorded requests and those that were sent."""
    entries = RECORDED[name]["exchanges"]
    assert [path for path, _ in replay_server.requests] == [entry["rpc"] for entry in entries]
    lines = []
    for entry, (path, requests) in zip(entries, replay_server.requests, strict=True):
        if path.startswith("/grpc.health."):
            lines += comparing.lost([tape.data_of(request) for request in entry["requests"]], requests)
            continue
        kind = tape.messages(path)[0]
        for then, now in zip(entry["requests"], requests, strict=True):
            lines += comparing.differences(*map(kind.FromString, (tape.data_of(then), now)), KNOWN)
    return lines


@pytest.mark.parametrize("name", [*CALLS, *calls.LOADING])
def test_client_sends_and_reads_as_recorded(name, replay_server, client):
    replay_server.play(RECORDED[name]["exchanges"])
    value = record.call_outcome(client, *{**CALLS, **calls.LOADING}[name])

    assert changed_requests(replay_server, name) == []
    assert comparing.lost(RECORDED[name]["value"], value) == []
    assert json.loads(json.dumps(value)) == value  # the next record can be written


async def call_outcome(client, function, args, options):
    try:
        if function == "explain_many":
            return surfaces.value([result async for result in client.explain_many(*args, **options)])
        return surfaces.value(await getattr(client, function)(*args, **options))
    except camserve.CamserveError as error:
        return surfaces.value(error)


async def test_async_client_sends_and_reads_as_recorded(replay_server):
    async with camserve.AsyncClient(replay_server.address, retries=0) as client:
        for name, call in {**CALLS, **calls.LOADING}.items():
            replay_server.play(RECORDED[name]["exchanges"])
            value = await call_outcome(client, *call)

            assert changed_requests(replay_server, name) == [], name
            assert comparing.lost(RECORDED[name]["value"], value) == [], name
