#!/usr/bin/env node
// Explain photos with a camserve server. The client loads the .proto files and needs no generated code.
//
//     npm install
//     node explain.js cat.jpg dog.jpg --out out --method gradcam --target "Egyptian cat"
//
// One photo is sent as one call. Several photos are sent over one stream, whose replies arrive as they are ready.
import { randomUUID } from "node:crypto";
import { mkdir, readFile, rename, writeFile } from "node:fs/promises";
import { basename, dirname, extname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTOS = fileURLToPath(new URL("../../protos", import.meta.url));
const MAX_MESSAGE_BYTES = 64 * 2 ** 20; // an overlay can be larger than gRPC's default limit of 4 MiB

// Fields have the names in the .proto files, enums are names, and 64-bit integers are strings.
const definition = protoLoader.loadSync("camserve/v1/explain.proto", {
  includeDirs: [PROTOS],
  keepCase: true,
  longs: String,
  enums: String,
  defaults: true,
});
const { ExplainService } = grpc.loadPackageDefinition(definition).camserve.v1;

/** Opens a channel. If a host name has several addresses, they are used in turn. */
export function connect(server, { ca, token } = {}) {
  const credentials = ca ? grpc.credentials.createSsl(ca) : grpc.credentials.createInsecure();
  const bearer = grpc.credentials.createFromMetadataGenerator((_, done) => {
    const metadata = new grpc.Metadata();
    metadata.set("authorization", `Bearer ${token}`);
    done(null, metadata);
  });
  if (token && !ca) throw new Error("a token requires TLS: use --ca");
  return new ExplainService(server, token ? grpc.credentials.combineChannelCredentials(credentials, bearer) : credentials, {
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.enable_http_proxy": ca ? 1 : 0, // without TLS, a proxy could read and change all messages
    "grpc.service_config": JSON.stringify({ loadBalancingConfig: [{ round_robin: {} }] }),
  });
}

/** Creates a request from the bytes of a photo. The server chooses the options that are left out. */
export function request(image, { model, methods = ["gradcam"], target, like } = {}) {
  const targets = like ? [{ similarity: { image: like } }] : target ? [{ label: target }] : [];
  return {
    model,
    image,
    methods: methods.map((name) => ({ name })),
    targets,
    rendering: { overlay: "IMAGE_FORMAT_JPEG" },
  };
}

/** Explains one photo; the timeout is in seconds. */
export function explain(client, explainRequest, timeout = 30) {
  return new Promise((resolve, reject) => {
    client.explain(explainRequest, { deadline: Date.now() + 1000 * timeout }, (error, response) =>
      error ? reject(error) : resolve(response),
    );
  });
}

/** Explains many photos over one stream; yields { number, response } or { number, error } as they are ready. */
export async function* explainMany(client, requests, timeout = 300) {
  const stream = client.explainStream({ deadline: Date.now() + 1000 * timeout });
  let [ended, wake] = [false, () => {}];
  stream.on("drain", () => wake());
  stream.on("status", () => { // the stream has ended, and no more requests are needed
    ended = true;
    wake();
  });
  const sending = (async () => {
    let number = 0;
    for await (const explainRequest of requests) {
      if (ended) break; // which also closes the generator of the requests
      // Backpressure: the server reads ahead only as far as it has room, so wait until the buffer is drained.
      const hasRoom = stream.write({ request_id: String(number++), request: explainRequest });
      if (!hasRoom && !ended) await new Promise((resolve) => (wake = resolve));
    }
    stream.end();
  })();
  let requestsError; // thrown by the requests themselves; the stream only reports that it was cancelled
  sending.catch((error) => {
    requestsError = error;
    stream.cancel();
  });
  try {
    for await (const reply of stream) {
      yield { number: Number(reply.request_id), response: reply.response, error: reply.error };
    }
    await sending;
  } catch (error) {
    throw requestsError ?? error;
  } finally {
    stream.cancel(); // if the caller leaves the loop early; no effect on a stream that has ended
  }
}

/** Returns a unique name for each photo's picture: its stem, with a number if another has it. Case is ignored. */
export function namesOf(photos) {
  const taken = new Set();
  return photos.map((photo) => {
    const stem = basename(photo, extname(photo));
    let name = stem;
    for (let number = 2; taken.has(name.toLowerCase()); number++) name = `${stem}-${number}`;
    taken.add(name.toLowerCase());
    return name;
  });
}

/** Escapes control characters in text from a server or in a file name, so that a terminal does not act on them. */
export function printable(text) {
  return text.replace(/[\p{Cc}\p{Zl}\p{Zp}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu, (character) =>
    `\\u{${character.codePointAt(0).toString(16)}}`,
  );
}

/** Writes a temporary file and renames it: a link at the path is replaced, not followed. */
async function writeAtomically(path, data) {
  const temporary = join(dirname(path), `.${randomUUID()}`);
  await writeFile(temporary, data, { flag: "wx" });
  await rename(temporary, path);
}

/** Formats a prediction: its probability, or its score if the model is a regression, whose probability is 0. */
function formatPrediction({ label, class_index: index, probability, score }) {
  return `${(probability || score).toFixed(2)} ${label || `class ${index}`}`;
}

async function save(photo, name, response, folder) {
  const [explanation] = response.explanations;
  const path = join(folder, `${name}.${explanation.method.replace(/[^\w-]+/g, "_")}.jpg`);
  await writeAtomically(path, explanation.overlay.data);
  const [best] = response.predictions; // undefined for a model that returns embeddings
  const { target, layer } = explanation;
  const label = target?.label || (target ? `class ${target.class_index}` : "all of it");
  const line = `${photo}: ${best ? `${formatPrediction(best)}; ` : ""}${label} by ${layer || "pixels"}: ${path}`;
  console.log(printable(line));
}

/** Explains several photos over one stream; returns the number of photos that failed. */
async function saveAll(client, photos, options, folder) {
  const names = namesOf(photos);
  const sent = []; // index of the photo of each request
  let failed = 0;
  const fail = (index, error) => {
    failed += 1;
    console.error(printable(`${photos[index]}: ${error.message}`));
  };
  async function* requests() {
    for (const index of photos.keys()) {
      try {
        const explainRequest = request(await readFile(photos[index]), options);
        sent.push(index);
        yield explainRequest;
      } catch (error) {
        fail(index, error); // the other photos are still explained
      }
    }
  }
  for await (const { number, response, error } of explainMany(client, requests())) {
    const index = sent[number];
    if (response) await save(photos[index], names[index], response, folder);
    else fail(index, error);
  }
  return failed;
}

async function main() {
  const { values, positionals: photos } = parseArgs({
    allowPositionals: true,
    options: {
      server: { type: "string", default: "localhost:50051" },
      out: { type: "string", short: "o", default: "out" },
      method: { type: "string", default: "gradcam" },
      target: { type: "string" },
      like: { type: "string" }, // a photo: explain the similarity of the other photos to it
      model: { type: "string" },
      ca: { type: "string" },
      token: { type: "string", default: process.env.CAMSERVE_TOKEN },
    },
  });
  if (!photos.length) throw new Error("no photo given: node explain.js cat.jpg --out out");
  await mkdir(values.out, { recursive: true });
  const client = connect(values.server, { ca: values.ca && (await readFile(values.ca)), token: values.token });
  const like = values.like && (await readFile(values.like));
  const options = { model: values.model, methods: [values.method], target: values.target, like };
  try {
    if (photos.length > 1) return (await saveAll(client, photos, options, values.out)) ? 1 : 0;
    const response = await explain(client, request(await readFile(photos[0]), options));
    await save(photos[0], ...namesOf(photos), response, values.out);
    return 0;
  } finally {
    client.close();
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  main().then(
    (code) => (process.exitCode = code),
    (error) => {
      console.error(printable(`error: ${error.details ?? error.message}`)); // the message of a gRPC error is in details
      process.exitCode = 1;
    },
  );
}
