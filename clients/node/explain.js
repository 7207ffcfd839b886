#!/usr/bin/env node
// Explains photos by a camserve server, made of the .proto files alone.
//
//     npm install
//     node explain.js cat.jpg dog.jpg --out out --method gradcam --target "Egyptian cat"
//
// One photo is one call; several go over one stream, whose answers come as they are ready.
import { randomUUID } from "node:crypto";
import { mkdir, readFile, rename, writeFile } from "node:fs/promises";
import { basename, dirname, extname, join } from "node:path";
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
    "grpc.enable_http_proxy": ca ? 1 : 0, // without TLS a proxy could read and change everything
    "grpc.service_config": JSON.stringify({ loadBalancingConfig: [{ round_robin: {} }] }),
  });
}

/** Makes a request of a photo's bytes: what is not said is left to the server. */
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
  let [over, wake] = [false, () => {}];
  stream.on("drain", () => wake());
  stream.on("status", () => { // however it ends: what is not asked yet is not wanted any more
    over = true;
    wake();
  });
  const sending = (async () => {
    let number = 0;
    for await (const asked of requests) {
      if (over) break; // which closes the requests
      // The server reads ahead only as far as it has room: wait where it has none.
      const room = stream.write({ request_id: String(number++), request: asked });
      if (!room && !over) await new Promise((resolve) => (wake = resolve));
    }
    stream.end();
  })();
  let broken; // what the requests themselves failed by: the stream knows only that it was cancelled
  sending.catch((error) => {
    broken = error;
    stream.cancel();
  });
  try {
    for await (const reply of stream) {
      yield { number: Number(reply.request_id), response: reply.response, error: reply.error };
    }
    await sending;
  } catch (error) {
    throw broken ?? error;
  } finally {
    stream.cancel(); // for who leaves the loop early; of no consequence at its end
  }
}

/** Gives each photo a name for its picture: its own, with a number where another has it, in upper or lower case. */
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

/** Escapes text from a server, or a file's name, so that a terminal prints it and does not act on it. */
export function printable(text) {
  return text.replace(/[\p{Cc}\p{Zl}\p{Zp}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu, (character) =>
    `\\u{${character.codePointAt(0).toString(16)}}`,
  );
}

/** Writes a file under a random name and moves it into place: a link at its path is replaced, not followed. */
async function put(path, data) {
  const beside = join(dirname(path), `.${randomUUID()}`);
  await writeFile(beside, data, { flag: "wx" });
  await rename(beside, path);
}

/** Says what was predicted; of a model that predicts a number, which has no probability, its score. */
function told({ label, class_index: index, probability, score }) {
  return `${(probability || score).toFixed(2)} ${label || `class ${index}`}`;
}

async function save(photo, name, response, folder) {
  const [why] = response.explanations;
  const path = join(folder, `${name}.${why.method.replace(/[^\w-]+/g, "_")}.jpg`);
  await put(path, why.overlay.data);
  const [best] = response.predictions; // there is none of an embedding
  const target = why.target?.label || (why.target ? `class ${why.target.class_index}` : "all of it");
  const line = `${photo}: ${best ? `${told(best)}; ` : ""}${target} by ${why.layer || "pixels"}: ${path}`;
  console.log(printable(line));
}

/** Explains several photos over one stream; returns how many could not be. */
async function saveAll(client, photos, options, folder) {
  const [names, sent] = [namesOf(photos), []];
  let failed = 0;
  const fail = (place, error) => {
    failed += 1;
    console.error(printable(`${photos[place]}: ${error.message}`));
  };
  async function* requests() {
    for (const place of photos.keys()) {
      try {
        const asked = request(await readFile(photos[place]), options);
        sent.push(place);
        yield asked;
      } catch (error) {
        fail(place, error); // one that cannot be read harms no other
      }
    }
  }
  for await (const { number, response, error } of explainMany(client, requests())) {
    const place = sent[number];
    if (response) await save(photos[place], names[place], response, folder);
    else fail(place, error);
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
      like: { type: "string" }, // a photo: how alike the others are to it is explained, as of an embedding
      model: { type: "string" },
      ca: { type: "string" },
      token: { type: "string", default: process.env.CAMSERVE_TOKEN },
    },
  });
  if (!photos.length) throw new Error("name a photo: node explain.js cat.jpg --out out");
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
      console.error(printable(`error: ${error.details ?? error.message}`)); // a gRPC status has its words in details
      process.exitCode = 1;
    },
  );
}
