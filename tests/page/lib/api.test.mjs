// Calls of the HTTP/JSON API, against a server that tests write.
import assert from "node:assert/strict";
import http from "node:http";
import { test } from "node:test";
import { Api, ApiError, retrying } from "../../../clients/python/camserve/page/lib/api.js";

/** Start a server that answers with a function; return an Api for it and the requests that it received. */
async function serving(t, answer) {
  const received = [];
  const server = http.createServer(async (request, response) => {
    const parts = [];
    for await (const part of request) parts.push(part);
    received.push({ path: request.url, method: request.method, headers: request.headers, body: Buffer.concat(parts).toString() });
    await answer(request, response, received.length);
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  t.after(() => (server.closeAllConnections(), server.close()));
  const base = `http://127.0.0.1:${server.address().port}`;
  return { api: new Api({ base }), received, base };
}

const json = (response, status, body, headers = {}) =>
  response.writeHead(status, { "content-type": "application/json", ...headers }).end(JSON.stringify(body));

test("a call posts JSON with the token and returns the reply", async (t) => {
  const { base, received } = await serving(t, (_, response) => json(response, 200, { models: [{ name: "tiny" }] }));
  const api = new Api({ base, token: "secret" });

  assert.deepEqual(await api.call("ModelService/ListModels", { a: 1 }), { models: [{ name: "tiny" }] });
  const [{ path, method, headers, body }] = received;
  assert.deepEqual([path, method, body], ["/camserve.v1.ModelService/ListModels", "POST", '{"a":1}']);
  assert.deepEqual([headers["content-type"], headers.authorization], ["application/json", "Bearer secret"]);
});

test("addresses are relative to the page, and without a token none is sent", async () => {
  const calls = [];
  const fetch = async (...call) => (calls.push(call), new Response("{}"));
  await new Api({ fetch }).call("ExplainService/Explain");

  assert.equal(calls[0][0], "./camserve.v1.ExplainService/Explain");
  assert.equal("Authorization" in calls[0][1].headers, false);
});

test("an error has the code, fields, reason, request id and wait of the server", async (t) => {
  const details = [
    { type: "google.rpc.RequestInfo", value: "", debug: { requestId: "r1" } },
    { type: "google.rpc.BadRequest", value: "", debug: { fieldViolations: [{ field: "targets[0].label", description: "unknown" }] } },
    { type: "google.rpc.ErrorInfo", value: "", debug: { reason: "QUEUE_FULL", domain: "camserve" } },
  ];
  const error = { code: "resource_exhausted", message: "the queue is full", details };
  const { api } = await serving(t, (_, response) => json(response, 429, error, { "retry-after": "2" }));

  const found = await api.call("ExplainService/Explain").catch((caught) => caught);
  assert.ok(found instanceof ApiError);
  assert.deepEqual(
    [found.code, found.message, found.fields, found.reason, found.requestId, found.retryAfter, found.canRetry],
    ["resource_exhausted", "the queue is full", [{ field: "targets[0].label", description: "unknown" }], "QUEUE_FULL", "r1", 2000, true],
  );
});

for (const [status, code] of [[401, "unauthenticated"], [403, "permission_denied"], [404, "unimplemented"], [502, "unavailable"], [500, "unknown"]]) {
  test(`status ${status} without a Connect error is ${code}`, async (t) => {
    const { api } = await serving(t, (_, response) => response.writeHead(status).end("<html>"));
    const found = await api.call("ExplainService/Explain").catch((caught) => caught);
    assert.deepEqual([found.code, found.fields, found.retryAfter], [code, [], null]);
  });
}

test("a server that does not answer is unavailable, and one that answers nonsense has an internal error", async (t) => {
  const { api } = await serving(t, (request) => request.socket.destroy());
  assert.equal((await api.call("A/B").catch((caught) => caught)).code, "unavailable");
  const { api: other } = await serving(t, (_, response) => response.end("<html>"));
  assert.equal((await other.call("A/B").catch((caught) => caught)).code, "internal");
});

test("an aborted call is cancelled at the server too", async (t) => {
  let gone;
  const left = new Promise((done) => (gone = done));
  const abort = new AbortController();
  const { api } = await serving(t, (request) => {
    request.socket.on("close", gone);
    abort.abort();
  });
  const found = await api.call("ExplainService/Explain", {}, { signal: abort.signal }).catch((caught) => caught);
  assert.equal(found.code, "canceled");
  await left;
});

const line = (reply) => `${JSON.stringify(reply)}\n`;

test("a stream yields replies as they come, also if a line or a character is torn", async (t) => {
  const text = Buffer.from(line({ requestId: "1", progress: { rowsDone: 1 } }) + line({ requestId: "1", response: { model: "ü" } }));
  const { api, received } = await serving(t, async (_, response) => {
    response.writeHead(200, { "content-type": "application/x-ndjson" });
    for (const byte of text) {
      response.write(Buffer.from([byte]));
      await new Promise(setImmediate);
    }
    response.end();
  });
  const requests = [{ requestId: "1", request: { model: "a" } }, { requestId: "2", request: {} }];
  const replies = [];
  for await (const reply of api.explainStream(requests)) replies.push(reply);

  assert.deepEqual(replies, [{ requestId: "1", progress: { rowsDone: 1 } }, { requestId: "1", response: { model: "ü" } }]);
  assert.equal(received[0].body, requests.map(line).join(""));
  assert.equal(received[0].headers["content-type"], "application/x-ndjson");
});

test("an error of one image does not end the stream, that of the stream does", async (t) => {
  const { api } = await serving(t, (_, response) => {
    response.write(line({ requestId: "1", error: { code: 3, message: "no image", fields: [{ field: "image" }], retryAfterMs: 5 } }));
    response.end(line({ streamError: { code: "unavailable", message: "draining" } }));
  });
  const stream = api.explainStream([]);
  const { value } = await stream.next();
  assert.deepEqual([value.error.code, value.error.message, value.error.retryAfter], ["invalid_argument", "no image", 5]);
  await assert.rejects(stream.next(), { code: "unavailable", message: "draining" });
});

test("an explanation reports its progress", async (t) => {
  const { api, received } = await serving(t, (_, response) => {
    response.end(line({ requestId: "1", progress: { rowsTotal: 8 } }) + line({ requestId: "1", response: { model: "two" } }));
  });
  const seen = [];

  assert.deepEqual(await api.explain({ topK: 1 }, { onProgress: (progress) => seen.push(progress) }), { model: "two" });
  assert.deepEqual(seen, [{ rowsDone: 0, rowsTotal: 8 }]);
  assert.deepEqual(JSON.parse(received[0].body), { requestId: "1", request: { topK: 1, progress: true } });
});

test("a stream that ends without the reply is unavailable", async (t) => {
  const { api } = await serving(t, (_, response) => response.end(line({ requestId: "1", progress: {} })));
  await assert.rejects(api.explain({}, { onProgress() {} }), { code: "unavailable" });
});

test("leaving a stream early closes its connection", async (t) => {
  let gone;
  const left = new Promise((done) => (gone = done));
  const { api } = await serving(t, (request, response) => {
    request.socket.on("close", gone);
    response.write(line({ requestId: "1", progress: {} }));
  });
  for await (const _ of api.explainStream([])) break;
  await left;
});

test("a call is sent again while the server restarts, and waits as the server says", async (t) => {
  const { api } = await serving(t, (_, response, count) =>
    count < 3 ? json(response, 503, { code: "unavailable", message: "starting" }, { "retry-after": "0" }) : json(response, 200, { count }),
  );
  const waits = [];
  const reply = await retrying(() => api.call("A/B"), { onWait: (error, pause) => waits.push([error.message, pause]) });

  assert.deepEqual([reply, waits], [{ count: 3 }, [["starting", 0], ["starting", 0]]]);
});

test("an error of the caller is not sent again", async () => {
  let calls = 0;
  const wrong = async () => (calls++, Promise.reject(new ApiError("invalid_argument", "no")));
  await assert.rejects(retrying(wrong, { onWait: () => {} }), { code: "invalid_argument" });
  assert.equal(calls, 1);
});
