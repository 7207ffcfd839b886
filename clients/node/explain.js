#!/usr/bin/env node
// Explains photos by a camserve server, made of the .proto files alone.
//
//     npm install
//     node explain.js cat.jpg dog.jpg --out out --method gradcam --target "Egyptian cat"
//
// One photo is one call; several go over one stream, whose answers come as they are ready.
import { mkdir, readFile, writeFile } from "node:fs/promises";
import { basename, extname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTOS = fileURLToPath(new URL("../../protos", import.meta.url));
const MESSAGE = 64 * 2 ** 20; // bytes: gRPC's own limit, 4 MiB, is less than an overlay may have

// Names and fields are as in the .proto files; enums by their names, numbers of 64 bits as texts.
const definition = protoLoader.loadSync("camserve/v1/explain.proto", {
  includeDirs: [PROTOS],
  keepCase: true,
  longs: String,
  enums: String,
  defaults: true,
});
const { ExplainService } = grpc.loadPackageDefinition(definition).camserve.v1;

/** Opens a channel; several addresses, as a name's that stands for many servers, are taken in turn. */
export function connect(server, { ca, token } = {}) {
  const credentials = ca ? grpc.credentials.createSsl(ca) : grpc.credentials.createInsecure();
  const bearer = grpc.credentials.createFromMetadataGenerator((_, done) => {
    const metadata = new grpc.Metadata();
    metadata.set("authorization", `Bearer ${token}`);
    done(null, metadata);
  });
  if (token && !ca) throw new Error("a token goes over TLS only: say --ca");
  return new ExplainService(server, token ? grpc.credentials.combineChannelCredentials(credentials, bearer) : credentials, {
    "grpc.max_receive_message_length": MESSAGE,
    "grpc.service_config": JSON.stringify({ loadBalancingConfig: [{ round_robin: {} }] }),
  });
}

/** Makes a request of a photo's bytes: what is not said is left to the server. */
export function request(image, { model, methods = ["gradcam"], target } = {}) {
  return {
    model,
    image,
    methods: methods.map((name) => ({ name })),
    targets: target ? [{ label: target }] : [],
    rendering: { overlay: "IMAGE_FORMAT_JPEG" },
  };
}

/** Explains one photo. */
export function explain(client, asked, seconds = 30) {
  return new Promise((resolve, reject) => {
    client.explain(asked, { deadline: Date.now() + 1000 * seconds }, (error, response) =>
      error ? reject(error) : resolve(response),
    );
  });
}

/** Explains many over one stream; yields { number, response } or { number, error } as they are ready. */
export async function* explainMany(client, requests, seconds = 300) {
  const stream = client.explainStream({ deadline: Date.now() + 1000 * seconds });
  const sending = (async () => {
    let number = 0;
    for await (const asked of requests) {
      // The server reads ahead only as far as it has room: wait where it has none.
      if (!stream.write({ request_id: String(number++), request: asked })) {
        await new Promise((resolve) => stream.once("drain", resolve));
      }
    }
    stream.end();
  })();
  sending.catch(() => stream.cancel());
  for await (const reply of stream) {
    yield { number: Number(reply.request_id), response: reply.response, error: reply.error };
  }
  await sending;
}

async function* requestsFor(photos, options) {
  for (const photo of photos) yield request(await readFile(photo), options);
}

async function save(photo, response, folder) {
  const [why] = response.explanations;
  const path = join(folder, `${basename(photo, extname(photo))}.${why.method}.jpg`);
  await writeFile(path, why.overlay.data);
  const [best] = response.predictions;
  console.log(`${photo}: ${best.probability.toFixed(2)} ${best.label}; ${why.target.label} by ${why.layer}: ${path}`);
}

async function main() {
  const { values, positionals: photos } = parseArgs({
    allowPositionals: true,
    options: {
      server: { type: "string", default: "localhost:50051" },
      out: { type: "string", short: "o", default: "out" },
      method: { type: "string", default: "gradcam" },
      target: { type: "string" },
      model: { type: "string" },
      ca: { type: "string" },
      token: { type: "string", default: process.env.CAMSERVE_TOKEN },
    },
  });
  if (!photos.length) throw new Error("name a photo: node explain.js cat.jpg --out out");
  await mkdir(values.out, { recursive: true });
  const client = connect(values.server, { ca: values.ca && (await readFile(values.ca)), token: values.token });
  const options = { model: values.model, methods: [values.method], target: values.target };
  let failed = 0;
  try {
    if (photos.length === 1) {
      await save(photos[0], await explain(client, request(await readFile(photos[0]), options)), values.out);
      return 0;
    }
    for await (const { number, response, error } of explainMany(client, requestsFor(photos, options))) {
      if (response) await save(photos[number], response, values.out);
      else console.error(`${photos[number]}: ${error.message}`);
      failed += response ? 0 : 1;
    }
  } finally {
    client.close();
  }
  return failed ? 1 : 0;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  main().then(
    (code) => (process.exitCode = code),
    (error) => {
      console.error(`error: ${error.details ?? error.message}`); // a gRPC status has its words in details
      process.exitCode = 1;
    },
  );
}
