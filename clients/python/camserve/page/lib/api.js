/** Calls of the server's HTTP/JSON API, with relative addresses, and its errors. */

const RETRYABLE = ["unavailable", "resource_exhausted"];
const GRPC_CODES = [
  "ok", "canceled", "unknown", "invalid_argument", "deadline_exceeded", "not_found", "already_exists",
  "permission_denied", "resource_exhausted", "failed_precondition", "aborted", "out_of_range", "unimplemented",
  "internal", "unavailable", "data_loss", "unauthenticated",
];

/**
 * Error of a call: Connect's code ("unavailable" if no server answers, "canceled" if aborted), violations [{field,
 * description}], milliseconds to wait before a retry or null, the server's reason, and the id in its log.
 */
export class ApiError extends Error {
  constructor(code, message, { fields = [], retryAfter = null, reason = "", requestId = "" } = {}) {
    super(message);
    this.name = "ApiError";
    Object.assign(this, { code, fields, retryAfter, reason, requestId });
  }

  get canRetry() {
    return this.retryAfter !== null || (RETRYABLE.includes(this.code) && this.reason !== "MODEL_FAILED");
  }
}

/** Convert the body of a failed response, Connect's error JSON, into an ApiError. */
export function errorOf(body, status = 500, headers = new Headers()) {
  const details = Array.isArray(body?.details) ? body.details : [];
  const find = (name) => details.find(({ type }) => type === `google.rpc.${name}`)?.debug ?? {};
  return new ApiError(body?.code ?? codeOfStatus(status), body?.message || `the server answered with status ${status}`, {
    fields: (find("BadRequest").fieldViolations ?? []).map(({ field = "", description = "" }) => ({ field, description })),
    retryAfter: headers.has("retry-after") ? 1000 * Number(headers.get("retry-after")) : null,
    reason: find("ErrorInfo").reason ?? "",
    requestId: find("RequestInfo").requestId ?? headers.get("x-request-id") ?? "",
  });
}

function codeOfStatus(status) {
  const known = { 400: "internal", 401: "unauthenticated", 403: "permission_denied", 404: "unimplemented", 413: "resource_exhausted" };
  return known[status] ?? ([429, 502, 503, 504].includes(status) ? "unavailable" : "unknown");
}

/** Convert an `Error` of a stream into an ApiError. */
export function streamError({ code = 2, message = "", fields = [], retryAfterMs = null }, requestId = "") {
  return new ApiError(GRPC_CODES[code] ?? "unknown", message, { fields, retryAfter: retryAfterMs, requestId });
}

/** Client of one server. */
export class Api {
  constructor({ base = ".", token = "", fetch = (...call) => globalThis.fetch(...call) } = {}) {
    Object.assign(this, { base, token, fetch });
  }

  /** Send a unary call, such as "ExplainService/Explain", and return its response. */
  async call(method, request = {}, { signal } = {}) {
    const response = await this.#post(method, "application/json", JSON.stringify(request), signal);
    return await this.#read(() => response.json(), signal);
  }

  /**
   * Send requests [{requestId, request}] over one stream; yield each reply as it comes: {requestId, response},
   * {requestId, error} with an ApiError, or {requestId, progress: {rowsDone, rowsTotal}}.
   */
  async *explainStream(requests, { signal } = {}) {
    const lines = requests.map((request) => `${JSON.stringify(request)}\n`).join("");
    const response = await this.#post("ExplainService/ExplainStream", "application/x-ndjson", lines, signal);
    for await (const line of readLines(response.body, (read) => this.#read(read, signal))) {
      const reply = JSON.parse(line);
      if (reply.streamError) throw errorOf(reply.streamError);
      yield reply.error ? { ...reply, error: streamError(reply.error, reply.requestId) } : reply;
    }
  }

  /** Explain one image; call onProgress with {rowsDone, rowsTotal} meanwhile. */
  async explain(request, { signal, onProgress } = {}) {
    const requests = [{ requestId: "1", request: { ...request, progress: true } }];
    for await (const { response, error, progress } of this.explainStream(requests, { signal })) {
      if (error) throw error;
      if (response) return response;
      onProgress({ rowsDone: 0, rowsTotal: 0, ...progress });
    }
    throw new ApiError("unavailable", "the connection ended before the reply");
  }

  async #post(method, type, body, signal) {
    const headers = { "Content-Type": type, "Connect-Protocol-Version": "1" };
    if (this.token) headers.Authorization = `Bearer ${this.token}`;
    const address = `${this.base}/camserve.v1.${method}`;
    const response = await this.#read(() => this.fetch(address, { method: "POST", headers, body, signal }), signal);
    if (response.ok) return response;
    throw errorOf(await response.json().catch(() => null), response.status, response.headers);
  }

  async #read(read, signal) {
    try {
      return await read();
    } catch (error) {
      if (signal?.aborted) throw new ApiError("canceled", "the request was cancelled");
      if (error instanceof SyntaxError) throw new ApiError("internal", "the server sent an answer that is not JSON");
      throw new ApiError("unavailable", `the server cannot be reached (${error.message})`);
    }
  }
}

async function* readLines(body, guarded) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (let part = await guarded(() => reader.read()); !part.done; part = await guarded(() => reader.read())) {
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      yield* lines.filter((line) => line.trim());
    }
    if (rest.trim()) yield rest;
  } finally {
    await reader.cancel().catch(() => {}); // a caller that leaves early also ends the request
  }
}

/**
 * Send a call again while the server restarts, starts or is full, with growing pauses. Before each, call onWait with the
 * error and the pause in milliseconds.
 */
export async function retrying(call, { onWait }) {
  for (let shortest = 250; ; shortest *= 2) {
    try {
      return await call();
    } catch (error) {
      if (!error.canRetry) throw error;
      const pause = error.retryAfter ?? Math.min(5000, shortest);
      onWait(error, pause);
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }
}
